"""The trainer's side of a sync for tests: a transformers model whose weights can be changed and scored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

_SEEDS = itertools.count(1)


class TrainedPolicy:
    """A float32 model; `parameters` and `score` are what a publisher takes."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()

    @torch.no_grad()
    def change(self, relative: float = 0.2) -> None:
        """Move every parameter by a random `relative` share of its own spread (norms: of 1).

        Never twice in the same way, so that no test meets the weights that an earlier one left in the server.
        """
        generator = torch.Generator().manual_seed(next(_SEEDS))
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * relative * (parameter.std() if parameter.ndim > 1 else 1.0))

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[float]:
        logprobs = self.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        return [float(logprobs[i - 1, token_ids[i]]) for i in range(1, len(token_ids))]
