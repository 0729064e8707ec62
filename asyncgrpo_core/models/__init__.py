"""The policy: loading, packed attention, the chunked head, the packed forward, and its weights for a server."""
