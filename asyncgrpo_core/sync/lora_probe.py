"""Does a server apply adapters as the trainer does? Asked once per attempt and server, before the first version.

A fresh adapter changes nothing (its B is zero) and a step of a small learning rate changes less than bf16 rounds, so
the canary of a version alone can say little. The probe is an adapter of the same shape whose random weights move the
canary's log-probabilities far more than any rounding: a server that answers with the trainer's numbers, in every
data-parallel engine, reads the folders, knows the names of the layers, scales as PEFT does and holds the same base.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from asyncgrpo_core.errors import ConfigError, ServerError
from asyncgrpo_core.sync.canary import PROVED, Evidence, Noise, Verdict, judge
from asyncgrpo_core.sync.lora_store import AdapterStore
from asyncgrpo_core.sync.reports import DeliveryError

logger = logging.getLogger(__name__)

_LABEL = "probe"
_SHARES = (0.05, 0.2, 0.8, 3.2)  # sizes that are tried in turn
_MOVES = 4.0  # how many times the margin of nearness (mean difference, nats) the probe moves the canary
_EXACT_MOVE = 0.05  # the same where both sides compute in float32


class PolicyAdapter(Protocol):
    """The trainer's adapter (models/adapter_files.py)."""

    def save(self, folder: Path) -> Path:
        """Write it as it is now; where exactly."""

    def set_probe(self, share: float) -> None:
        """Give it random weights whose change of the policy has `share` of the policy's size; 0.0 switches it off."""

    def restore(self) -> None:
        """Give it its own weights back."""


class ProbeControl(Protocol):
    """The part of `server.control.VLLMControl` that is used here."""

    def load_adapter(self, name: str, folder: str) -> None: ...
    def unload_adapter(self, name: str, timeout_s: float | None = None) -> bool: ...
    def prompt_logprobs(
        self, token_ids: list[int], *, model: str | None = None, engine: int | None = None
    ) -> list[float]: ...


class AdapterProbe:
    """Made once per attempt.

    Args:
        store: where its folder is written, for as long as a server needs it.
        adapter, score: the trainer's side; `score` gives log-probabilities of canary tokens 1..n-1.
        canary_ids: the canary prompt.
        noise: how far right implementations may be apart.
    """

    def __init__(
        self,
        store: AdapterStore,
        adapter: PolicyAdapter,
        *,
        score: Callable[[list[int]], list[float]],
        canary_ids: list[int],
        noise: Noise,
    ) -> None:
        self._store = store
        self._adapter = adapter
        self._score = score
        self._ids = list(canary_ids)
        self._noise = noise

    def check(self, control: ProbeControl, engines: Sequence[int | None]) -> None:
        """Load the probe, have every engine score the canary with it, and unload it.

        Raises:
            DeliveryError: an engine's numbers are not the trainer's.
            ServerError: a call failed.
        """
        name = f"{self._store.stem}-{_LABEL}"
        plain = self._score(self._ids)
        folder, expected = self._written(plain)
        try:
            control.load_adapter(name, str(folder))
            for engine in engines:
                request = {"model": name} if engine is None else {"model": name, "engine": engine}
                answer = control.prompt_logprobs(self._ids, **request)  # type: ignore[arg-type]
                verdict = judge(Evidence(answer, expected, plain, self._noise))
                if verdict.state != PROVED:
                    raise self._error(control, engine, verdict)
        finally:
            try:
                control.unload_adapter(name)
            except ServerError as error:  # must not hide what went wrong before
                logger.warning("The probe adapter could not be unloaded: %s", error)
            self._store.delete(_LABEL)  # no request names it any more

    def _written(self, plain: Sequence[float]) -> tuple[Path, list[float]]:
        """The probe's folder, and the trainer's score with it."""
        least = _EXACT_MOVE if self._noise.exact else _MOVES * self._noise.margin
        try:
            for share in _SHARES:
                self._adapter.set_probe(share)
                expected = self._score(self._ids)
                if _mean_difference(expected, plain) > least:
                    return self._store.write(_LABEL), expected
        finally:
            self._adapter.restore()
        raise ConfigError(
            "The adapter does not change the policy's log-probabilities, whatever its weights.",
            "Check its target_modules, and that it is not disabled.",
        )

    def _base_score(self) -> list[float]:
        self._adapter.set_probe(0.0)
        try:
            return self._score(self._ids)
        finally:
            self._adapter.restore()

    def _error(self, control: ProbeControl, engine: int | None, verdict: Verdict) -> DeliveryError:
        """Tell a wrong base model from a wrong adapter."""
        base = judge(Evidence(control.prompt_logprobs(self._ids), self._base_score(), None, self._noise))
        distance = base.max_abs_diff if self._noise.exact else base.mean_abs_diff
        where = "" if engine is None else f" (data-parallel replica {engine})"
        if not distance <= self._noise.limit:
            return DeliveryError(
                f"The server's base model is not the one that the adapter was made for{where}: without any adapter "
                f"the canary differs by up to {base.max_abs_diff:.3g}.",
                "Start the server with the same --model and its real weights (--load-format auto); restart a server "
                "that another run has sent merged weights to.",
            )
        return DeliveryError(
            f"The server does not apply adapters as the trainer does{where}: with a probe adapter {verdict.reason}, "
            "while the base models agree.",
            "Send merged weights instead: set weight_sync_backend to nccl, ipc or shm.",
        )


def _mean_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
