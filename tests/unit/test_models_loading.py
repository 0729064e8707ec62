"""load_policy and load_processing_class: precedence, folders, adapters."""

import logging
from types import SimpleNamespace

import huggingface_hub
import peft
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import support
from asyncgrpo_core.models.loading import load_policy, load_processing_class
from asyncgrpo_core.models.moe import router_balance
from tests.unit.policy_cases import VOCAB, tiny_policy


def config(**kwargs):
    defaults = {"model_init_kwargs": None, "dtype": "float32", "trust_remote_code": False}
    return SimpleNamespace(**{**defaults, "router_aux_loss_coef": None, "use_cpu": True, **kwargs})


def tokenizer(**kwargs):
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), **kwargs)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


@pytest.fixture
def folder(tmp_path):
    tiny_policy(dtype=torch.bfloat16).save_pretrained(tmp_path)
    tokenizer(eos_token="</s>", pad_token="<pad>").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("dtype", "init_kwargs", "want"),
    [
        ("float32", None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("auto", None, torch.bfloat16),
        ("float32", {"dtype": "float16"}, torch.float16),
        ("bfloat16", '{"dtype": "float32"}', torch.float32),
        ("float32", {"dtype": torch.float64}, torch.float64),
    ],
)
def test_f207_dtype_in_model_init_kwargs_wins(folder, dtype, init_kwargs, want):
    model = load_policy(str(folder), config(dtype=dtype, model_init_kwargs=init_kwargs))
    assert isinstance(model, Qwen3ForCausalLM)
    assert {p.dtype for p in model.parameters()} == {want}


@pytest.mark.parametrize(("dtype", "saved"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_f208_a_checkpoint_has_the_dtype_that_was_trained(folder, tmp_path, dtype, saved):
    load_policy(str(folder), config(dtype=dtype)).save_pretrained(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {saved}  # noqa: SIM118


def capture(monkeypatch, cls, result):
    calls = []

    def from_pretrained(name, *args, **kwargs):
        calls.append(kwargs)
        return result

    monkeypatch.setattr(cls, "from_pretrained", from_pretrained)
    return calls


def test_f207_revision_reaches_model_and_tokenizer(folder, monkeypatch):
    settings = config(model_init_kwargs={"revision": "abc", "use_safetensors": True}, trust_remote_code=True)
    calls = capture(monkeypatch, Qwen3ForCausalLM, tiny_policy())
    load_policy(str(folder), settings)
    assert calls[0]["revision"] == "abc" and calls[0]["use_safetensors"] and calls[0]["trust_remote_code"]
    calls = capture(monkeypatch, AutoTokenizer, tokenizer(eos_token="</s>"))
    load_processing_class(str(folder), settings)
    assert calls[0]["revision"] == "abc" and calls[0]["trust_remote_code"]


def test_f207_remote_code_is_off_unless_asked_for(folder, monkeypatch):
    calls = capture(monkeypatch, Qwen3ForCausalLM, tiny_policy())
    load_policy(str(folder), config())
    assert calls[0]["trust_remote_code"] is False and "revision" not in calls[0]


def test_a_config_without_a_known_architecture_loads_as_a_causal_model(folder, monkeypatch):
    text = (folder / "config.json").read_text().replace("Qwen3ForCausalLM", "MyQwenForCausalLM")
    (folder / "config.json").write_text(text)
    calls = capture(monkeypatch, AutoModelForCausalLM, tiny_policy())
    load_policy(str(folder), config())
    assert len(calls) == 1


def test_a_model_object_is_taken_as_it_is(caplog):
    model = tiny_policy(dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        assert load_policy(model, config(model_init_kwargs={"revision": "x"})) is model
    assert "no effect" in caplog.text
    assert next(model.parameters()).dtype == torch.float16


def test_eos_ids_are_the_generation_configs_else_the_configs():
    model = tiny_policy()
    assert load_policy(model, config()).eos_token_ids == [2]
    model.generation_config.eos_token_id = [7, 2]
    assert load_policy(model, config()).eos_token_ids == [7, 2]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
        (lambda f: (f / "config.json").write_text('{"model_type": "nonesuch"}'), "cannot be loaded"),
    ],
    ids=["no config", "no weights", "broken config", "unknown model type"],
)
def test_a_folder_that_is_no_model_is_explained(folder, prepare, message):
    prepare(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(str(folder), config())
    assert str(folder) in str(caught.value) and caught.value.fix


def test_a_missing_folder_and_a_file_are_explained(folder):
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(str(folder / "nothing"), config())
    with pytest.raises(ConfigError, match="is a file"):
        load_policy(str(folder / "config.json"), config())


def test_a_model_id_outside_the_cache_is_explained_when_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="org/not-in-the-cache"):
        load_policy("org/not-in-the-cache", config())
    with pytest.raises(ConfigError, match="tokenizer of 'org/not-in-the-cache'"):
        load_processing_class("org/not-in-the-cache", config())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "float8"),
        ({"model_init_kwargs": {"dtype": "int4"}}, "int4"),
        ({"model_init_kwargs": "{revision: x}"}, "not JSON"),
        ({"model_init_kwargs": "[1]"}, "not a mapping"),
    ],
)
def test_bad_settings_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_policy(str(folder), config(**settings))


