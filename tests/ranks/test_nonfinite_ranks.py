"""A loss that is not finite on one rank of two: every rank skips the step, and the run ends on both."""

from __future__ import annotations

import json

import torch

from asyncgrpo_core.training.nonfinite import load_bad_rows
from tests.ranks.rank_parts import make_trainer, on_ranks, parameters_of
from tests.tiny_model import write_model


def test_a_bad_row_of_one_rank_is_everybodys_affair(tmp_path):
    model = write_model(tmp_path / "model")
    code, output = on_ranks(2, "nonfinite", str(model), str(tmp_path))
    assert code == 0, output
    found = {
        (kind, rank): torch.load(tmp_path / f"nonfinite-{kind}-{rank}.pt", weights_only=False)
        for kind in ("ddp", "fsdp")
        for rank in (0, 1)
    }

    # DDP, one bad step in the middle: the run goes on, as one rank would without that step
    one = make_trainer(model, tmp_path / "one", max_steps=2)
    one.pipeline.steps = [one.pipeline.steps[i] for i in (0, 2)]
    one.train()
    for rank in (0, 1):
        got = found["ddp", rank]
        assert got["error"] == ""
        for name, value in parameters_of(one).items():
            torch.testing.assert_close(got["parameters"][name], value, rtol=2e-5, atol=2e-5)
    assert found["ddp", 0]["skipped"] == [2]
    folder = tmp_path / "ddp" / "bad_rows"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2-rank-1.safetensors", "step-2.json"]
    (row,) = load_bad_rows(folder / "step-2-rank-1.safetensors")
    assert row["advantages"].isnan().any() and row["loss"].isnan()
    about = json.loads((folder / "step-2.json").read_text())["samples"]
    assert about and {(entry["rank"], entry["microbatch"]) for entry in about} == {(1, 1)}

    # FSDP2, two in a row: both ranks end with the same error
    errors = [found["fsdp", rank]["error"] for rank in (0, 1)]
    assert errors[0] and errors[0].split(" are in ")[0] == errors[1].split(" are in ")[0]
    assert "2 steps in a row (the last is step 2)" in errors[0]
    # rank 0 says what was wrong with a row that only rank 1 has, and not that the forward overflowed
    assert "advantages of micro-batch 1 of rank 1: " in errors[0] and "reward function" in errors[0]
    start = {name: p.detach() for name, p in make_trainer(model, tmp_path / "start").model.named_parameters()}
    for name, value in found["fsdp", 0]["parameters"].items():
        torch.testing.assert_close(value, start[name].to(value.dtype))  # nothing reached the weights
