"""`log_completions` prints what was trained (F214)."""

from __future__ import annotations

from asyncgrpo_core.packing.planner import RowPlanner
from asyncgrpo_core.training.completions import format_completions
from tests.ranks.rank_parts import make_trainer
from tests.tiny_model import write_model
from tests.unit.samples import make_sample


class Words:
    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(f"w{i}" for i in ids)


def step(n):
    planner = RowPlanner(100)
    for i in range(n):
        planner.add(make_sample(i, reward=i / 2, advantage=-1.0 if i else 1.0))
    return [planner.flush()]


def test_f214_prompt_completion_reward_and_advantage_are_shown():
    text = format_completions(step(2), Words(), 7, None)
    assert text.splitlines()[0] == "step 7: 2 of 2 samples"
    assert "w2 w3' -> 'w4 w5'" in text
    assert "0.500" in text and "-1.000" in text


def test_f214_the_number_of_printed_completions_is_bounded():
    text = format_completions(step(5), Words(), 7, 2)
    assert text.splitlines()[0] == "step 7: 2 of 5 samples"
    assert len(text.splitlines()) == 2 + 2


def test_f214_the_trainer_prints_them_at_every_log_when_asked(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    for settings, wanted in (
        ({}, []),
        ({"log_completions": True, "logging_steps": 3}, ["step 3: 12 of 12 samples"]),
        ({"log_completions": True, "num_completions_to_print": 2}, [f"step {n}: 2 of 12 samples" for n in (1, 2, 3)]),
    ):
        make_trainer(model, tmp_path / "run", **settings).train()
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")] == wanted
