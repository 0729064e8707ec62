"""Compare what a server says about itself with what a run needs, before anything is generated."""

from __future__ import annotations

from dataclasses import dataclass

from asyncgrpo_core.errors import ServerMismatchError
from asyncgrpo_core.server.capabilities import ServerCapabilities

SUPPORTED_VERSIONS = ((0, 26), (0, 33))  # tested range of vLLM, both ends included
_SAMPLING_MASK_SINCE = (0, 28)


@dataclass(frozen=True, kw_only=True)
class ServerWants:
    """What a run needs of its server.

    Attributes:
        served_model_name: the name requests will use.
        num_sampler_logprobs: top log-probabilities per token that requests will ask for.
        dtype: type the trainer computes in, "float32", "bfloat16" or "float16"; None and "auto" are not compared.
        needed_len: longest sequence in tokens that the run is known to need; None is not compared.
        longest_len: --max-model-len up to which server and trainer have the same rotary frequencies; None is any.
        restricted_sampling: top_k, top_p or min_p restrict the candidates.
        weight_transfer_backend: "nccl", "ipc", "shm"; None is not compared (adapter sync, evaluation).
        seeded_requests: requests carry a seed.
    """

    served_model_name: str
    num_sampler_logprobs: int = 0
    dtype: str | None = None
    needed_len: int | None = None
    longest_len: int | None = None
    restricted_sampling: bool = False
    weight_transfer_backend: str | None = None
    seeded_requests: bool = True


def check_server(cap: ServerCapabilities, wants: ServerWants) -> list[str]:
    """Refuse a server that would spoil the run; return warnings about what is only worth knowing.

    A setting that the server does not report (no dev mode, older vLLM) is not refused for that.

    Raises:
        ServerMismatchError: names the flag, the value found and the value wanted.
    """
    _check_model(cap, wants)
    _check_weight_transfer(cap, wants)
    _check_log_probabilities(cap, wants)
    _check_lengths(cap, wants)
    warnings = [*_version_warnings(cap), *_unsaid_warnings(cap), *_sampling_warnings(cap, wants)]
    if wants.dtype not in (None, "auto") and cap.dtype is not None and cap.dtype != wants.dtype:
        warnings.append(
            f"The vLLM server computes in {cap.dtype}, the trainer in {wants.dtype}: their log-probabilities differ "
            f"by rounding. Serve with --dtype {wants.dtype} to close the gap."
        )
    return warnings


def _check_model(cap: ServerCapabilities, wants: ServerWants) -> None:
    if wants.served_model_name not in cap.served_models:
        raise ServerMismatchError(
            f"The vLLM server serves {', '.join(map(repr, cap.served_models)) or 'no model'}, "
            f"not {wants.served_model_name!r}.",
            f"Start it with --served-model-name {wants.served_model_name}, or train the model that it serves.",
        )


def _check_weight_transfer(cap: ServerCapabilities, wants: ServerWants) -> None:
    backend = wants.weight_transfer_backend
    if backend is None:
        return
    if not cap.dev_mode:
        raise ServerMismatchError(
            "The vLLM server does not offer the routes that take weights (/pause, /update_weights, ...).",
            "Start it with VLLM_SERVER_DEV_MODE=1 in its environment.",
        )
    if cap.says_settings and cap.weight_transfer_backend != backend:
        found = "is not set" if cap.weight_transfer_backend is None else f"has backend {cap.weight_transfer_backend!r}"
        raise ServerMismatchError(
            f"The vLLM server's --weight-transfer-config {found}; this run sends weights by {backend!r}.",
            f'Start it with --weight-transfer-config \'{{"backend": "{backend}"}}\', '
            "or set weight_sync_backend to the one that the server has.",
        )


def _check_log_probabilities(cap: ServerCapabilities, wants: ServerWants) -> None:
    if cap.logprobs_mode is not None and cap.logprobs_mode != "processed_logprobs":
        raise ServerMismatchError(
            f"The vLLM server's --logprobs-mode is {cap.logprobs_mode!r}: its log-probabilities are not those of the "
            "distribution it samples from, and every importance ratio would be wrong.",
            "Start it with --logprobs-mode processed_logprobs.",
        )
    if cap.max_logprobs is not None and 0 <= cap.max_logprobs < wants.num_sampler_logprobs:
        raise ServerMismatchError(
            f"num_sampler_logprobs is {wants.num_sampler_logprobs}, but the vLLM server's --max-logprobs "
            f"is {cap.max_logprobs}.",
            f"Start it with --max-logprobs {wants.num_sampler_logprobs}, or lower num_sampler_logprobs.",
        )


