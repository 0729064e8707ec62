"""Why a server ended, out of logs that vLLM 0.32 really wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_core.server.log_reading import failure_reason, fix_for, last_message

RECORDED = Path(__file__).parent.parent / "data" / "vllm_0_32"


@pytest.mark.parametrize(
    ("log", "reason", "fix"),
    [
        ("dies_flag", "error: unrecognized arguments: --no-such-flag", "server.extra_args"),
        ("dies_folder", "OSError: Repo id must be in the form", "model.path"),
        ("dies_length", "max_model_len (4096) is greater than the derived max_model_len", "server.max_model_len"),
        # The engine's own process fails; the API server's traceback comes after it and says nothing.
        (
            "dies_backend",
            "ValueError: Invalid weight transfer backend: bogus. Available engines:",
            "weight_sync_backend",
        ),
        # vLLM says that a model's module failed, and why only before that.
        ("dies_torchvision", "ModuleNotFoundError: No module named 'torchvision'", "install the torchvision that fits"),
    ],
)
def test_the_line_that_says_why(log, reason, fix):
    told = failure_reason((RECORDED / f"{log}.log").read_text().splitlines())
    assert reason in told
    assert fix in fix_for(told)
    assert "Traceback" not in told and 'File "' not in told and "Engine core initialization" not in told
    assert len(told) <= 601 and told.endswith(".")


def test_a_log_without_an_exception_gives_its_end():
    assert failure_reason(["one", "", "two", "three", "four"]) == "its log ends with: two | three | four"
    assert failure_reason(["", "  "]) == "it wrote nothing."


def test_only_a_second_hand_error_is_better_than_nothing():
    lines = ["(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above."]
    assert failure_reason(lines).startswith("RuntimeError: Engine core initialization failed")


def test_a_missing_vllm_is_explained():
    line = (
        "python: Error while finding module specification for 'vllm.entrypoints.openai.api_server' "
        "(ModuleNotFoundError: No module named 'vllm')"
    )
    assert "server.python" in fix_for(failure_reason([line]))


def test_an_old_vllm_without_the_token_route_is_explained():
    line = "api_server.py: error: unrecognized arguments: --enable-scale-out"
    assert "server.token_route" in fix_for(failure_reason([line]))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("api_server.py: error: unrecognized arguments: --return-sampling-mask", "older than 0.28"),  # F137
        # F136; both as vLLM 0.32 wrote them on a CPU, without and with VLLM_USE_V2_MODEL_RUNNER=1
        ("  Value error, sampling distribution replay requires Model Runner V2", "VLLM_USE_V2_MODEL_RUNNER=1"),
        ("  Value error, Model Runner V2 requires Triton.", "a GPU"),
    ],
)
def test_f136_a_server_that_cannot_return_candidate_sets_is_explained(line, word):
    lines = ["pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig", line]
    assert word in fix_for(failure_reason(lines if line.startswith(" ") else [line]))


def test_an_unknown_reason_gets_no_fix():
    assert fix_for("RuntimeError: the sky fell.") == ""


def test_last_message_is_without_prefix_and_short():
    lines = ["(EngineCore pid=1) INFO 11-30 04:05:06 [core.py:1] Loading weights", "", "(Worker pid=2) "]
    assert last_message(lines) == "Loading weights"
    assert last_message([]) == "no output yet"
    assert len(last_message(["x" * 500])) == 120
