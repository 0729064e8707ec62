"""Load the policy and its tokenizer, and say clearly what is wrong with a model folder before anything starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.adapters import check_adapter, check_not_injected, wrap_adapter
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.moe import install_router_loss, router_coefficient
from asyncgrpo_core.models.support import (
    check_config,
    check_model,
    check_transformers,
    current_device_traits,
    freeze_outside_text_model,
)

logger = logging.getLogger(__name__)

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_policy(model: str | PreTrainedModel, config: Any, *, peft_config: Any = None) -> PreTrainedModel:
    """The policy to train, with `eos_token_ids` (list of int, what the server stops at) set on it.

    Args:
        model: model id or local folder, loaded with the architecture of its config; or a loaded model, which is
            taken as it is (`dtype` and `model_init_kwargs` then have no effect). Of a vision-language model
            everything outside the text model is frozen.
        config: reads `model_init_kwargs` (dict or JSON text, wins over the rest), `dtype`, `trust_remote_code`,
            `router_aux_loss_coef`, `use_cpu`.
        peft_config: wraps the model in an adapter (see `wrap_adapter`).

    Raises:
        ConfigError: the folder or model id cannot be loaded, the dtype is unknown, or the architecture, the adapter
            or the load-balancing loss that `router_aux_loss_coef` asks for is not supported.
    """
    check_transformers()
    if isinstance(model, str):
        policy: Any = _load(model, config)
    else:
        policy = model
        _check_architecture(causal_model(policy).config, config)
        if _init_kwargs(config):
            logger.warning("model_init_kwargs has no effect on a model that is passed as an object")
    check_not_injected(causal_model(policy))
    if peft_config is not None:
        policy = wrap_adapter(policy, peft_config)
    elif hasattr(policy, "get_base_model"):
        check_adapter(policy)
    base: Any = causal_model(policy)
    check_model(base)
    freeze_outside_text_model(base)  # after the adapter: one that reached the vision tower is frozen with it
    install_router_loss(base, config.router_aux_loss_coef)
    base.eos_token_ids = _eos_token_ids(base)
    return policy


def load_processing_class(source: str | PreTrainedTokenizerBase, config: Any) -> PreTrainedTokenizerBase:
    """The tokenizer, padding on the left, with a pad token (its eos token when it has none, with a message).

    Args:
        source: model id or folder (`model_init_kwargs["revision"]` and `trust_remote_code` apply), or a tokenizer.

    Raises:
        ConfigError: no tokenizer there, no chat template, or neither a pad nor an eos token.
    """
    name = source if isinstance(source, str) else source.name_or_path
    tokenizer = _load_tokenizer(source, config) if isinstance(source, str) else source
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"The tokenizer of {name!r} has no chat template, so prompts of messages cannot be rendered.",
            "Use an instruction-tuned model, or set tokenizer.chat_template and save the tokenizer.",
        )
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"The tokenizer of {name!r} has neither a pad nor an eos token.", "Set one of them.")
        logger.warning("The tokenizer of %r has no pad token; its eos token %r is used", name, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load(name: str, config: Any) -> PreTrainedModel:
    kwargs = {
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        **_init_kwargs(config),
    }
    kwargs["dtype"] = _dtype(kwargs["dtype"])
    if kwargs.pop("attn_implementation", None) is not None:
        logger.warning("attn_implementation in model_init_kwargs is ignored: the trainer sets packed attention")
    _check_folder(name)
    hub_kwargs = {k: kwargs[k] for k in ("revision", "trust_remote_code", "token", "cache_dir") if k in kwargs}
    try:
        model_config = AutoConfig.from_pretrained(name, **hub_kwargs)
        _check_architecture(model_config, config)
        return _architecture(model_config).from_pretrained(name, **kwargs)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The model {name!r} cannot be loaded: {_first_line(error)}",
            "Give a folder made by save_pretrained, or a model id that is in the local cache or reachable.",
        ) from error


def _check_architecture(model_config: Any, config: Any) -> None:
    device = None if config.use_cpu else current_device_traits()
    check_config(model_config, device)
    router_coefficient(model_config, config.router_aux_loss_coef)


def _architecture(model_config: Any) -> Any:
    """The class that the config names, when transformers has it and it generates text; else the causal default.

    A vision-language checkpoint is loaded whole, so that its parameters keep the names that the server knows.
    """
    vision_language = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model_config), None)
    for architecture in getattr(model_config, "architectures", None) or ():
        found = getattr(transformers, architecture, None)
        if found is not None and architecture.endswith("ForCausalLM"):
            return found
        if found is not None and found is vision_language:
            return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _init_kwargs(config: Any) -> dict[str, Any]:
    value = config.model_init_kwargs
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"model_init_kwargs is not JSON: {value!r} ({error}).", "Write a JSON object.") from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"model_init_kwargs is {type(value).__name__}, not a mapping.", "Write a JSON object.")
    return dict(value or {})


def _dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype={value!r} is unknown.", f"Set it to one of {', '.join(_DTYPES)}.")
    return name if name == "auto" else getattr(torch, name)


def _check_folder(name: str) -> None:
    """Say what a local model folder lacks; names that are no path are left to the hub's cache."""
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
            raise ConfigError(f"The model folder {name!r} does not exist.", "Check the path.")
        return
    if not folder.is_dir():
        raise ConfigError(f"The model {name!r} is a file.", "Give the folder that holds config.json and the weights.")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"The model folder {name!r} has no config.json.", "Give a folder made by model.save_pretrained."
        )
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        raise ConfigError(
            f"The model folder {name!r} has no weights ({' or '.join(_WEIGHT_PATTERNS)}).",
            "Give a folder made by model.save_pretrained, or download the weights too.",
        )


def _load_tokenizer(name: str, config: Any) -> PreTrainedTokenizerBase:
    revision = _init_kwargs(config).get("revision")
    kwargs = {} if revision is None else {"revision": revision}
    trust = _init_kwargs(config).get("trust_remote_code", config.trust_remote_code)
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(next(folder.glob(p), None) for p in ("tokenizer*", "vocab*", "spiece.model")):
        raise ConfigError(
            f"The model folder {name!r} has no tokenizer.", "Save one there with tokenizer.save_pretrained."
        )
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust, padding_side="left", **kwargs)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer of {name!r} cannot be loaded: {_first_line(error)}",
            "Save it beside the weights with tokenizer.save_pretrained, or pass processing_class.",
        ) from error


def _eos_token_ids(model: Any) -> list[int]:
    """What ends a completion: the generation config's ids, as the server uses them, else the config's."""
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
    return []


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
