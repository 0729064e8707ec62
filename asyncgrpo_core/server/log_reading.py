"""What a vLLM server's log says: why it ended, what to change, how far it is."""

from __future__ import annotations

import re

# What vLLM puts before a line: "(EngineCore pid=1) ERROR 11-30 04:05:06 [core.py:1]", in part or whole.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:ERROR|WARNING|INFO|DEBUG) [\d\-]+ [\d:.]+ \[[^\]]*\]\s?)?")
_EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|NotFound|Interrupt)(?::\s|$)")
_ARGPARSE = re.compile(r"\berror: ")
# Says only that another process, or a model's module, failed; the reason stands above it.
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|engine core proc\w* .*failed|WorkerProc initialization failed"
    r"|failed to be inspected",
    re.I,
)

# What to change, by words of the reason; the first that fits.
_FIXES = (
    (
        r"unrecognized arguments:.*--enable-scale-out",
        "This vLLM is older than that flag; set server.token_route to false.",
    ),
    (
        r"unrecognized arguments:.*--return-sampling-mask",
        "This vLLM is older than 0.28 and cannot report candidate sets; set server.token_route to false (the trainer "
        "then normalises over the whole vocabulary, which biases the importance ratio), or use a newer one.",
    ),
    (
        r"sampling distribution replay requires Model Runner V2|Model Runner V2 requires Triton",
        "--return-sampling-mask needs VLLM_USE_V2_MODEL_RUNNER=1 in server.env, and a GPU: leave it out of "
        "server.extra_args on a CPU.",
    ),
    (r"unrecognized arguments", "Correct server.extra_args, or use a vLLM from 0.26 to 0.33."),
    (
        r"No module named '?vllm",
        "Install vLLM there (see the README), or point server.python at an environment that has it.",
    ),
    (
        r"No module named '?asyncgrpo_core",
        "Install this project in the server's environment too (server.python): its workers import a class of it.",
    ),
    (
        r"No module named '?torchvision",
        "vLLM's classes of vision-language models and of Qwen3.5 import it, also for text: install the torchvision "
        "that fits that environment's torch.",
    ),
    (
        r"PackageNotFoundError|No package metadata was found",
        "This CPU build has only the single-server entry point: leave server.api_server_count out.",
    ),
    (
        r"[Aa]ddress already in use",
        "Another process took the port meanwhile: leave server.port out to take a free one.",
    ),
    (
        r"Repo id must be|not a local folder|Invalid repository ID",
        "Correct model.path: no such folder is on this host.",
    ),
    (r"greater than the derived max_model_len", "Lower server.max_model_len, or training.max_completion_length."),
    (
        r"Invalid weight transfer backend: shm",
        "Install this project in the server's environment too: its plugin brings that backend.",
    ),
    (r"Invalid weight transfer backend", "Set training.weight_sync_backend to one of those."),
    (
        r"No available memory for the cache|KV cache is needed, which is larger",
        "Raise server.gpu_memory_utilization (server.kv_cache_gib on a CPU), or lower server.max_model_len.",
    ),
    (
        r"out of memory|less than desired GPU memory utilization",
        "Lower server.gpu_memory_utilization, or free the GPU: another process may hold its memory.",
    ),
)


def fix_for(reason: str) -> str:
    """One sentence and a space about what to change, empty when the reason is not a known one."""
    return next((f"{fix} " for pattern, fix in _FIXES if re.search(pattern, reason)), "")


def failure_reason(lines: list[str]) -> str:
    """The lines of a server's log that say why it ended, as one string.

    The engine runs in its own process, so the log has its traceback and then a second one of the API server that
    only says that the engine failed: the last exception that is not of that kind is the reason. A validation error
    goes on over the following indented lines, which are kept.
    """
    texts = [_PREFIX.sub("", line) for line in lines]
    found = [i for i, text in enumerate(texts) if _EXCEPTION.match(text) or _ARGPARSE.search(text)]
    told = [i for i in found if not _SECOND_HAND.search(texts[i])]
    if not (told or found):
        tail = [text for text in texts if text.strip()][-3:]
        return f"its log ends with: {' | '.join(text.strip() for text in tail)}" if tail else "it wrote nothing."
    at = (told or found)[-1]
    reason = [texts[at].strip()]
    for text in texts[at + 1 : at + 6]:
        if not text.startswith("  ") or text.lstrip().startswith(("File ", "For further information")):
            break
        reason.append(text.strip())
    text = " ".join(reason).split(" [type=")[0][:600].rstrip()  # pydantic ends with a dump of its input
    return text if text.endswith((".", "!", "?")) else f"{text}."


def last_message(lines: list[str]) -> str:
    """The newest log line that says something, without vLLM's prefix, shortened for a progress display."""
    for line in reversed(lines):
        text = _PREFIX.sub("", line).strip()
        if text:
            return text[:120]
    return "no output yet"
