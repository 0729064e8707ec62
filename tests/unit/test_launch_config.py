"""RunConfig: what is accepted, and what each mistake in a config file is told."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.doctor import Examination, _check_budget
from asyncgrpo_core.launch.loading import load_config, parse_config, quickstart_config, quickstart_text, read_resolved
from asyncgrpo_core.launch.preflight import check_settings
from asyncgrpo_core.launch.training_section import TrainingSection

ROOT = Path(__file__).resolve().parents[2]


def minimal(**sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": "some/model"},
        "data": {"train": "my.module:rows"},
        "rewards": ["my.module:score"],
    }
    return base | sections


def parse(overrides: list[str] | None = None, **sections: Any) -> RunConfig:
    return parse_config(minimal(**sections), overrides, source="x.yaml")


def refused(overrides: list[str] | None = None, **sections: Any) -> str:
    """The message of the refusal, which is always one paragraph."""
    with pytest.raises(ConfigError) as caught:
        parse(overrides, **sections)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_example_is_the_embedded_quickstart():
    assert (ROOT / "examples" / "quickstart.yaml").read_text() == quickstart_text()
    assert quickstart_config().checkpoint.every_steps == 10


def test_the_quickstart_trains_with_the_settings_that_were_measured():
    from asyncgrpo_core.quickstart.settings import TRAINING

    cfg = quickstart_config()
    for name, value in TRAINING.items():
        found = cfg.server.max_model_len if name == "max_model_len" else getattr(cfg.training, name)
        assert found == value, name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_committed_config_is_accepted(path: Path):
    assert load_config(path).rewards


def test_the_deployment_in_prefect_yaml_trains_as_the_quickstart_does():
    quickstart = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        assert RunConfig.model_validate(deployment["parameters"]["cfg"]) == RunConfig.model_validate(quickstart)
        module, _, function = deployment["entrypoint"].rpartition(".")
        assert (module, function) == ("flows.train", "train")


# -- unknown keys


@pytest.mark.parametrize(
    ("overrides", "key", "suggestion"),
    [
        (["modle.path=x"], "`modle`", "`model`"),
        (["server.max_model_length=5"], "`server.max_model_length`", "`server.max_model_len`"),
        (["tracking.checkpoints.logg=all"], "`tracking.checkpoints.logg`", "`tracking.checkpoints.log`"),
        (["model.lora.rr=4"], "`model.lora.rr`", "`model.lora.r`"),
        (["evaluation.nn=4"], "`evaluation.nn`", "`evaluation.n`"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(overrides, key, suggestion):
    message = refused(overrides)
    assert key in message and suggestion in message and message.startswith("x.yaml")


def test_an_unknown_training_key_is_looked_up_in_the_dataclass():
    message = refused(["training.learning_rat=1.0e-4"])
    assert "training.learning_rat " in message and "`training.learning_rate`" in message


def test_a_training_key_without_a_line_of_its_own_is_accepted_and_converted():
    cfg = parse(["training.logging_first_step=true", "training.data_seed=3"])
    assert cfg.training.explicit()["logging_first_step"] is True
    assert cfg.training.explicit()["data_seed"] == 3
    # as text, the way YAML 1.1 reads 1e-4
    assert parse(["training.eval_delay='1e-4'"]).training.explicit()["eval_delay"] == 1e-4


def test_a_training_key_of_the_wrong_type_is_refused():
    message = refused(["training.data_seed=soon"])
    assert "training.data_seed = 'soon'" in message


# -- values


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.num_generations=1", ["training.num_generations", "1", "greater than or equal to 2"]),
        ("training.max_steps=many", ["training.max_steps", "'many'", "integer"]),
        ("training.temperature=0", ["training.temperature", "greater than 0"]),
        ("training.top_p=1.5", ["training.top_p", "less than or equal to 1"]),
        ("training.dtype=int8", ["training.dtype", "'int8'", "float32"]),
        ("sampling.num_generations=1", ["sampling.num_generations", "greater than or equal to 2"]),
        ("server.port=99999", ["server.port", "99999", "65535"]),
        ("server.load_format=fast", ["server.load_format", "'fast'", "dummy"]),
        ("name=a b", ["name", "a b"]),
        ("model.path=[1]", ["model.path", "string"]),
        ("rewards=nothing", ["rewards", "list"]),
        ("tracking.required=maybe", ["tracking.required", "boolean"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(override, parts):
    message = refused([override])
    for part in parts:
        assert part in message


# Where infinity means "no bound".
UNBOUNDED = {"training.vllm_importance_sampling_clip_max", "training.max_grad_norm"}


def number_keys() -> list[str]:
    """Every setting of the sections of this module that is a fractional number."""
    sections = ["training", "sampling", "resources", "checkpoint", "evaluation"]
    annotations = {
        f"{section}.{name}": field.annotation
        for section in sections
        for name, field in getattr(parse(), section).__class__.model_fields.items()
    }
    return [key for key, kind in annotations.items() if float in (kind, *typing.get_args(kind))]


@pytest.mark.parametrize("key", number_keys())
def test_no_setting_is_infinite_or_no_number(key):
    """Timeouts, rates and intervals of infinity end in overflow errors long after the config was read."""
    assert key in refused([f"{key}=.nan"])
    if key in UNBOUNDED:
        parse([f"{key}=.inf"])
    else:
        assert "finite number" in (message := refused([f"{key}=.inf"])) and key in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["training.parallelism_config={cp_size: 2}"], ["cp_size", "Set cp_size=1"]),
        (["training.parallelism_config={sp_size: 4}"], ["sp_size"]),
        (["training.deepspeed={zero_optimization: {stage: 2}}"], ["DeepSpeed", "FSDP2"]),
        (["training.use_liger_kernel=true"], ["use_liger_kernel"]),
        (["training.remove_unused_columns=true"], ["remove_unused_columns"]),
        (["training.optim=adamm"], ["adamm"]),
        (["training.lr_scheduler_type=cosin"], ["cosin"]),
        (["training.warmup_steps=0.1", "training.lr_scheduler_type=linear"], ["warmup_steps"]),
        (["training.ddp_timeout=0"], ["ddp_timeout", ">= 1"]),
        (["training.fsdp=true"], ["training.fsdp", "resources.trainer_ranks"]),
        (["training.fsdp=true", "resources.trainer_ranks=2", "training.fsdp_config=no.json"], ["no.json"]),
        (["training.fsdp=true", "resources.trainer_ranks=2", "training.fsdp_config={version: 1}"], ["FSDP2"]),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before_anything_is_started(overrides, parts):
    cfg = parse(["tracking.enabled=false", "training.use_cpu=true", *overrides])
    with pytest.raises(ConfigError) as refusal:
        check_settings(cfg)
    assert all(part in str(refusal.value) for part in parts)


@pytest.mark.parametrize(("budget", "level"), [(10, "fail"), (11, "warn"), (17, "warn"), (18, None)])
def test_doctor_says_which_samples_of_the_first_prompt_no_row_can_hold(budget, level):
    """A prompt of 10 tokens and completions of 1 to 8."""
    exam = Examination()
    _check_budget(exam, prompt=10, completion=8, budget=budget)
    assert [finding.level for finding in exam.findings] == ([] if level is None else [level])


def test_several_errors_are_one_paragraph():
    message = refused(["training.max_steps=x", "training.top_p=2", "server.port=0", "evaluation.n=-1"])
    assert "training.max_steps" in message and "training.top_p" in message and "(1 more.)" in message


@pytest.mark.parametrize("missing", ["model", "data", "rewards"])
def test_a_missing_section_is_named(missing):
    data = minimal()
    del data[missing]
    with pytest.raises(ConfigError, match=missing):
        parse_config(data, None, source="x.yaml")


def test_an_import_path_has_a_colon():
    assert "package.module:name" in refused(rewards=["my.module.score"])
    assert "package.module:name" in refused(["loop=my.module.Loop"])
    assert "package.module:name" in refused(["environment={a: my.module}"])


# -- contradictions


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["sampling.temperature=0.7", "training.temperature=1.0"], ["sampling.temperature", "training.temperature"]),
        (["checkpoint.every_steps=5", "training.save_steps=10"], ["checkpoint.every_steps", "training.save_steps"]),
        (["checkpoint.keep=5", "training.save_total_limit=1"], ["checkpoint.keep", "training.save_total_limit"]),
        (["server.url=http://a:1", "training.vllm_server_base_url=http://b:1"], ["server.url", "vllm_server_base_url"]),
        (["training.top_p=0.9"], ["training.top_p", "training.top_k"]),
        (["sampling.top_p=0.9"], ["top_p", "training.top_k"]),
        (["sampling.min_p=0.1"], ["min_p", "training.top_k"]),
        (["server.max_model_len=64", "sampling.max_completion_length=64"], ["max_completion_length", "max_model_len"]),
        (["training.bf16=true", "training.fp16=true"], ["training.bf16", "training.fp16"]),
        (["training.max_steps=0"], ["training.max_steps = 0", "num_train_epochs"]),
        (["training.save_strategy=best"], ["training.save_strategy", "checkpoint.every_steps"]),
        (["training.vllm_importance_sampling_clip_min=6"], ["clip_min", "6"]),
        (["training.output_dir=/tmp/x"], ["training.output_dir", "--run-dir"]),
        (["training.resume_from_checkpoint=/tmp/x"], ["training.resume_from_checkpoint", "--resume"]),
        (["data.train=null"], ["data.train"]),
        (["data.train=null", "environment=my.module:Env"], ["training.max_steps"]),
    ],
)
def test_a_contradiction_is_refused_with_both_keys(overrides, parts):
    message = refused(overrides)
    for part in parts:
        assert part in message


def test_a_token_is_refused_and_not_repeated():
    """It would be written into the run's folder, to MLflow and to Prefect."""
    message = refused(["training.hub_token=hf_secret"])
    assert "training.hub_token" in message and "HF_TOKEN" in message and "hf_secret" not in message


