"""Wrap the policy in a PEFT adapter, refusing what the packed forward or the merged weight sync cannot carry."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.parameters import check_merge, server_names


def wrap_adapter(model: PreTrainedModel, peft_config: Any) -> Any:
    """`peft.get_peft_model` with checks; every parameter outside the adapter is frozen.

    Raises:
        ConfigError: PEFT is missing or refuses, the model already carries an adapter, the adapter sits on the head or
            on a tied embedding, cannot be merged into the weights, or changes which weights there are.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("peft_config was given but peft is not installed.", "Install peft.") from error
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            "peft_config was given for a model that is already wrapped in an adapter.", "Pass one of the two."
        )
    _check_kind(peft_config)
    before = server_names(model)
    try:
        wrapped = peft.get_peft_model(model, peft_config)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"PEFT cannot put this {type(peft_config).__name__} on {type(model).__name__}: {error}",
            "Change peft_config (model.lora in a run's config).",
        ) from error
    check_adapter(wrapped)
    strange = server_names(wrapped) ^ before
    if strange:
        raise ConfigError(
            f"{type(peft_config).__name__} changes which weights the model has ({', '.join(sorted(strange)[:3])}), so "
            "that a server could not load the merged model.",
            "Use LoRA.",
        )
    return wrapped


def _check_kind(peft_config: Any) -> None:
    """Refuse adapters that are no change of the model's weights, whatever they are put on."""
    kind = type(peft_config).__name__
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"{kind} learns a prompt; packed rows and the weight sync need mergeable layers.", "Use LoRA."
        )
    if getattr(peft_config, "alora_invocation_tokens", None):
        raise ConfigError(
            "alora_invocation_tokens applies the adapter to a part of each prompt; packed rows and merged weights "
            "apply it to all.",
            "Leave alora_invocation_tokens out.",
        )
    if getattr(peft_config, "layer_replication", None):
        raise ConfigError(
            "layer_replication repeats layers, of which packed rows and the server know nothing.",
            "Leave layer_replication out.",
        )


def check_adapter(wrapped: Any) -> None:
    """Refuse what cannot be trained and sent (also for models that came wrapped).

    Raises:
        ConfigError: the adapter sits on the head or on an embedding that is tied to it, or cannot be merged.
    """
    for name in wrapped.active_adapters:
        _check_kind(wrapped.peft_config[name])
    base = wrapped.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if _is_wrapped(head):
        raise ConfigError(
            "The adapter sits on lm_head, whose log-probabilities are computed from its plain weight.",
            "Leave lm_head out of target_modules and modules_to_save.",
        )
    if _is_wrapped(embedding) and base.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            "The adapter sits on an input embedding that is tied to lm_head: merged, it would change both.",
            "Leave the embedding out of target_modules and modules_to_save.",
        )
    check_merge(wrapped)


def check_not_injected(base: PreTrainedModel) -> None:
    """Refuse an adapter that transformers put into a model without a PeftModel around it: it would go unnoticed.

    Raises:
        ConfigError: there is one, from `model.add_adapter` or a model folder that also holds an adapter.
    """
    if getattr(base, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"transformers has put an adapter into this {type(base).__name__} (add_adapter, or a model folder that "
            "holds adapter_config.json).",
            "Load the base model alone and pass peft_config, or peft.PeftModel.from_pretrained(base, adapter, "
            "is_trainable=True).",
        )


def _is_wrapped(module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
