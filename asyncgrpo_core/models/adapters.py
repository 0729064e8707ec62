"""Wrap the policy in a PEFT adapter, refusing what the packed forward or the merged weight sync cannot carry."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from asyncgrpo_core.errors import ConfigError


def wrap_adapter(model: PreTrainedModel, peft_config: Any) -> Any:
    """`peft.get_peft_model` with checks; every parameter outside the adapter is frozen.

    Raises:
        ConfigError: PEFT is missing, the model already carries an adapter, the adapter sits on the head or on a tied
            embedding, or is of a kind that cannot be merged into the weights (prompt learning).
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("peft_config was given but peft is not installed.", "Install peft.") from error
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            "peft_config was given for a model that is already wrapped in an adapter.", "Pass one of the two."
        )
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"{type(peft_config).__name__} learns a prompt; packed rows and the weight sync need mergeable layers.",
            "Use LoRA.",
        )
    wrapped = peft.get_peft_model(model, peft_config)
    check_adapter(wrapped)
    return wrapped


def check_adapter(wrapped: Any) -> None:
    """Refuse adapters on the head, or on an embedding that is tied to it (also for models that came wrapped)."""
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


def _is_wrapped(module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
