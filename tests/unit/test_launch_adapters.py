"""A run's config that asks for adapter sync: what it may say, and the server that it gets."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import ConfigError, ServerMismatchError
from asyncgrpo_core.launch import placement
from asyncgrpo_core.launch.doctor import Examination, _check_adapter
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.placement import Placement, place
from asyncgrpo_core.launch.vllm_server import plan_server
from tests.unit.test_launch_placement import CPU, config
from tests.unit.test_server_adapters import cap_of
from tests.unit.test_server_command import flag

LORA = ["model.lora.r=12", "server.port=5555"]


@pytest.mark.parametrize("how", ["server.enable_lora=true", "training.weight_sync_backend=lora"])
def test_f139_f141_f142_either_setting_starts_a_server_of_adapters(how):
    command = plan_server(config([*LORA, how, "training.max_staleness=3"]), CPU)
    assert "--enable-lora" in command.argv
    assert flag(command.argv, "--max-lora-rank") == "16"
    assert flag(command.argv, "--max-loras") == "5"
    assert flag(command.argv, "--load-format") == "auto", "a sync does not bring the base model"
    assert '"backend": "shm"' in flag(command.argv, "--weight-transfer-config"), "merged sync is the fallback"
    assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_merged_weights_stay_the_default_for_an_adapter():
    command = plan_server(config(LORA), CPU)
    assert "--enable-lora" not in command.argv and flag(command.argv, "--load-format") == "dummy"


def test_the_layers_that_are_named_are_the_ones_that_are_served():
    chosen = [*LORA, "server.enable_lora=true", "model.lora.target_modules=[q_proj,v_proj]"]
    argv = plan_server(config(chosen), CPU).argv
    start = argv.index("--lora-target-modules")
    assert argv[start + 1 : start + 3] == ["q_proj", "v_proj"]


def test_a_base_model_of_random_weights_is_refused():
    with pytest.raises(ConfigError, match="load_format is 'dummy'"):
        plan_server(config([*LORA, "server.enable_lora=true", "server.load_format=dummy"]), CPU)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["training.weight_sync_backend=lora"], "model.lora is not set"),
        ([*LORA, "training.weight_sync_backend=lora", "server.enable_lora=false"], "contradicts"),
    ],
)
def test_contradictions_are_refused_when_the_config_is_parsed(overrides, word):
    with pytest.raises(ConfigError, match=word):
        config(overrides)


def test_a_server_without_an_adapter_to_serve_is_refused():
    with pytest.raises(ConfigError, match="trains no adapter"):
        plan_server(config(["server.enable_lora=true", "server.port=5555"]), CPU)


def test_the_backend_of_the_fallback_is_chosen_by_the_devices(monkeypatch):
    monkeypatch.setattr(placement, "visible_gpus", lambda: [0, 1])
    cfg = config([*LORA, "training.weight_sync_backend=lora"])
    assert place(cfg) == Placement("cuda", (0,), (1,), "nccl")
    monkeypatch.setattr(placement, "visible_gpus", lambda: [])
    assert place(cfg) == CPU


def test_a_server_that_runs_already_keeps_its_own_flags():
    cfg = config(["model.lora.r=4", "training.weight_sync_backend=lora", "server.url=http://a:1"])
    assert cfg.server.enable_lora is False and plan_server(cfg, CPU) is None


def test_the_resolved_config_says_the_same_again():
    cfg = config([*LORA, "training.weight_sync_backend=lora"])
    again = parse_config(cfg.model_dump(exclude_unset=True), None, source="again")
    assert again.server.enable_lora is True and again.training.weight_sync_backend == "lora"


@pytest.mark.parametrize(
    ("overrides", "changes", "level", "words"),
    [
        ([], {}, "ok", "takes the adapter alone"),
        ([], {"enable_lora": False}, "ok", "merged are sent: http://a:1 was started without --enable-lora"),
        (["training.weight_sync_backend=lora"], {"routes": frozenset()}, "fail", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ],
)
def test_doctor_says_what_a_running_server_takes(overrides, changes, level, words):
    exam = Examination()
    cfg = config(["model.lora.r=4", "server.url=http://a:1", *overrides])
    _check_adapter(cfg, "http://a:1", cap_of(**changes), exam)
    (finding,) = exam.findings
    assert (finding.level, finding.check) == (level, "adapter") and words in finding.text


def test_doctor_names_the_values_to_restart_a_running_server_with():
    cfg = config(["model.lora.r=40", "server.url=http://a:1"])
    with pytest.raises(ServerMismatchError) as caught:
        _check_adapter(cfg, "http://a:1", cap_of(max_loras=5), Examination())
    assert "--max-lora-rank 64 --max-loras 6" in caught.value.fix
    quiet = Examination()
    _check_adapter(config(["server.url=http://a:1"]), "http://a:1", cap_of(max_loras=5), quiet)
    assert quiet.findings == []