def _check_lengths(cap: ServerCapabilities, wants: ServerWants) -> None:
    if wants.needed_len is not None and cap.max_model_len is not None and cap.max_model_len < wants.needed_len:
        raise ServerMismatchError(
            f"The vLLM server's --max-model-len is {cap.max_model_len}, but a prompt and its completion can take "
            f"{wants.needed_len} tokens.",
            f"Start it with --max-model-len {wants.needed_len}, or lower max_completion_length.",
        )
    if wants.longest_len is not None and cap.max_model_len is not None and cap.max_model_len > wants.longest_len:
        raise ServerMismatchError(
            f"The vLLM server's --max-model-len is {cap.max_model_len}, but above {wants.longest_len} tokens the "
            "model's rotary frequencies change: in the server by that flag, in the trainer by a row's longest sample.",
            f"Start it with --max-model-len {wants.longest_len} or less.",
        )
    if wants.seeded_requests and cap.device_type == "cpu" and cap.chunked_prefill_possible:
        raise ServerMismatchError(
            "The vLLM server runs on a CPU and may split a prompt over engine steps (--max-num-batched-tokens is below "
            "--max-num-seqs x --max-model-len); there a seeded request ends the engine.",
            "Start it with --no-enable-chunked-prefill, or raise --max-num-batched-tokens to that product.",
        )


def _version_warnings(cap: ServerCapabilities) -> list[str]:
    low, high = SUPPORTED_VERSIONS
    if low <= cap.version_number <= high:
        return []
    return [
        f"The vLLM server's version is {cap.version or 'unknown'}; this project is made for "
        f"{low[0]}.{low[1]} to {high[0]}.{high[1]}."
    ]


def _unsaid_warnings(cap: ServerCapabilities) -> list[str]:
    if cap.logprobs_mode is not None:
        return []
    return [
        "The vLLM server does not say its --logprobs-mode; make sure that it was started with "
        "--logprobs-mode processed_logprobs."
    ]


def _sampling_warnings(cap: ServerCapabilities, wants: ServerWants) -> list[str]:
    """top_k / top_p / min_p need the server's candidate sets (reference, 'Top-k and top-p')."""
    if not wants.restricted_sampling:
        if cap.return_sampling_mask:
            raise ServerMismatchError(
                "The vLLM server was started with --return-sampling-mask, which refuses requests without top_k, "
                "and this run samples from the whole vocabulary.",
                "Start it without --return-sampling-mask, or set top_k.",
            )
        return []
    if returns_candidate_sets(cap):
        return []
    if cap.version_number < _SAMPLING_MASK_SINCE or cap.device_type == "cpu":
        why = "on a CPU" if cap.device_type == "cpu" else f"of version {cap.version or 'unknown'}, before 0.28"
        return [
            f"top_k, top_p or min_p is set, but a vLLM server {why} cannot report the candidates that tokens were "
            "drawn from; the trainer normalises over the whole vocabulary, which biases the importance ratio."
        ]
    missing = [] if cap.token_in_token_out else ["--enable-scale-out"]
    if cap.return_sampling_mask is False:
        missing = ["--return-sampling-mask", *missing]
    if missing:
        runner = " and VLLM_USE_V2_MODEL_RUNNER=1 in its environment" if cap.return_sampling_mask is False else ""
        raise ServerMismatchError(
            f"top_k, top_p or min_p is set, but the vLLM server was started without {' and '.join(missing)}: the "
            "trainer could not normalise over the candidates that tokens were drawn from.",
            f"Start it with {' '.join(missing)}{runner}.",
        )
    return [
        "The vLLM server does not say whether it was started with --return-sampling-mask. Without it, the trainer "
        "normalises over the whole vocabulary, which biases the importance ratio under top_k, top_p and min_p."
    ]


def returns_candidate_sets(cap: ServerCapabilities) -> bool:
    """Whether its replies carry the candidate set of every token (reference, 'Top-k and top-p sampling')."""
    return bool(cap.return_sampling_mask) and cap.token_in_token_out
