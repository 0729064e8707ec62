"""One rank against two, on CPUs with gloo: DDP and FSDP2 (loss.md, oracle 6; F005, F021, F082, F083, F084, F086,
F208)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.manifest import problem_with
from asyncgrpo_core.training.sharded_checkpoint import load_model
from tests.ranks.rank_jobs import adapter, train
from tests.ranks.rank_parts import PER_STEP, end, make_trainer, on_ranks, start_ranks, steps
from tests.tiny_model import write_model

# float64, but Qwen3's norms compute in float32: a last digit there is 1e-7, and Adam makes 3e-6 of it
FIRST_GRADIENT, LATER = 5e-7, 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def one(folder) -> dict[str, Any]:
    """The run on one rank, in this process; its checkpoints are in one/."""
    train("one", folder / "model", folder, save_strategy="steps", save_steps=2)
    return load(folder, "one")


@pytest.fixture(scope="module")
def constant(folder) -> dict[str, Any]:
    train("one", folder / "model", folder, name="constant", loss_normalization="constant")
    return load(folder, "constant")


@pytest.fixture(scope="module")
def two(folder, one) -> Path:
    """The runs on two ranks."""
    adapter(str(folder / "model"), str(folder))
    succeed(on_ranks(2, "everything", str(folder / "model"), str(folder), str(folder / "one" / "checkpoint-2")))
    return folder


def succeed(done: tuple[int, str]) -> None:
    assert done[0] == 0, done[1]


def load(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp_min(1e-12)) for name in a)


def losses(run: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in run["history"] if "loss" in entry]


@pytest.mark.parametrize(("kind", "wrapper"), [("ddp", "DistributedDataParallel"), ("fsdp", "FSDPQwen3ForCausalLM")])
@pytest.mark.parametrize("rank", [0, 1])
def test_f005_loss_gradient_and_weights_are_those_of_one_rank(one, constant, two, kind, wrapper, rank):
    """Groups are split over the rows, and rank 1 once has no work. DDP runs with Dr. GRPO's divisor."""
    run, alone = load(two, kind, rank), constant if kind == "ddp" else one
    assert run["class"] == wrapper and run["sharded"] == (kind == "fsdp")
    gradients = [difference(a, b) for a, b in zip(alone["gradients"], run["gradients"], strict=True)]
    assert gradients[0] < FIRST_GRADIENT and max(gradients) < LATER
    assert difference(alone["parameters"], run["parameters"]) < LATER
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_sync_sends_the_whole_weights_and_the_canary_is_scored_by_all_ranks(one, constant, two, kind):
    run, alone = load(two, kind), constant if kind == "ddp" else one
    assert len(run["sent"]) == 4 and load(two, kind, 1)["sent"] == []  # rank 0 sends
    assert max(difference(a, b) for a, b in zip(alone["sent"], run["sent"], strict=True)) < LATER
    for alone_score, score in zip(alone["scores"], run["scores"], strict=True):
        assert score == pytest.approx(alone_score, abs=1e-4)


def test_f082_metrics_are_of_all_ranks(one, two):
    """What does not depend on how rows are cut is equal; the rest is counted by hand."""
    alone, run = one["history"][0], load(two, "fsdp")["history"][0]
    for name in alone:
        if name.startswith(("sampling/", "clip_ratio/", "entropy", "sample/", "reward")) and "time" not in name:
            assert run[name] == pytest.approx(alone[name], rel=1e-6), name
    step = steps(2)[0]
    tokens = [sum(s.sequence.num_tokens for s in row) for microbatch in step for row in microbatch.rows]
    trained = sum(s.sequence.num_trained for microbatch in step for s in microbatch.samples)
    assert run["batch/forwarded_tokens_per_step"] == alone["batch/forwarded_tokens_per_step"] == sum(tokens)
    assert run["batch/trained_tokens_per_step"] == trained
    assert run["batch/masked_token_frac"] == pytest.approx(1 - trained / sum(tokens))  # no token is shared here
    # F083: a group split over two rows counts once; F084: rows; F086: the most expensive row over the mean
    assert run["batch/samples_per_step"] == 12 and run["batch/groups_per_step"] == 4
    assert run["batch/microbatches_per_step"] == PER_STEP and run["batch/samples_per_row"] == 3
    assert run["batch/row_tokens_mean"] == sum(tokens) / 4 and run["batch/row_tokens_max"] == max(tokens)
    costs = [[visible_pairs(row) for row in microbatch.rows] for microbatch in step]
    assert run["batch/row_imbalance"] == pytest.approx(sum(max(c) / (sum(c) / 2) for c in costs) / len(costs))


