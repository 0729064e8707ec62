"""The shipped start policy and the script that makes it (issue 1, point 2)."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import asyncgrpo_core.quickstart
from asyncgrpo_core.quickstart import make_policy, task
from asyncgrpo_core.quickstart.settings import TRAINING

POLICY = Path(asyncgrpo_core.quickstart.__file__).parent / "policy"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32").eval()


def _greedy_and_sampled(model, tokenizer, pairs):
    """Own oracle, one prompt at a time without padding: (greedy share right, expected share right when sampled)."""
    greedy = sampled = 0.0
    with torch.no_grad():
        for a, b in pairs:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"What is {a} plus {b}?"}], add_generation_prompt=True, return_dict=False
            )
            wanted = [*(tokenizer.convert_tokens_to_ids(c) for c in str(a + b)), tokenizer.eos_token_id]
            probabilities = model(torch.tensor([[*ids, *wanted]])).logits[0, len(ids) - 1 : -1].double().softmax(-1)
            greedy += probabilities.argmax(-1).tolist() == wanted
            sampled += probabilities[range(len(wanted)), wanted].prod().item()
    return greedy / len(pairs), sampled / len(pairs)


def test_start_policy_is_half_right_when_sampled_and_right_when_greedy(model, tokenizer):
    pairs = random.Random(0).sample(task.heldout_pairs(), 256)
    greedy, sampled = _greedy_and_sampled(model, tokenizer, pairs)
    assert 0.35 <= sampled <= 0.55
    assert greedy >= 0.95


def test_shipped_files_are_small_complete_and_float32(model):
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 5_000_000
    config = json.loads((POLICY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert GenerationConfig.from_pretrained(POLICY).eos_token_id == config["eos_token_id"]


def test_prompts_and_answers_fit_the_training_settings(tokenizer):
    longest = 0
    for row in task.train_rows(n=500) + task.heldout_rows(n=None):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        assert len(answer) == len(row["answer"])  # one token a digit
        assert len(answer) + 1 <= TRAINING["max_completion_length"]
        longest = max(longest, len(ids))
    assert longest + TRAINING["max_completion_length"] <= TRAINING["max_model_len"]
    assert TRAINING["token_budget"] >= longest + TRAINING["max_completion_length"]


def test_sampled_answers_end_by_themselves(model, tokenizer):
    prompts = [row["prompt"] for row in task.heldout_rows(n=64)]
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    limit = TRAINING["max_completion_length"]
    output = model.generate(**batch, max_new_tokens=limit, do_sample=True, temperature=1.0, top_k=0)
    completions = output[:, batch["input_ids"].shape[1] :]
    ended = (completions == tokenizer.eos_token_id).any(1)
    assert ended.float().mean() >= 0.95
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    assert sum(bool(re.fullmatch(r"\d{1,4}", text)) for text in texts) >= 58


@pytest.mark.parametrize("text", ["What is 37 plus 85?", "naïve – 日本語 🙂\n\ttabs  and   spaces", "<b>1,234.5</b>"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_every_id_that_can_be_sampled_is_a_token(model, tokenizer):
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token not in (None, tokenizer.eos_token)


def test_chat_template_is_chatml_and_only_appends(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "What is 3 plus 4?"},
    ]
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt + "3<|im_end|>\n")
    with pytest.raises(Exception, match="Unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


def test_wrong_answers_are_wrong_and_varied():
    rng = random.Random(0)
    for a, b in [(0, 0), (37, 85), (99, 99), (5, 3), (50, 50)]:
        answers = [make_policy.wrong_answer(a, b, rng) for _ in range(300)]
        assert str(a + b) not in answers
        assert all(re.fullmatch(r"0|[1-9]\d{0,3}", answer) for answer in answers)
        assert len(set(answers)) >= 20


def test_training_batches_hold_training_pairs_and_the_asked_share_of_wrong_answers(tokenizer):
    batches = make_policy.Batches(tokenizer, make_policy.Recipe(batch_size=2000))
    batch = batches.draw(wrong_share=0.5)
    right = 0
    heldout = set(task.heldout_pairs())
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text = tokenizer.decode(ids)
        a, b, said = map(
            int, re.search(r"What is (\d+) plus (\d+)\?.*assistant\n(\d+)<\|im_end\|>$", text, re.S).groups()
        )
        assert (a, b) not in heldout
        right += said == a + b
        assert tokenizer.decode(labels[labels != -100]) == f"{said}<|im_end|>"
    assert 0.45 <= right / 2000 <= 0.55


def test_a_fresh_policy_is_made_by_the_script(tmp_path, capsys):
    quick = ["--set", "clean_steps=2", "--set", "careless_steps=1", "--set", "batch_size=4"]
    make_policy.main(["--out", str(tmp_path / "a"), "--seed", "3", *quick])
    make_policy.main(["--out", str(tmp_path / "b"), "--seed", "3", *quick])
    assert "held-out accuracy: greedy" in capsys.readouterr().out
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_text() == (POLICY / name).read_text(), name