def test_f194_padding_side_and_pad_token(folder, caplog):
    loaded = load_processing_class(str(folder), config())
    assert (loaded.padding_side, loaded.pad_token) == ("left", "<pad>")
    with caplog.at_level(logging.WARNING):
        given = load_processing_class(tokenizer(eos_token="</s>", padding_side="right"), config())
    assert (given.padding_side, given.pad_token, given.pad_token_id) == ("left", "</s>", 2)
    assert "no pad token" in caplog.text


def test_tokenizers_that_cannot_be_used_are_explained(folder):
    with pytest.raises(ConfigError, match="neither a pad nor an eos"):
        load_processing_class(tokenizer(), config())
    bare = tokenizer(eos_token="</s>")
    bare.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        load_processing_class(bare, config())
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_processing_class(str(folder), config())


def test_an_adapter_trains_alone(folder):
    model = load_policy(str(folder), config(), peft_config=peft.LoraConfig(r=2, target_modules="all-linear"))
    assert isinstance(model, peft.PeftModel) and model.eos_token_ids == [2]
    assert {"lora_" in n for n, p in model.named_parameters() if p.requires_grad} == {True}


@pytest.mark.parametrize(
    ("architecture", "adapter", "message"),
    [
        ("llama", peft.LoraConfig(target_modules=["lm_head"]), "lm_head"),
        ("llama", peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head"),
        ("qwen3", peft.LoraConfig(target_modules=["embed_tokens"]), "tied"),
        ("qwen3", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "learns a prompt"),
        ("qwen3", peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]), "lm_head"),  # tied to it
        (
            "llama",
            peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
            "part of each prompt",
        ),
        ("llama", peft.LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]]), "repeats layers"),
        (
            "llama",
            peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
            r"changes which weights .*adaption_prompt",
        ),
        ("llama", peft.PolyConfig(target_modules=["q_proj"]), "cannot be merged into full weights: NotImplemented"),
        ("llama", peft.LoraConfig(target_modules=["qkv"]), r"PEFT cannot put this LoraConfig on LlamaForCausalLM.*qkv"),
    ],
)
def test_f007_adapters_that_cannot_be_synced_are_refused(architecture, adapter, message):
    with pytest.raises(ConfigError, match=message):
        load_policy(tiny_policy(architecture), config(), peft_config=adapter)


def test_f007_a_second_adapter_a_learned_prompt_and_a_wrapped_head_are_refused():
    wrapped = peft.get_peft_model(tiny_policy("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="already wrapped"):
        load_policy(wrapped, config(), peft_config=peft.LoraConfig(target_modules=["q_proj"]))
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="learns a prompt"):
        load_policy(peft.get_peft_model(tiny_policy("llama"), prompts), config())
    on_head = peft.get_peft_model(tiny_policy("llama"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="lm_head"):
        load_policy(on_head, config())


def test_f007_an_adapter_inside_the_model_is_refused(folder):
    """transformers loads an adapter that lies beside the weights by itself."""
    model = tiny_policy("llama")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="put an adapter into this LlamaForCausalLM"):
        load_policy(model, config())
    beside = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    beside.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        load_policy(str(folder), config())


def test_f008_a_model_with_sinks_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    GptOssConfig(architectures=["GptOssForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    monkeypatch.setattr(GptOssForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="attention sinks"):
        load_policy(str(tmp_path), config())


def test_f008_sinks_that_only_the_model_shows_are_refused():
    model = tiny_policy("llama")
    assert isinstance(model, LlamaForCausalLM)
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.sinks"):
        load_policy(model, config())


def test_f004_an_old_transformers_is_named(monkeypatch):
    monkeypatch.setattr(support.transformers, "__version__", "5.1.3")
    with pytest.raises(ConfigError, match=r"transformers 5\.1\.3 .*>=5\.2\.0"):
        load_policy(tiny_policy(), config())


def test_f209_the_coefficient_of_the_auxiliary_loss_is_checked_and_installed_on_load():
    with pytest.raises(ConfigError, match="not a Mixture-of-Experts"):
        load_policy(tiny_policy(), config(router_aux_loss_coef=0.01))
    for requested, used in ((None, 0.001), (0.0, None), (0.2, 0.2)):
        policy = load_policy(tiny_policy("qwen3_moe"), config(router_aux_loss_coef=requested))
        balance = router_balance(policy)
        assert (None if balance is None else balance.coefficient) == used
