"""The calculator example: its task, its tool, its start policy (F165-F171: tools, the agent example)."""

import itertools
import json
import pickle
import random
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import get_json_schema

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.launch.loading import load_config
from asyncgrpo_core.rollout.chat import ChatFormat, fork_report
from examples.calculator import POLICY_DIR, conversations, make_policy, simulate, task

SCHEMA = get_json_schema(task.calculate)
CONFIG = Path(task.__file__).parent / "calculator.yaml"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype="float32").eval()


# -- the tool


def _expressions():
    def combine(children):
        return st.one_of(
            st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%", " - ", " * "]), children).map("".join),
            children.map(lambda inner: f"({inner})"),
            children.map(lambda inner: f"-{inner}"),
        )

    return st.recursive(st.integers(0, 10**6).map(str), combine, max_leaves=8).filter(lambda text: len(text) <= 100)


@given(_expressions())
def test_the_tool_agrees_with_python(expression):
    try:
        expected = str(eval(expression, {"__builtins__": {}}))  # the oracle; the text is made of digits and operators
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divides by zero"):
            task.calculate(expression)
    else:
        assert task.calculate(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("", "417*", "417x663", "417 times 663", "2**9999999", "1.5*2", "1/2", "True+1", "'a'*9", "[1]", "x", "f(1)"),
        *("__import__('os').getcwd()", "(1).__class__", "1 if 1 else 2", "1<2", "a:=1", "1,2", "1\n2", "\x00", "~1"),
        *("1<<9999", "lambda: 1", "9" * 101, "(" * 100, "(" * 99 + "1", "f'{1}'", "await x", "\ud800"),
    ],
)
def test_anything_but_integer_arithmetic_is_refused_with_a_reason(expression):
    with pytest.raises(ValueError) as caught:
        task.calculate(expression)
    assert type(caught.value) is ValueError  # no subclass such as UnicodeError, whose text would be Python's
    assert len(str(caught.value)) > 10


@given(st.text(max_size=120))
def test_the_tool_raises_nothing_but_value_errors(expression):
    try:
        result = task.calculate(expression)
    except ValueError:
        return
    assert re.fullmatch(r"-?\d+", result)


def test_the_tool_can_be_shown_to_a_model_and_sent_to_the_rollout_process():
    assert SCHEMA["function"]["name"] == "calculate"
    assert SCHEMA["function"]["parameters"]["required"] == ["expression"]
    for function in (task.calculate, task.tool_answer_reward):
        assert pickle.loads(pickle.dumps(function)) is function


# -- the rows


def _numbers(row):
    match = re.fullmatch(r"What is (\d{3}) times (\d{3})\?", row["prompt"][0]["content"])
    return int(match[1]), int(match[2])


def test_heldout_and_training_rows_never_share_a_pair_in_either_order():
    train = [_numbers(row) for row in task.train_rows(n=8192, seed=3)]
    heldout = [_numbers(row) for row in task.heldout_rows(n=len(task.heldout_pairs()))]
    assert len(set(train)) == 8192 and len(set(heldout)) == len(heldout) >= 512
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in heldout}


def test_a_drawn_pair_that_is_held_out_is_drawn_again():
    a, b = task.heldout_pairs()[0]

    class Numbers(random.Random):
        drawn = iter([a, b, b, a, 123, 456])

        def randint(self, low, high):
            return next(self.drawn)

    assert task.draw_training_pair(Numbers()) == (123, 456)


def test_rows_are_conversational_with_the_product_and_depend_on_the_seed_alone():
    random.seed(0)
    rows = task.train_rows(n=50, seed=1)
    random.seed(1)
    assert task.train_rows(n=50, seed=1) == rows != task.train_rows(n=50, seed=2)
    for row in rows:
        a, b = _numbers(row)
        assert row["answer"] == str(a * b)
        assert [message["role"] for message in row["prompt"]] == ["user"]


@pytest.mark.parametrize("n", [0, -1, 1_000_000])
@pytest.mark.parametrize("rows", [task.train_rows, task.heldout_rows])
def test_an_impossible_number_of_rows_is_refused(rows, n):
    with pytest.raises(DataError, match=rf"{rows.__name__}\(n={n}\).*Set n to 1\.\.\d+"):
        rows(n=n)


# -- the reward