def visible_pairs(row) -> int:
    """Attention's (query, key) pairs: a token is shared where all before it and the one after it are the same."""
    tokens = [sample.sequence.token_ids.tolist() for sample in row]
    nodes = {(tuple(ids[:end]), *ids[end : end + 1]) for ids in tokens for end in range(1, len(ids) + 1)}
    return sum(len(node[0]) for node in nodes)


def test_rank_zero_alone_keeps_the_books(two):
    assert load(two, "fsdp")["finished"] == [1, 2, 3] and load(two, "fsdp", 1)["finished"] == []
    assert load(two, "fsdp")["stopped"]


def test_a_sharded_checkpoint_goes_on_with_one_rank(one, two, folder):
    checkpoint = folder / "fsdp" / "checkpoint-2"
    assert problem_with(checkpoint) is None
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir() and not (checkpoint / "model.safetensors").exists()
    assert (checkpoint / "config.json").is_file() and (checkpoint / "tokenizer.json").is_file()
    train("one", folder / "model", folder, name="back", resume=checkpoint)
    back = load(folder, "back")
    assert back["finished"] == [3]
    assert difference(one["gradients"][2], back["gradients"][0]) < LATER
    assert difference(one["parameters"], back["parameters"]) < LATER  # a fresh optimizer would be 1e-2 away


def test_a_checkpoint_of_one_rank_goes_on_sharded(one, two):
    run = load(two, "resumed")
    assert run["sharded"] and run["finished"] == [3]
    assert difference(one["sent"][2], run["sent"][0]) < 1e-12  # the weights of step 2, untouched
    assert difference(one["parameters"], run["parameters"]) < FIRST_GRADIENT


