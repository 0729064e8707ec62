"""The mode of a run with an adapter: chosen once at the start, said in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asyncgrpo_core import AsyncGRPOConfig
from asyncgrpo_core.errors import ConfigError, ServerMismatchError
from asyncgrpo_core.training.adapter_sync import adapter_versions, check_met_again
from asyncgrpo_core.training.run_context import AdapterLink, PolicyLink
from asyncgrpo_core.training.servers import wants_of
from tests.unit.adapter_fakes import AdaptedPolicy
from tests.unit.test_server_adapters import cap_of

TWO = ["http://a:1", "http://b:2"]


def args_of(tmp_path: Path, **changes) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, **changes
    )


def policy(adapter: bool = True, *, rank: int = 4, obstacle: str | None = None) -> PolicyLink:
    made = AdaptedPolicy()
    link = AdapterLink(rank, obstacle, made.save, made.set_probe, made.restore) if adapter else None
    return PolicyLink(lambda: iter(()), made.score, [1, 2], "float32", "cpu", link)


@pytest.fixture(autouse=True)
def hear_everything(caplog):
    caplog.set_level(logging.INFO)


def test_f139_f140_a_server_of_adapters_gets_the_adapter_alone(tmp_path, caplog):
    args = args_of(tmp_path, vllm_server_base_url=TWO)
    versions = adapter_versions(args, policy(), [cap_of(), cap_of(max_loras=9)])
    assert versions.store.directory == (tmp_path / "out" / ".vllm_lora").resolve()
    assert versions._limit == 6, "the smallest --max-loras of all servers"
    assert "sends only the adapter (rank 4); the servers keep 5 versions" in caplog.text
    assert wants_of(args, "policy", policy(), cap_of(), True).weight_transfer_backend is None
    assert wants_of(args, "policy", policy(), cap_of(), False).weight_transfer_backend == "nccl"


def test_f140_a_server_without_lora_falls_back_to_merged_weights(tmp_path, caplog):
    args = args_of(tmp_path, vllm_server_base_url=TWO)
    assert adapter_versions(args, policy(), [cap_of(), cap_of(enable_lora=False)]) is None
    assert "full weights with the adapter merged" in caplog.text and "without --enable-lora" in caplog.text


def test_f140_a_missing_route_is_explained_in_a_warning(tmp_path, caplog):
    assert adapter_versions(args_of(tmp_path), policy(), [cap_of(routes=frozenset())]) is None
    warning = next(r for r in caplog.records if "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in r.getMessage())
    assert warning.levelno == logging.WARNING, "--enable-lora says what was meant"


def test_an_adapter_that_vllm_does_not_serve_is_merged(tmp_path, caplog):
    assert adapter_versions(args_of(tmp_path), policy(obstacle="it uses DoRA"), [cap_of()]) is None
    assert "it uses DoRA" in caplog.text


def test_a_backend_that_is_set_decides(tmp_path, caplog):
    assert adapter_versions(args_of(tmp_path, weight_sync_backend="nccl"), policy(), [cap_of()]) is None
    assert "weight_sync_backend is 'nccl'" in caplog.text
    lora = args_of(tmp_path, weight_sync_backend="lora")
    assert adapter_versions(lora, policy(), [cap_of()]) is not None
    with pytest.raises(ServerMismatchError, match="sends only the adapter, but .*without --enable-lora"):
        adapter_versions(lora, policy(), [cap_of(enable_lora=False)])
    with pytest.raises(ConfigError, match="the policy has none"):
        adapter_versions(lora, policy(adapter=False), [cap_of()])


def test_f142_five_at_staleness_four_is_refused_with_six(tmp_path):
    with pytest.raises(ServerMismatchError) as caught:
        adapter_versions(args_of(tmp_path, max_staleness=4), policy(), [cap_of(max_loras=5)])
    assert "--max-loras 6" in caught.value.fix


def test_a_policy_without_an_adapter_is_sent_whole_and_nothing_is_said(tmp_path, caplog):
    assert adapter_versions(args_of(tmp_path, save_strategy="no"), policy(adapter=False), [cap_of()]) is None
    assert caplog.text == ""


@pytest.mark.parametrize("enable_lora", [True, False])
def test_f145_without_checkpoints_the_adapter_is_lost(tmp_path, caplog, enable_lora):
    caps = [cap_of(enable_lora=enable_lora)]
    adapter_versions(args_of(tmp_path), policy(), caps)
    assert "the trained adapter is lost" not in caplog.text
    adapter_versions(args_of(tmp_path, save_strategy="no"), policy(), caps)
    assert "the trained adapter is lost" in caplog.text


def test_a_server_that_comes_back_with_other_flags_is_refused(tmp_path):
    check_met_again(args_of(tmp_path), policy(), cap_of())
    for cap in (cap_of(enable_lora=False), cap_of(max_loras=2), cap_of(max_lora_rank=1)):
        with pytest.raises(ServerMismatchError):
            check_met_again(args_of(tmp_path), policy(), cap)