def test_a_setting_said_in_its_own_section_reaches_training():
    cfg = parse(["sampling.temperature=0.7", "checkpoint.every_steps=5", "server.url=http://a:1/"])
    assert cfg.training.explicit() == {
        "temperature": 0.7,
        "save_steps": 5,
        "vllm_server_base_url": "http://a:1",
    }


def test_the_reference_s_server_url_names_an_existing_server():
    assert parse(["training.vllm_server_base_url=http://a:1"]).server.url == "http://a:1"


# -- the file and --set


def test_set_makes_sections_and_reads_yaml_values():
    cfg = parse(["training.max_steps=7", "data.train_args={n: 3}", "rewards=[a:b, c.d:e]", "model.revision=null"])
    assert cfg.training.max_steps == 7
    assert cfg.data.train_args == {"n": 3}
    assert cfg.rewards == ["a:b", "c.d:e"]
    assert cfg.model.revision is None


@pytest.mark.parametrize("override", ["training.max_steps", "=5", "a..b=5", "model.path.x=5", "training.max_steps=[1"])
def test_a_malformed_override_is_named(override):
    assert override in refused([override])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: [", "line 1"),
        ("a: 1\nname: x\na: 2\n", "'a' is there twice"),
        ("- 1\n", "list, not a mapping"),
        ("", "nothing, not a mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, part):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert part in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


# -- what the children read


def test_the_resolved_json_says_the_same_as_the_config(tmp_path):
    cfg = parse(["training.learning_rate=2.0e-4", "training.data_seed=3", "sampling.top_k=5", "model.lora.r=4"])
    path = tmp_path / "config.resolved.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    again = read_resolved(path)
    assert again == cfg
    assert (
        again.training.explicit()
        == cfg.training.explicit()
        == {
            "learning_rate": 2e-4,
            "data_seed": 3,
            "top_k": 5,
        }
    )


def test_a_damaged_resolved_json_is_named(tmp_path):
    path = tmp_path / "config.resolved.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_resolved(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_resolved(path)


# -- the repeated fields


def test_every_repeated_training_field_has_the_dataclass_s_name_and_default():
    """F203, F210 to F212: the section cannot drift from `AsyncGRPOConfig`."""
    from asyncgrpo_core.training.config import AsyncGRPOConfig

    fields = {f.name: f for f in dataclasses.fields(AsyncGRPOConfig)}
    for name, field in TrainingSection.model_fields.items():
        assert name in fields, name
        assert fields[name].default == field.default, name


def test_every_own_field_of_the_dataclass_has_a_line_of_its_own():
    from transformers import TrainingArguments

    from asyncgrpo_core.training.config import AsyncGRPOConfig

    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    own = {f.name for f in dataclasses.fields(AsyncGRPOConfig)} - inherited
    assert own <= set(TrainingSection.model_fields)


def test_a_default_that_was_not_said_is_left_to_the_dataclass():
    """gradient_checkpointing=True said and by default resolve differently without an accelerator."""
    assert "gradient_checkpointing" not in parse().training.explicit()
    assert parse(["training.gradient_checkpointing=true"]).training.explicit()["gradient_checkpointing"] is True
    assert parse().training.with_defaults()["gradient_checkpointing"] is True


def test_parsing_imports_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from asyncgrpo_core.launch.loading import quickstart_config; quickstart_config(); "
        "print([m for m in ('torch', 'transformers', 'prefect', 'mlflow', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr
