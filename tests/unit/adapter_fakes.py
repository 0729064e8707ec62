"""A server of adapters that exists in memory, and a policy with one: a bigram table and what is added to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncgrpo_core.errors import ServerError
from tests.unit.sync_fakes import logprobs


def base_table(seed: int = 0) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


class AdaptedPolicy:
    """The trainer's side: score, save, probe weights."""

    def __init__(self) -> None:
        self.base = base_table()
        self.delta = torch.zeros(8, 8)
        self._own: Tensor | None = None

    def score(self, ids: list[int]) -> list[float]:
        return logprobs({"w": self.base + self.delta}, ids)

    def step(self, size: float = 0.5) -> None:
        self.delta = self.delta + size * torch.arange(64.0).reshape(8, 8).sin()

    def save(self, folder: Path) -> Path:
        save_file({"delta": self.delta}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        return folder

    def set_probe(self, share: float) -> None:
        if self._own is None:
            self._own = self.delta
        self.delta = share * torch.randn(8, 8, generator=torch.Generator().manual_seed(7))

    def restore(self) -> None:
        if self._own is not None:
            self.delta, self._own = self._own, None


class AdapterServer:
    """What `LoraBackend` talks to. `calls` holds them in order.

    `fail` names calls that answer with an error; `deaf` engines compute with the base alone; `swap` makes an engine
    answer with the adapter that it loaded first (what happens when two HTTP processes give out one number twice).
    """

    def __init__(self, engines: int = 1, base: Tensor | None = None) -> None:
        self.base = base_table() if base is None else base
        self.engines = engines
        self.names: dict[str, str] = {}
        self.weights: dict[str, Tensor] = {}
        self.calls: list[tuple[str, str]] = []
        self.engines_asked: list[int | None] = []
        self.fail: set[str] = set()
        self.deaf: set[int] = set()
        self.swap: set[int] = set()
        self.healthy = True

    def is_healthy(self) -> bool:
        return self.healthy

    def restart(self) -> None:
        self.names, self.weights, self.healthy = {}, {}, True

    @property
    def versions(self) -> list[int]:
        """Versions that requests may name."""
        return sorted(int(name.rpartition("-v")[2]) for name in self.names if "-v" in name)

    @property
    def order(self) -> list[str]:
        """load and unload calls of versions, without the attempt's own prefix."""
        return [f"{k} {name.rpartition('-v')[2]}" for k, name in self.calls if "-v" in name and k != "score"]

    def _called(self, kind: str, name: str = "") -> None:
        if not self.healthy:
            raise ServerError("cannot be reached")
        self.calls.append((kind, name))
        if kind in self.fail:
            raise ServerError(f"answered 500 to {kind}")

    def adapters(self) -> dict[str, str]:
        if not self.healthy:
            raise ServerError("cannot be reached")
        return dict(self.names)

    def load_adapter(self, name: str, folder: str) -> None:
        self._called("load", name)
        assert name not in self.names, "already loaded"
        self.weights[name] = load_file(Path(folder) / "adapter_model.safetensors")["delta"]
        self.names[name] = folder

    def unload_adapter(self, name: str, timeout_s: float | None = None) -> bool:
        self._called("unload", name)
        return self.names.pop(name, None) is not None

    def prompt_logprobs(self, token_ids: list[int], *, model: str | None = None, engine: int | None = None) -> Any:
        self._called("score", model or "")
        self.engines_asked.append(engine)
        if model is None:
            return logprobs({"w": self.base}, token_ids)
        if model not in self.names:
            raise ServerError(f"404: {model} does not exist")
        delta = self.weights[model]
        if (engine or 0) in self.swap:
            delta = next(weights for name, weights in self.weights.items() if "-v" in name or name == model)
        if (engine or 0) in self.deaf:
            delta = torch.zeros(8, 8)
        return logprobs({"w": self.base + delta}, token_ids)

    def read_again(self, name: str) -> None:
        """What an engine does for a request whose adapter it had to put away: a folder that is gone ends it."""
        load_file(Path(self.names[name]) / "adapter_model.safetensors")


class Uses:
    """The rollout worker, as far as versions go: `held` are named by running rollouts until they are taken away."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.revoked_before = 0
        self.obedient = True

    def adapter_in_use(self, version: int) -> bool:
        return version in self.held

    def revoke_adapters(self, before: int) -> None:
        self.revoked_before = max(before, self.revoked_before)
        if self.obedient:
            self.held = {version for version in self.held if version >= before}