_CALL = conversations.call("417*663")
_RESULT = {"role": "tool", "name": "calculate", "content": "276471"}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ([_CALL, _RESULT, conversations.say("276471")], 1.0),
        ([conversations.say("276471")], 0.0),  # guessed
        ([_CALL, _RESULT, conversations.say("276472")], 0.0),
        ([_CALL, _RESULT, conversations.say("276471 ")], 0.0),
        ([_CALL, _RESULT, conversations.say("0276471")], 0.0),
        ([_CALL, _RESULT, conversations.say("It is 276471.")], 0.0),
        ([_CALL, _RESULT], 0.0),
        ([_CALL, _RESULT, {**_CALL, "content": "276471"}], 0.0),
        ([_CALL, _RESULT, {"role": "assistant", "content": None}], 0.0),
        ([_CALL, {**_RESULT, "content": "Error: x"}, _CALL, _RESULT, conversations.say("276471")], 1.0),
        ([], 0.0),
    ],
)
def test_only_the_exact_answer_after_a_tool_is_rewarded(completion, reward):
    assert task.tool_answer_reward([completion], ["276471"], prompts=[]) == [reward]


def test_each_completion_is_judged_by_its_own_answer():
    good = [_CALL, _RESULT, conversations.say("276471")]
    assert task.tool_answer_reward(completions=[good, good], answer=["1", "276471"]) == [0.0, 1.0]
    with pytest.raises(ValueError):
        task.tool_answer_reward([good], ["1", "2"])


# -- conversations that the start policy learns from


def _talks(n, mix, seed=0, learn_mistakes=True):
    rng = random.Random(seed)
    return [conversations.conversation(417, 663, mix, rng, learn_mistakes=learn_mistakes) for _ in range(n)]


def test_the_careful_stage_trains_right_replies_only():
    for talk in _talks(200, conversations.CAREFUL, learn_mistakes=False):
        replies = [message for message in talk.messages if message["role"] == "assistant"]
        learnt = [reply for reply, trained in zip(replies, talk.trained, strict=True) if trained]
        assert learnt == [_CALL, conversations.say("276471")]
        assert task.tool_answer_reward([talk.messages[1:]], ["276471"]) == [1.0]


def test_the_careless_stage_has_the_asked_share_of_wrong_conversations():
    mix = conversations.CARELESS
    talks = _talks(4000, mix)
    assert all(all(talk.trained) for talk in talks)
    right = sum(task.tool_answer_reward([talk.messages[1:] for talk in talks], ["276471"] * 4000)) / 4000
    reached = 1 - mix.guess - mix.wrong_expression - mix.broken_call * mix.give_up
    assert right == pytest.approx(reached * (1 - mix.wrong_answer), abs=0.03)


def test_broken_calls_fail_as_they_say_and_no_guess_is_right(tokenizer):
    chat = ChatFormat(tokenizer, tools_on=True)
    kinds = set()
    for talk in _talks(600, conversations.Mix(guess=0.2, broken_call=0.8, wrong_expression=0, give_up=1.0)):
        first, last = talk.messages[1]["content"], talk.messages[-1]["content"]
        assert last.isdigit() and last != "276471"
        if len(talk.messages) > 2:
            call = chat.parse([], chat.encode(first), [SCHEMA]).calls[0]
            kinds.add(call.error[:50] if call.error else (call.name, *call.arguments))
            if call.error is None and call.name == "calculate" and "expression" in call.arguments:
                with pytest.raises(ValueError):
                    task.calculate(**call.arguments)
    assert len(kinds) == 4  # not JSON, another tool, another argument, a refused expression


def test_what_the_policy_learnt_from_is_what_the_rollout_loop_renders(tokenizer):
    """The replies of training data, as a run would read and render them again, turn by turn."""
    chat = ChatFormat(tokenizer, tools_on=True)
    batches = make_policy.Batches(tokenizer, make_policy.Recipe())
    for talk in _talks(60, conversations.CARELESS, seed=5):
        ids = batches.of([talk])["input_ids"][0].tolist()
        seen = talk.messages[:1]
        for message in talk.messages[1:]:
            if message["role"] == "assistant":
                prompt = chat.render(seen, [SCHEMA])
                assert ids[: len(prompt)] == prompt
                reply = ids[len(prompt) : ids.index(tokenizer.eos_token_id, len(prompt)) + 1]
                message = chat.parse(prompt, reply, [SCHEMA]).message
            seen.append(message)
        assert tokenizer.apply_chat_template(talk.messages, tools=[SCHEMA], tokenize=False) == tokenizer.decode(ids)


