"""The control side of a vLLM server's HTTP surface: state, pausing, weights, the canary. (Rollouts: generation.py.)

What differs between vLLM 0.26 and 0.33 is kept here and in capabilities.py:

- The routes are the same over these versions; only the modules behind them moved.
- 0.26 reads a JSON body in /start_weight_update and answers 400 to an empty one; later ones ignore a body. So a body
  is always sent.
- /finish_weight_update takes {"weight_version"} only where the OpenAPI description says that it has a body.
- /server_info?config_format=json and everything that pauses or writes exists only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from asyncgrpo_core.errors import ServerError, ServerRefusedError
from asyncgrpo_core.guard import GuardedProcess
from asyncgrpo_core.server.adapters import LOAD_ROUTE, UNLOAD_ROUTE
from asyncgrpo_core.server.capabilities import ServerCapabilities, parse_capabilities
from asyncgrpo_core.server.refusals import refusal

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0


class VLLMControl:
    """One server, synchronously. Thread-safe; closes with `close()` or as a context manager.

    Args:
        base_url: e.g. "http://127.0.0.1:8000".
        timeout_s: deadline of one call that pauses, resumes or moves weights.
        info_timeout_s: deadline of one question; the first /server_info collects the system's environment (seconds).
    """

    def __init__(self, base_url: str, timeout_s: float = 1800.0, *, info_timeout_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.info_timeout_s = info_timeout_s
        # vLLM closes idle connections after 5 s and after an error; a kept one would now and then be written to as it
        # closes, and these calls must not be sent twice. They are few: each takes a connection of its own.
        limits = httpx.Limits(max_keepalive_connections=0)
        # trust_env=False: a proxy variable must not catch calls to a server on this host.
        self._http = httpx.Client(base_url=self.base_url, limits=limits, trust_env=False)
        self._served_model: str | None = None

    def __enter__(self) -> VLLMControl:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- state

    def is_healthy(self) -> bool:
        """Whether /health answers 200 within a few seconds."""
        try:
            return self._http.get("/health", timeout=_HEALTH_TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(
        self,
        timeout_s: float,
        process: GuardedProcess | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until the server is healthy.

        Args:
            timeout_s: seconds to wait at most.
            process: the server's process when it is ours; its end ends the wait.
            on_progress: called every few seconds with a line of text.

        Raises:
            ServerError: not healthy in time, or its process ended.
        """
        start = time.monotonic()
        next_progress = start + 5.0
        while not self.is_healthy():
            waited = time.monotonic() - start
            if process is not None and (code := process.poll()) is not None:
                raise ServerError(
                    f"The vLLM server process ended (exit code {code}) before it was ready.",
                    f"Its log is {process.log_path}.",
                )
            if waited > timeout_s:
                raise ServerError(
                    f"No healthy vLLM server answers at {self.base_url} (waited {timeout_s:.0f} s).",
                    "Start it, or correct the URL (vllm_server_base_url, or server.url in a run's config).",
                )
            if on_progress is not None and time.monotonic() > next_progress:
                next_progress += 5.0
                on_progress(f"waiting for the vLLM server at {self.base_url}, {waited:.0f} s")
            time.sleep(0.25)

    def capabilities(self) -> ServerCapabilities:
        """Ask the server what it is and what it has.

        Raises:
            ServerError: it does not answer, or is no vLLM server.
        """
        openapi = self._call("GET", "/openapi.json", timeout_s=self.info_timeout_s)
        info = None
        if "/server_info" in openapi.get("paths", {}):
            info = self._call("GET", "/server_info", params={"config_format": "json"}, timeout_s=self.info_timeout_s)
        return parse_capabilities(
            version=self._call("GET", "/version", timeout_s=self.info_timeout_s),
            openapi=openapi,
            models=self._call("GET", "/v1/models", timeout_s=self.info_timeout_s),
            server_info=info,
        )

    def world_size(self) -> int:
        """Processes of the server that hold weights, over tensor, pipeline and data parallelism."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    # -- pausing

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Stop scheduling and return when the device is idle.

        Args:
            mode: "keep" freezes running requests until `resume`, "wait" lets them finish, "abort" ends them.
            clear_cache: drop keys and values, also those of frozen requests, which are computed anew after
                `resume`; False keeps them.
        """
        self._call("POST", "/pause", params={"mode": mode, "clear_cache": str(clear_cache).lower()})

    def resume(self) -> None:
        """Go on scheduling, frozen requests included."""
        self._call("POST", "/resume")

    def is_paused(self) -> bool:
        """Whether the scheduler is paused."""
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes. False when blocks are still held by running requests."""
        params = {"reset_running_requests": str(reset_running_requests).lower()}
        reply = self._call("POST", "/reset_prefix_cache", params=params)
        return bool(reply.get("success", True)) if isinstance(reply, dict) else True

    # -- weights

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Set the transfer engine up with its backend's own `info`."""
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": info})

    def shutdown_weight_transfer(self) -> None:
        """Have the server let go of its connection to a trainer."""
        self._call("POST", "/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Open an update of weights in checkpoint format.

        An update that an earlier client left open (it died in the middle) is closed first: the new one replaces
        every weight anyway, and the server refuses a second one.
        """
        body = {"is_checkpoint_format": True}
        try:
            self._call("POST", "/start_weight_update", json=body)
        except ServerError as error:
            if "already active" not in error.message:
                raise
            logger.warning("%s has a weight update open that was never finished; closing it.", self.base_url)
            self._close_left_open_update()
            self._call("POST", "/start_weight_update", json=body)

    def _close_left_open_update(self) -> None:
        """Finish it, which puts untouched layers back; where the engine refuses that, make it fail.

        A failed /update_weights ends the server's session too, and an empty one fails before it touches anything.
        """
        try:
            self.finish_weight_update()
        except ServerError as refused:
            logger.info("It could not be finished (%s); ending it by an empty update.", refused.message)
            try:
                self.update_weights({})
            except ServerError as expected:
                logger.info("Ended: %s", expected.message)

    def update_weights(self, info: dict[str, Any]) -> None:
        """Have the server take weights, as its backend's `info` says; returns when they are in."""
        self._call("POST", "/update_weights", json={"update_info": info})

    def finish_weight_update(self, version: str | None = None) -> None:
        """Close an update; `version` is reported with every token from now on (ignored by an older vLLM)."""
        self._call("POST", "/finish_weight_update", json={} if version is None else {"weight_version": version})

    def weight_checker(self, action: str = "checksum", baseline: dict[str, str] | None = None) -> dict[str, Any]:
        """Checksums of the server's tensors ("checksum"), or their comparison with a `baseline` ("compare")."""
        body: dict[str, Any] = {"action": action}
        if baseline is not None:
            body["baseline"] = baseline
        return self._call("POST", "/weight_checker", json=body)

    def weight_fingerprints(self) -> dict[str, str]:
        """Digests (sync/fingerprint.py) of the tensors of a server that was started with our worker extension.

        By the same keys as those of /weight_checker, of one data-parallel engine only.

        Raises:
            ServerRefusedError: without the extension, or where this vLLM's workers cannot.
        """
        workers = self.collective_rpc("weight_fingerprints")
        found = {name: digest for worker in workers if isinstance(worker, dict) for name, digest in worker.items()}
        if not found:
            raise ServerRefusedError(f"The vLLM server at {self.base_url} gave no digests of its weights: {workers!r}.")
        return found

    def collective_rpc(
        self,
        method: str,
        args: list[str] | None = None,
        kwargs: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a worker method by name in every process; results in rank order (strings unless dict, list, None)."""
        body = {"method": method, "args": args or [], "kwargs": kwargs or {}, "timeout": timeout_s}
        reply = self._call("POST", "/collective_rpc", json=body)
        return reply["results"] if isinstance(reply, dict) else []

    # -- adapters

    def adapters(self) -> dict[str, str]:
        """Adapters that requests may name, each with the folder that it was loaded from."""
        cards = self._call("GET", "/v1/models", timeout_s=self.info_timeout_s)["data"]
        return {card["id"]: card.get("root") or "" for card in cards if card.get("parent") is not None}

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from a folder that the server sees, in every engine; returns when it can be requested.

        Raises:
            ServerError: the route is missing, the folder is not there, or vLLM refuses the adapter.
        """
        try:
            self._call("POST", LOAD_ROUTE, json={"lora_name": name, "lora_path": folder}, expect_json=False)
        except ServerError as error:
            if "No adapter found" in error.message:
                fix = "The server does not see that folder: output_dir has to lie on a filesystem that both see."
                raise ServerError(f"{error.message} The folder is {folder}.", fix) from error
            raise

    def unload_adapter(self, name: str, timeout_s: float | None = None) -> bool:
        """Make a name unknown; False when it was. Requests that run under it go on.

        The engines keep the weights until the place is needed, and read the folder again for a request that is still
        running by then (an engine that finds it gone ends): the folder has to outlive those requests.
        """
        try:
            self._call("POST", UNLOAD_ROUTE, json={"lora_name": name}, timeout_s=timeout_s, expect_json=False)
        except ServerError as error:
            if "cannot be found" not in error.message:
                raise
            return False
        return True

    # -- canary

    def prompt_logprobs(
        self,
        token_ids: list[int],
        *,
        model: str | None = None,
        engine: int | None = None,
        timeout_s: float | None = None,
    ) -> list[float]:
        """Log-probability of each token after the first, given the ones before it: n - 1 values for n tokens.

        These are of the model's own distribution: temperature, top-k and top-p do not touch prompt tokens in any
        logprobs mode. A request for prompt log-probabilities never reads the prefix cache, in every supported
        vLLM (it would lack logits for the cached part), so stale keys and values cannot answer for new weights.
        The server must not be paused: a paused one answers only after `resume`.

        Args:
            token_ids: at least two token ids.
            model: served name or adapter; None: the server's first.
            engine: data-parallel replica that has to answer; None: the server's choice.
            timeout_s: deadline; None: this client's.
        """
        if len(token_ids) < 2:
            raise ValueError(f"prompt_logprobs needs at least two tokens, got {len(token_ids)}")
        body = {
            "model": model or self._first_model(),
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_k": 1,  # a server with --return-sampling-mask refuses requests without; see above
            "prompt_logprobs": 0,
        }
        headers = None if engine is None else {"X-data-parallel-rank": str(engine)}
        reply = self._call("POST", "/v1/completions", json=body, headers=headers, timeout_s=timeout_s)
        rows = reply["choices"][0]["prompt_logprobs"]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], token_ids[1:], strict=True)]

    def _first_model(self) -> str:
        if self._served_model is None:
            self._served_model = self._call("GET", "/v1/models", timeout_s=self.info_timeout_s)["data"][0]["id"]
        return self._served_model

    # -- the one place that talks

    def _call(
        self,
        method: str,
        route: str,
        *,
        json: Any = None,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        expect_json: bool = True,
    ) -> Any:
        """One request; the decoded JSON reply, or None for an empty one and where none is expected."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        timeout = httpx.Timeout(limit, connect=min(limit, 10.0))
        try:
            response = self._http.request(method, route, json=json, params=params, headers=headers, timeout=timeout)
        except httpx.TimeoutException as error:
            raise ServerError(
                f"{self.base_url} did not answer {method} {route} within {limit:g} s.",
                "Look at the server's log; raise vllm_server_timeout if it was still working.",
            ) from error
        except httpx.TransportError as error:
            raise ServerError(
                f"{self.base_url} cannot be reached for {method} {route}: {error}.",
                "Start the vLLM server, or correct the URL (vllm_server_base_url, or server.url in a run's config).",
            ) from error
        if response.status_code != 200:
            raise refusal(self.base_url, method, route, response)
        if not response.content or not expect_json:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(
                f"{self.base_url} answered {method} {route} with something that is not JSON: {response.text[:200]!r}.",
                "Check that a vLLM server listens there.",
            ) from error
