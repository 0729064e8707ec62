"""A server that exists in memory: takes the publisher's calls, holds weights, scores the canary with them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncgrpo_core.errors import ServerError, ServerRefusedError
from asyncgrpo_core.sync.shm_files import report_path, write_report

CANARY = [3, 1, 4, 1, 5]


def logprobs(weights: dict[str, Tensor], ids: list[int]) -> list[float]:
    """A bigram model: token i given token i-1. Any change of `weights["w"]` moves every score."""
    table = weights["w"].double().log_softmax(-1)
    return [float(table[a, b]) for a, b in itertools.pairwise(ids)]


class Policy:
    """The trainer's side: parameters and score of one small policy."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {"w": torch.randn(8, 8, generator=generator), "bias": torch.randn(8, generator=generator)}

    def parameters(self):
        yield from self.weights.items()

    def score(self, ids: list[int]) -> list[float]:
        return logprobs(self.weights, ids)

    def step(self, size: float = 0.5) -> None:
        self.weights["w"] = self.weights["w"] + size * torch.arange(64.0).reshape(8, 8).sin()


class FakeServer:
    """SyncControl in memory. `fail` names calls that answer with an error, `delay_s` how long calls take.

    `deaf` makes updates do nothing while answering well; `reports` writes the plugin's report like the engine.
    """

    def __init__(self, *, fail: set[str] | None = None, delay_s: dict[str, float] | None = None) -> None:
        self.calls: list[Any] = []
        self.fail = fail or set()
        self.delay_s = delay_s or {}
        self.weights = Policy(seed=99).weights
        self.deaf = False
        self.reports = True
        self.gone: set[str] = set()  # calls that do not get an answer
        self.paused = False
        self.checksums: dict[str, str] = {}
        self._update: dict[str, Any] = {}

    def _called(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details) if details else name)
        time.sleep(self.delay_s.get(name, 0.0))
        if name in self.gone:
            raise ServerError(f"no connection to /{name}")
        if name in self.fail:
            raise ServerRefusedError(f"answered 500 to /{name}: engine says no")

    @property
    def names(self) -> list[str]:
        return [call if isinstance(call, str) else call[0] for call in self.calls]

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self._called("pause", mode, clear_cache)
        self.paused = True

    def resume(self) -> None:
        self._called("resume")
        self.paused = False

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        self._called("init_weight_transfer", info)

    def start_weight_update(self) -> None:
        self._called("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        self._called("update_weights", info)
        self._update = info
        if "path" in info and not self.deaf:
            self.weights = load_file(info["path"])

    def finish_weight_update(self, version: str) -> None:
        self._called("finish_weight_update", version)
        if self._update.get("compare") and self.reports:
            differing = dict.fromkeys(("w", "bias"), 1.0) if self.deaf else {}
            report = {"checked": 2, "differing": differing, "unchecked": {}, "missing": []}
            path = report_path(Path(self._update["path"]))
            write_report(path, int(version), {**report, "load_s": 0.0, "compare_s": 0.0})

    def world_size(self) -> int:
        self._called("world_size")
        return 1

    def weight_checker(self, action: str) -> dict[str, Any]:
        self._called("weight_checker", action)
        return {"checksums": self.checksums}

    def weight_fingerprints(self) -> dict[str, str]:
        self._called("weight_fingerprints")
        return self.checksums

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        self._called("prompt_logprobs")
        assert not self.paused, "a paused server does not answer"
        return logprobs(self.weights, token_ids)