def test_only_the_replies_are_trained_on(tokenizer):
    talk = conversations.Conversation(
        [*_talks(1, conversations.CAREFUL)[0].messages[:1], _CALL, _RESULT, conversations.say("276471")], [False, True]
    )
    labels = make_policy.Batches(tokenizer, make_policy.Recipe()).of([talk])["labels"][0]
    assert tokenizer.decode(labels[labels != -100]) == "276471<|im_end|>"
    both = conversations.Conversation(talk.messages, [True, True])
    labels = make_policy.Batches(tokenizer, make_policy.Recipe()).of([both])["labels"][0]
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "417*663"}}\n</tool_call><|im_end|>'
    assert tokenizer.decode(labels[labels != -100]) == call + "276471<|im_end|>"


# -- the shipped policy


def test_shipped_files_are_small_complete_and_float32(model, tokenizer):
    assert sum(path.stat().st_size for path in POLICY_DIR.iterdir()) < 4_000_000
    config = json.loads((POLICY_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(tokenizer)  # every id that can be sampled is a token
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert GenerationConfig.from_pretrained(POLICY_DIR).eos_token_id == config["eos_token_id"]


def test_the_shipped_policy_is_what_the_script_makes(tmp_path, capsys):
    quick = ["--set", "careful_steps=2", "--set", "careless_steps=1", "--set", "batch_size=4", "--evaluate", "8"]
    make_policy.main(["--out", str(tmp_path / "a"), "--seed", "3", *quick])
    make_policy.main(["--out", str(tmp_path / "b"), "--seed", "3", *quick])
    assert "held-out reward: greedy" in capsys.readouterr().out
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    assert len(weights[0]) == (POLICY_DIR / "model.safetensors").stat().st_size
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in POLICY_DIR.iterdir()}
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_text() == (POLICY_DIR / name).read_text(), name


def test_the_start_policy_is_right_less_than_four_times_in_ten(model, tokenizer):
    rows = task.heldout_rows(n=128, seed=1)
    talks = simulate.rollouts(model, tokenizer, rows, seed=0)
    assert 0.18 <= simulate.mean_reward(talks, rows) <= 0.42  # 0.3, and three standard errors of 128 samples
    assert simulate.mean_reward(simulate.rollouts(model, tokenizer, rows, greedy=True), rows) >= 0.9


def test_a_rollout_fits_the_runs_settings(model, tokenizer):
    """The tools' schema is short, and a later turn goes on from the tokens before, but for rare odd tokenizations."""
    config = yaml.safe_load(CONFIG.read_text())
    transitions = []
    for talk in simulate.rollouts(model, tokenizer, task.heldout_rows(n=64), seed=2):
        assert len(talk.turns[0][0]) < 60
        prompt, _ = talk.turns[-1]
        assert len(prompt) + config["sampling"]["max_completion_length"] <= config["server"]["max_model_len"]
        for (earlier, said), (later, _) in itertools.pairwise(talk.turns):
            transitions.append(later[: len(earlier) + len(said)] == earlier + said)
    assert len(transitions) > 20 and sum(transitions) >= 0.9 * len(transitions)


def test_the_template_only_appends(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 417 times 663?"},
        _CALL,
        _RESULT,
        _RESULT,
        conversations.say("276471"),
        {"role": "user", "content": "And 417 plus 663?"},
    ]
    for tools in (None, [SCHEMA]):
        texts = [
            tokenizer.apply_chat_template(messages[:n], tools=tools, tokenize=False)
            for n in range(2, len(messages) + 1)
        ]
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert texts[-1].startswith("<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n" + json.dumps(SCHEMA))
    assert texts[2].endswith("<|im_start|>user\n<tool_response>\n276471\n</tool_response><|im_end|>\n")
    with pytest.raises(Exception, match="Unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


def test_the_run_sees_no_forks(tokenizer):
    report = fork_report(ChatFormat(tokenizer, tools_on=True), [SCHEMA])
    assert report.keeps_prefix, report.text


def test_the_tokenizer_says_how_replies_are_read(tokenizer):
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "417*663"}}\n</tool_call>'
    assert tokenizer.parse_response(call + "<|im_end|>", prefix="") == _CALL
    assert tokenizer.parse_response("276471<|im_end|>", prefix="") == conversations.say("276471")


@pytest.mark.parametrize("text", ["What is 37 plus 85?", "naïve – 日本語 🙂\n\ttabs  and   spaces", "<b>1,234.5</b>"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_config_describes_a_run():
    config = load_config(CONFIG)
    assert config.tools == ["examples.calculator.task:calculate"]
    assert config.training.max_tool_calling_iterations == simulate.TOOL_TURNS
    assert config.sampling.max_completion_length == simulate.MAX_REPLY_TOKENS
    assert config.model.path == str(POLICY_DIR.relative_to(Path.cwd()))
