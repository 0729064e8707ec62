"""The load-balancing loss in the trainer: the mean over the rows that hold samples, and its metric (F039, F056)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.packing.planner import MicroBatch
from asyncgrpo_core.training.loss_sums import LossSums
from asyncgrpo_core.training.router_loss import add_router_loss
from asyncgrpo_core.training.row_shares import shares_of
from tests.ranks.rank_parts import make_trainer
from tests.tiny_architectures import make_architecture
from tests.tiny_model import write_tokenizer
from tests.unit.policy_cases import make_sample


def output(aux_loss: float | None) -> PolicyOutput:
    empty = torch.zeros(0)
    return PolicyOutput(empty, empty, None, None if aux_loss is None else torch.tensor(aux_loss, requires_grad=True))


def micro_batch(*sizes: int) -> MicroBatch:
    rng = np.random.default_rng(0)
    rows = tuple(tuple(make_sample(rng, 3, 2) for _ in range(size)) for size in sizes)
    return MicroBatch(rows=rows, row_tokens=(5,) * len(sizes), row_costs=(5.0,) * len(sizes))


def test_f039_ranks_losses_add_up_to_the_mean_over_rows_and_a_filler_row_counts_in_nothing():
    shares = shares_of([micro_batch(3, 0, 1)], 3)
    rows = [share[0].pack(0) for share in shares]
    assert [row["row_weight"] for row in rows] == [0.5, 0.0, 0.5]
    window, total, coefficient = MetricWindow(), 0.0, 0.1
    policies = [output(value) for value in (2.0, 77.0, 5.0)]
    for row, policy in zip(rows, policies, strict=True):
        sums = LossSums()
        loss = add_router_loss(torch.tensor(1.0), sums, policy, row, coefficient)
        loss.backward()
        total += loss.item()
        sums.record(window)
    assert total == pytest.approx(3 * 1.0 + 0.1 * (2.0 + 5.0) / 2)
    assert window.reduce() == {"aux_loss": pytest.approx(3.5)}  # unscaled
    assert [policy.aux_loss.grad.item() for policy in policies] == pytest.approx([0.05, 0.0, 0.05])


def test_f056_every_rank_sums_the_same_names():
    """A rank without work has the name too: sums over ranks are added name by name."""
    rows = [share[0].pack(0) for share in shares_of([micro_batch(1, 0)], 2)]
    sums = [LossSums(), LossSums()]
    for row, each in zip(rows, sums, strict=True):
        add_router_loss(torch.tensor(0.0), each, output(4.0), row, 1.0)
    assert sums[0].merge(sums[1]).events() == [("aux_loss", "mean", 4.0, 1.0)]


def test_f056_a_dense_model_gets_neither_loss_nor_metric():
    sums, loss = LossSums(), torch.tensor(3.0)
    assert add_router_loss(loss, sums, output(None), {}, 0.5) is loss
    assert sums.events() == []


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    write_tokenizer(folder)
    make_architecture("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_f039_f056_the_trainer_adds_the_scaled_loss_and_logs_the_unscaled(moe_folder, tmp_path, checkpointing):
    def history(coefficient):
        trainer = make_trainer(
            moe_folder,
            tmp_path / str(coefficient),
            max_steps=1,
            router_aux_loss_coef=coefficient,
            gradient_checkpointing=checkpointing,
        )
        trainer.model.set_experts_implementation("eager")  # float64
        trainer.train()
        return trainer, trainer.state.log_history[0]

    _, without = history(0.0)
    trainer, with_it = history(0.3)
    assert "aux_loss" not in without and with_it["aux_loss"] > 1.0
    assert with_it["loss"] - without["loss"] == pytest.approx(0.3 * with_it["aux_loss"], rel=1e-3)
    assert trainer.router_aux_loss_coef == 0.3
    own, logged = history(None)
    assert own.router_aux_loss_coef == own.model.config.router_aux_loss_coef > 0 and "aux_loss" in logged
