"""A server's refusal as an error: its own words, and the flag that would have helped."""

from __future__ import annotations

import re

import httpx

from asyncgrpo_core.errors import ServerRefusedError
from asyncgrpo_core.server.adapters import LOAD_ROUTE, UNLOAD_ROUTE

_DEV_ROUTES = frozenset(
    [
        "/pause",
        "/resume",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/weight_checker",
        "/get_world_size",
        "/reset_prefix_cache",
        "/server_info",
    ]
)

# A worker's error arrives inside two sentences that say nothing about it.
_RPC_WRAPPER = re.compile(
    r"Call to collective_rpc method failed: Worker failed with error '(.*)', "
    r"please check the stack trace above for the root cause",
    re.S,
)


def refusal(base_url: str, method: str, route: str, response: httpx.Response) -> ServerRefusedError:
    """The error for a reply that is not 200, with the flag to set where that is known."""
    status = response.status_code
    message = f"The vLLM server at {base_url} answered {status} to {method} {route}: {_error_text(response)}"
    if status in (404, 405) and route in _DEV_ROUTES:
        return ServerRefusedError(message, f"{route} needs VLLM_SERVER_DEV_MODE=1 in the server's environment.")
    if status in (404, 405) and route in (LOAD_ROUTE, UNLOAD_ROUTE) and "dapter" not in _error_text(response):
        return ServerRefusedError(
            message,
            f"{route} needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the server's environment.",
        )
    if "eight transfer not configured" in message:
        return ServerRefusedError(
            message,
            "Start the server with --weight-transfer-config and the backend of this run, "
            'e.g. --weight-transfer-config \'{"backend": "nccl"}\'.',
        )
    if status >= 500:
        return ServerRefusedError(message, "The reason is in the server's log.")
    return ServerRefusedError(message)


def _error_text(response: httpx.Response) -> str:
    """The server's own words, ending with a full stop."""
    text = _RPC_WRAPPER.sub(lambda match: match[1], _unwrapped(response)).strip()[:1000]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _unwrapped(response: httpx.Response) -> str:
    """The message out of the JSON shapes that vLLM and FastAPI put it in."""
    try:
        body = response.json()
    except ValueError:
        return response.text or "(empty reply)"
    if isinstance(body, dict):
        for key in ("error", "detail", "message"):
            value = body.get(key)
            if isinstance(value, dict) and "message" in value:
                return str(value["message"])
            if value:
                return str(value)
    return str(body)
