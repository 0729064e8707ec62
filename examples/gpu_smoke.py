"""Does everything work together on GPUs? A short run of a random policy: vLLM server, rollouts, training, weight sync.

    python examples/gpu_smoke.py --backend ipc                   # one GPU, shared by server and trainer
    python examples/gpu_smoke.py --backend nccl                  # two GPUs: the trainer takes the first
    python examples/gpu_smoke.py --top-k 20 --top-p 0.95         # candidate sets from the server, replayed
    python examples/gpu_smoke.py --lora 16                       # only an adapter is trained and sent
    python examples/gpu_smoke.py --architecture moe              # a Mixture of Experts; also: hybrid, vision
    python examples/gpu_smoke.py --device cpu --steps 5          # the same with shared memory and a tiny policy

The task needs no skill, so a random policy feels the reward at once: the share of a completion's tokens that have an
even id. Half of the vocabulary has one, so the reward starts near 0.5, and whatever moves it is the optimizer.

Prints a line per step and a summary; the last line is JSON. The exit code is 0 when all steps were done, the server
was proved to compute with the trainer's weights at every sync, both gave the first step's tokens the same
log-probabilities, nothing was lost or trained twice, and the reward rose.

A vLLM that asks for a newer NCCL than torch brings disables its communicator: `--nccl-shim` supplies the two symbols
that vLLM 0.32 misses in NCCL 2.28 (they suspend and resume a communicator, which weight sync never does). Without it
such a run is refused; `--nccl-shim server` and `trainer` show that one side alone is refused too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import AsyncGRPOError
from asyncgrpo_core.quickstart import POLICY_DIR

NUM_PROMPTS = 512
AGREEMENT = 0.05  # nats per token, bf16 server against bf16 autocast, before any token is stale


@dataclass(frozen=True)
class Size:
    """A policy and a load."""

    hidden: int
    layers: int
    heads: int
    max_completion_length: int
    token_budget: int
    max_concurrent_rollouts: int
    learning_rate: float
    max_model_len: int


SIZES = {
    # A step trains some 32,000 tokens; at a higher rate all rewards are 1 after 15 steps, and nothing is left to train.
    "cuda": Size(768, 12, 12, 384, 16384, 256, 2e-5, 512),
    "cpu": Size(128, 4, 4, 32, 1024, 64, 1e-3, 128),
}


# -- the task ----------------------------------------------------------------------------------------------------


def even_share(completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Share of a completion's tokens that have an even id."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"What is {i % 100} plus {i // 7}?"}]} for i in range(NUM_PROMPTS)]


def make_policy(folder: Path, size: Size, seed: int, architecture: str = "dense") -> int:
    """A random policy with the quickstart's tokenizer, in float32; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(POLICY_DIR)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if architecture == "vision" else AutoModelForCausalLM
    model = auto.from_config(policy_config(architecture, size, tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def policy_config(architecture: str, size: Size, tokenizer: Any) -> Any:
    """Qwen3 (dense), Qwen3-MoE, Qwen3.5 (every fourth layer has attention, the others gated DeltaNet) or Qwen3-VL."""
    from transformers import AutoConfig

    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": max(size.heads // 3, 2),
        "head_dim": size.hidden // size.heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if architecture == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden}
        return AutoConfig.for_model("qwen3_moe", **text, **experts)
    if architecture == "hybrid":
        text["layer_types"] = [("full" if i % 4 == 3 else "linear") + "_attention" for i in range(size.layers)]
        heads = {"linear_num_key_heads": size.heads // 2, "linear_num_value_heads": size.heads}
        return AutoConfig.for_model("qwen3_5_text", **text, **heads)
    if architecture == "vision":
        half = text["head_dim"] // 2
        section = [half - 2 * (half // 3), half // 3, half // 3]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = {name: len(tokenizer) + i for i, name in enumerate(names)}  # beyond what can be sampled
        tower = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
        tower |= {"num_position_embeddings": 16, "out_hidden_size": size.hidden, "deepstack_visual_indexes": [0]}
        return AutoConfig.for_model(
            "qwen3_vl", text_config=text, vision_config=tower, tie_word_embeddings=True, dtype="float32", **ids
        )
    return AutoConfig.for_model("qwen3", **text)


# -- NCCL --------------------------------------------------------------------------------------------------------


def torch_nccl() -> Path:
    """The NCCL library that comes with torch."""
    import nvidia.nccl

    return Path(next(iter(nvidia.nccl.__path__))) / "lib" / "libnccl.so.2"


def nccl_shim(library: Path, folder: Path) -> str | None:
    """A library that is `library` and the symbols which vLLM misses in it; None when it misses none.

    Raises:
        OSError, subprocess.CalledProcessError: no such library, or no compiler.
    """
    loaded = ctypes.CDLL(str(library))
    wanted = {"ncclCommSuspend": "void*c,int f", "ncclCommResume": "void*c"}
    missing = {name: arguments for name, arguments in wanted.items() if not hasattr(loaded, name)}
    if not missing:
        return None
    source, made = folder / "nccl_shim.c", folder / "libnccl_shim.so"
    source.write_text("".join(f"int {name}({arguments}){{return 3;}}\n" for name, arguments in missing.items()))
    link = ["-Wl,--no-as-needed", f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(source), *link], check=True, timeout=60)
    return str(made)


# -- the server --------------------------------------------------------------------------------------------------


def start_vllm(options: argparse.Namespace, size: Size, policy: Path, run_dir: Path, shim: str | None) -> Any:
    """The server of this run, healthy. Its log is RUN/logs/server-0.log."""
    from asyncgrpo_core.server.command import ServerNeeds, server_command
    from asyncgrpo_core.server.process import free_port, start_server
    from asyncgrpo_core.server.settings import ServerConfig

    on_gpu = options.device == "cuda"
    env = {"HF_HUB_OFFLINE": "1"}
    if on_gpu:
        env |= {"CUDA_VISIBLE_DEVICES": str(options.server_gpu), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if shim is not None and options.nccl_shim in ("both", "server"):
        env["VLLM_NCCL_SO_PATH"] = shim
    extra = {
        "hybrid": ["--gdn-prefill-backend", "triton"] if on_gpu else [],
        "vision": ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
    }
    server = ServerConfig(
        # vLLM's CPU build computes gated DeltaNet in bfloat16 alone
        dtype="bfloat16" if on_gpu or options.architecture == "hybrid" else "float32",
        gpu_memory_utilization=options.gpu_memory_utilization if on_gpu else None,
        enforce_eager=True if options.eager else None,
        enable_lora=options.lora > 0,
        # an adapter's base and a vision tower are not sent
        load_format="auto" if options.lora or options.architecture == "vision" else "dummy",
        extra_args=extra.get(options.architecture, []),
        env=env,
    )
    needs = ServerNeeds(
        model_path=str(policy),
        served_model_name="policy",
        dtype="float32",
        max_model_len=size.max_model_len,
        num_sampler_logprobs=8,
        max_concurrent_rollouts=size.max_concurrent_rollouts,
        device=options.device,
        backend=options.backend,
        cpu_count=len(os.sched_getaffinity(0)),
        port=free_port(),
        max_lora_rank=options.lora or None,
        return_sampling_mask=on_gpu and options.top_k > 0,
    )
    command = server_command(server, needs)
    return start_server(command, run_dir=run_dir, start_timeout_s=options.start_timeout, on_progress=say)


# -- what is measured --------------------------------------------------------------------------------------------

LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", "{:.3f}"),
    ("step s", "perf/step_s", "{:.2f}"),
    ("waiting", "perf/rollout_wait_s", "{:.2f}"),
    ("fwd+bwd", "perf/fwd_bwd_s", "{:.2f}"),
    ("optim", "perf/optimizer_s", "{:.3f}"),
    ("sync", "perf/weight_sync_s", "{:.3f}"),
    ("pause", "perf/weight_sync_pause_s", "{:.3f}"),
    ("proof", "sync/verify_s", "{:.3f}"),
    ("generating", "generating_s", "{:.2f}"),
    ("trained tok", "batch/trained_tokens_per_step", "{:.0f}"),
    ("staleness", "sample/staleness_mean", "{:.2f}"),
    ("logp diff", LOGP_DIFFERENCE, "{:.4f}"),
    ("canary", "sync/canary_logp_difference/max", "{:.4f}"),
)
PARTS = ("perf/rollout_wait_s", "perf/fwd_bwd_s", "perf/optimizer_s", "perf/weight_sync_s", "sync/verify_s")


def make_watch() -> Any:
    """A callback that prints a line per step and counts the seconds in which requests were in flight."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.trainer: Any = None
            self.rows: list[dict[str, float]] = []
            self.generating_s = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say("".join(f"{name:>12}" for name in ("step", *(name for name, _, _ in COLUMNS))))
            threading.Thread(target=self._look, daemon=True).start()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" not in logs:
                return
            row = {**logs, "generating_s": self.generating_s, "step": state.global_step}
            self.generating_s = 0.0
            self.rows.append(row)
            cells = [form.format(row[key]) if key in row else "-" for _, key, form in COLUMNS]
            say("".join(f"{cell:>12}" for cell in (str(state.global_step), *cells)))

        def _look(self) -> None:
            last = time.monotonic()
            while not self.trainer.training_has_ended:
                time.sleep(0.01)
                now, worker = time.monotonic(), self.trainer.pipeline.worker
                if worker is not None and worker.in_flight() > 0:
                    self.generating_s += now - last
                last = now

    return Watch()


def train(options: argparse.Namespace, size: Size, policy: Path, run_dir: Path, url: str) -> dict[str, Any]:
    """The run itself; its summary."""
    from transformers import PrinterCallback

    from asyncgrpo_core import AsyncGRPOConfig, AsyncGRPOTrainer
    from asyncgrpo_core.training.run_context import RunContext

    adapter = None
    if options.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
    watch = make_watch()
    trainer = AsyncGRPOTrainer(
        model=str(policy),
        reward_funcs=even_share,
        args=AsyncGRPOConfig(
            output_dir=str(run_dir / "checkpoints"),
            max_steps=options.steps,
            learning_rate=options.learning_rate or size.learning_rate * (10 if options.lora else 1),
            max_completion_length=size.max_completion_length,
            token_budget=size.token_budget,
            gradient_accumulation_steps=2,
            max_concurrent_rollouts=size.max_concurrent_rollouts,
            vllm_server_base_url=url,
            vllm_server_timeout=options.sync_timeout,
            weight_sync_backend="lora" if options.lora else options.backend,
            top_k=options.top_k,
            top_p=options.top_p,
            attention_backend=options.attention_backend,
            trunk_kernels=options.trunk_kernels,
            use_cpu=options.device == "cpu",
            save_strategy="no",
            disable_tqdm=True,
            seed=options.seed,
        ),
        train_dataset=prompts(),
        callbacks=[watch],
        peft_config=adapter,
        run=RunContext(run_dir=run_dir, served_model_name="policy"),
    )
    watch.trainer = trainer
    trainer.remove_callback(PrinterCallback)  # it would print every metric of every step
    limit = threading.Timer(options.time_limit, trainer.request_stop, ["the time limit of the smoke run has passed"])
    limit.daemon = True
    limit.start()
    trainer.train()
    limit.cancel()
    return {**trainer.summary(), "rows": watch.rows}


def report(options: argparse.Namespace, summary: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints the summary; returns the JSON of the last line."""
    rows, sync, ledger = summary.pop("rows"), summary["weight_sync"], summary["ledger"]
    rewards = summary["reward"]
    checks = {
        "all steps": summary["global_step"] == options.steps,
        "every sync proved": sync["count"] == sync["verified"] == options.steps and sync["unverified"] == 0,
        "first step's log-probabilities agree": rows != [] and rows[0][LOGP_DIFFERENCE] < AGREEMENT,
        "nothing lost": ledger["lost"] == 0 and ledger["trained_twice"] == 0,
        "reward rose": rewards["first"] is not None and rewards["last"] > rewards["first"],
    }
    warm = rows[2:] or rows  # the first steps compile kernels and fill the queue
    wall = sum(row["perf/step_s"] for row in warm) / max(len(warm), 1)
    split = {key: sum(row.get(key, 0.0) for row in warm) / max(len(warm), 1) for key in (*PARTS, "generating_s")}
    say(f"\nA step from the third on took {wall:.3f} s; of these, in seconds:")
    names = ("waiting for rollouts", "forward and backward", "optimizer", "weight sync", "proof of the sync")
    seconds = [split[key] for key in PARTS]
    for name, value in zip((*names, "the rest"), (*seconds, wall - sum(seconds)), strict=True):
        say(f"  {name:<24}{value:8.3f}  {100 * value / wall:5.1f} %")
    say(f"  (requests were in flight during {split['generating_s']:.3f} s of it)")
    say(
        f"{sync['count']} syncs, {sync['verified']} proved, {sync['mean_s']:.3f} s each, "
        f"largest canary difference {sync['max_abs_logp_diff']:.2e}; ledger {ledger}"
    )
    first, last = (float("nan") if rewards[end] is None else rewards[end] for end in ("first", "last"))
    say(f"reward, first and last tenth of the steps: {first:.3f} -> {last:.3f}")
    say(", ".join(f"{name} {value:.3g}" for name, value in summary["throughput"].items()))
    for name, ok in checks.items():
        say(f"{'ok  ' if ok else 'FAIL'} {name}")
    return {"ok": all(checks.values()), "checks": checks, **facts, "step_s": wall, "split": split, **summary}


def say(text: str) -> None:
    print(text, flush=True)


# -- putting it together -----------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("ipc", "nccl", "shm"), help="default: ipc on a GPU, shm on a CPU")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--trainer-gpu", type=int, default=0)
    parser.add_argument("--server-gpu", type=int, help="default: the trainer's with ipc, the next with nccl")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--eager", action="store_true", help="a server without compilation and CUDA graphs")
    parser.add_argument("--nccl-shim", choices=("both", "trainer", "server", "none"), default="none")
    parser.add_argument(
        "--server-url", help="a server that runs already and serves this policy under the name 'policy'"
    )
    parser.add_argument("--attention-backend", default="auto", help="training.attention_backend")
    parser.add_argument("--trunk-kernels", default="auto", help="training.trunk_kernels")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="rank of an adapter; its files are synced")
    parser.add_argument("--architecture", choices=("dense", "moe", "hybrid", "vision"), default="dense")
    parser.add_argument("--run-dir", type=Path, help="kept; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds until the server is healthy")
    parser.add_argument("--sync-timeout", type=float, default=120.0, help="seconds for a request or a sync call")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of training after which it stops")
    options = parser.parse_args(argv)
    options.backend = options.backend or ("ipc" if options.device == "cuda" else "shm")
    if options.server_gpu is None:
        options.server_gpu = options.trainer_gpu + (options.backend == "nccl")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    logging.basicConfig(level=logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Before torch looks: with several GPUs visible transformers would wrap the model in DataParallel.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(options.trainer_gpu) if options.device == "cuda" else ""
    run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="gpu-smoke-"))
    scratch = Path(tempfile.mkdtemp(prefix="gpu-smoke-policy-"))
    server: Any = None
    try:
        size = SIZES[options.device]
        parameters = make_policy(scratch / "policy", size, options.seed, options.architecture)
        shim = nccl_shim(torch_nccl(), scratch) if options.nccl_shim != "none" else None
        if shim is not None and options.nccl_shim in ("both", "trainer"):
            os.environ["VLLM_NCCL_SO_PATH"] = shim
        say(f"{parameters / 1e6:.1f}M parameters, backend {options.backend}, run folder {run_dir}")
        facts: dict[str, Any] = {"backend": options.backend, "parameters": parameters}
        if options.server_url is None:
            started = time.monotonic()
            server = start_vllm(options, size, scratch / "policy", run_dir, shim)
            facts["server_start_s"] = time.monotonic() - started
            say(f"vLLM is healthy after {facts['server_start_s']:.0f} s")
        url = options.server_url or server.base_url
        result = report(options, train(options, size, scratch / "policy", run_dir, url), facts)
    except AsyncGRPOError as error:
        result = {"ok": False, "backend": options.backend, "error": f"{type(error).__name__}: {error}"}
    finally:
        if server is not None:
            server.stop(grace_s=5.0)
        shutil.rmtree(scratch, ignore_errors=True)
        if options.run_dir is None:
            shutil.rmtree(run_dir, ignore_errors=True)
    say(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":  # the rollout worker is a spawned process that imports this script again
    sys.exit(main())
