"""What vLLM's workers can do for us beside what they do by themselves (`--worker-extension-cls`).

vLLM mixes the class into its worker, so `self` is the worker. The module is imported by every worker of a server that
`server.command` starts: it imports vLLM only when a method is called.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from asyncgrpo_core.sync.fingerprint import fingerprints


class WeightFingerprints:
    """Adds one method, called by name through /collective_rpc."""

    def weight_fingerprints(self) -> dict[str, str]:
        """Digests (sync/fingerprint.py) of this worker's parameters, by the keys that /weight_checker has."""
        worker: Any = self
        prefix = worker._weight_checksum_prefix()
        return {prefix + name: digest for name, digest in model_fingerprints(worker.model_runner.get_model()).items()}


def model_fingerprints(model: nn.Module) -> dict[str, str]:
    """Digests of a served model's parameters; one that vLLM keeps in parts has one for each of them."""
    from vllm.model_executor.model_loader.weight_checksum import _weights

    return fingerprints(_weights(model))