@pytest.mark.parametrize("where", ["whole", "fsdp/checkpoint-3"])
def test_the_end_of_a_sharded_run_loads_like_any_model(two, folder, where):
    model = AutoModelForCausalLM.from_pretrained(folder / where, dtype=torch.float64)
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert difference(load(two, "fsdp")["parameters"], found) < 1e-6
    assert list((folder / where).glob("tokenizer*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_f208_mixed_precision_keeps_float32_weights_and_moments_whatever_was_loaded(two, rank):
    found = json.loads((two / f"mixed-{rank}.json").read_text())
    assert found == {"weights": ["torch.float32"], "moments": ["torch.float32"]}
    run = load(two, "mixed", rank)
    assert run["sharded"] and all(torch.isfinite(value).all() for value in run["parameters"].values())


def test_f208_mixed_precision_saves_the_float32_weights(two):
    """Not in the mixed-precision dtype, as the reference does: a resume would start from rounded weights."""
    with safe_open(two / "mixed" / "checkpoint-3" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118
    shards = FileSystemReader(two / "mixed" / "checkpoint-2" / "pytorch_model_fsdp_0").read_metadata()
    tensors = [about for about in shards.state_dict_metadata.values() if hasattr(about, "properties")]
    assert {about.properties.dtype for about in tensors} == {torch.float32} and len(tensors) > 20


def test_an_adapter_is_trained_sent_merged_and_resumed_sharded(two):
    alone, run, resumed = load(two, "adapter-one"), load(two, "adapter-fsdp"), load(two, "adapter-resumed")
    assert run["sharded"]
    assert max(difference(a, b) for a, b in zip(alone["gradients"], run["gradients"], strict=True)) < LATER
    assert max(difference(a, b) for a, b in zip(alone["sent"], run["sent"], strict=True)) < LATER
    assert not any("lora" in name for name in run["sent"][-1])
    assert difference(run["sent"][0], run["sent"][-1]) > 1e-2
    assert difference(alone["sent"][2], resumed["sent"][0]) < 1e-12
    assert difference(alone["parameters"], resumed["parameters"]) < LATER
    assert (two / "adapter-fsdp" / "checkpoint-3" / "adapter_model.safetensors").is_file()


def test_a_sharded_adapter_goes_on_with_one_rank(two, folder):
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    train("one", folder / "model", folder, name="adapter-back", resume=two / "adapter-fsdp" / "checkpoint-2", **more)
    assert difference(load(two, "adapter-one")["parameters"], load(folder, "adapter-back")["parameters"]) < LATER


def test_a_checkpoint_of_another_model_is_refused(folder, one, two):
    config = AutoConfig.from_pretrained(folder / "model", vocab_size=99)
    smaller = AutoModelForCausalLM.from_config(config)
    for kind in ("one", "fsdp"):
        with pytest.raises(CheckpointError, match="Resume with the model"):
            load_model(folder / kind / "checkpoint-2", smaller)


def test_every_rank_does_what_one_rank_decided(two, folder):
    """A callback that reads metrics (rank 0 has them) saves and stops; a signal that only rank 1 got stops both."""
    found = [json.loads((folder / f"agreed-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1] == {"callback": [2, None], "signal": [1, "SIGTERM"], "waiting": [2, "SIGTERM"]}
    assert problem_with(folder / "callback" / "checkpoint-1") is None
    assert problem_with(folder / "signal" / "checkpoint-1") is None


def test_a_signal_to_torchrun_stops_every_rank_after_the_same_step(folder):
    torchrun = start_ranks(2, "stopped", str(folder / "model"), str(folder))
    try:
        deadline = time.monotonic() + 200
        while not (folder / "stopped-waits").exists():
            assert torchrun.poll() is None and time.monotonic() < deadline, torchrun.communicate(timeout=60)[1]
            time.sleep(0.1)
        torchrun.terminate()
        _, said = torchrun.communicate(timeout=120)
    finally:
        end(torchrun)
    assert torchrun.returncode != 0
    assert (folder / "stopped-0.json").exists() and (folder / "stopped-1.json").exists(), said[-6000:]
    found = [json.loads((folder / f"stopped-{rank}.json").read_text()) for rank in (0, 1)]
    assert found == [[2, "SIGTERM"]] * 2
    assert problem_with(folder / "stopped" / "checkpoint-2") is None


def test_an_error_on_rank_zero_is_raised_on_every_rank(two, folder):
    """The server is away, a sync fails in the middle of the gathers, user code raises what cannot be pickled."""
    zero, other = (json.loads((folder / f"failed-{rank}.json").read_text()) for rank in (0, 1))
    assert zero["plan"][:2] == other["plan"][:2] == ["ServerError", "The server is away. Start it."]
    assert zero["sync"][:2] == other["sync"][:2] == ["WeightSyncError", "The server refused tensor 3."]
    assert zero["pickle"][:2] == ["CannotBePickled", "of user code"]
    assert other["pickle"][0] == "AsyncGRPOError" and "CannotBePickled: of user code" in other["pickle"][1]
    assert all(seconds < 30 and stopped for _, _, seconds, stopped in [*zero.values(), *other.values()])


def test_an_error_on_another_rank_ends_the_wait_of_rank_zero(two, folder):
    zero, other = (json.loads((folder / f"lost-{rank}.json").read_text()) for rank in (0, 1))
    assert other == ["ZeroDivisionError", "a bug of rank 1"]
    assert zero[0] == "AsyncGRPOError" and "rank 1 failed with ZeroDivisionError: a bug of rank 1" in zero[1]


def test_shards_need_ranks(folder, tmp_path):
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="fsdp only works in distributed"):
        make_trainer(folder / "model", tmp_path, fsdp=True)
