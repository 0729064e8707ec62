"""One row through the trainer's trunk on a GPU: back ends, trunk kernels, trie against plain layout, TRL's beside them.

The row: 4 groups of 8 completions of 480 tokens over a 2,004-token prompt, 79,488 tokens plain, about 23,400 as a trie.
Forward and backward of the layers in bf16 with gradient checkpointing; medians, every way timed in this one process.

    bound   how much faster the trie could be by its operation count (matrix products and visible attention pairs)
    error   log-probabilities and gradient of one group against a float64 model, relative to their norms

TRL 1.16.0's own layout and attention function run on the same model and samples when `--trl` gives its packing.py; its
FlashAttention loader is replaced by torch's variable-length attention, as its kernel comes from a hub. Where
liger_kernel is installed, its norm, gate and rotary embedding are timed beside the compiled layers.

    python -m benchmarks.gpu_trainer --sizes 0.6b,1.7b --trl PATH/packing.py
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from asyncgrpo_core.models.attention_backends import flex
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.models.row_plan import RowPlan
from asyncgrpo_core.models.trunk import compile_layers, compiled_graphs, uncompile_layers
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.types import Slot, TopLogprobs, TrainingSample, TrainingSequence

VOCAB = 151936
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
}
GOAL_OF_BOUND = 0.95
GOAL_OVER_EAGER = 1.67


def samples_of(groups: int, rollouts: int, prompt: int, completion: int, vocab: int) -> list[TrainingSample]:
    """Random groups; every completion trained, with the sampler's top 8."""
    rng = np.random.default_rng(0)
    made = []
    for group in range(groups):
        head = rng.integers(0, vocab, prompt)
        for _ in range(rollouts):
            n = prompt + completion
            mask = np.arange(n) >= prompt
            tokens = np.concatenate((head, rng.integers(0, vocab, completion))).astype(np.int32)
            top = TopLogprobs(
                rng.integers(0, vocab, (completion, 8)).astype(np.int32), np.full((completion, 8), -4.0, np.float32)
            )
            logprobs = np.where(mask, -12.0, 0.0).astype(np.float32)
            sequence = TrainingSequence(tokens, mask, logprobs, np.zeros(n, np.int32), top)
            made.append(
                TrainingSample(sequence, float(rng.normal()), 0.0, 1.0, Slot(0, 0, 0), 0, group, 0, "benchmark")
            )
    return made


def plain_layout(samples: list[TrainingSample]) -> dict[str, Tensor]:
    """The same samples end to end, nothing shared."""
    lengths = [s.sequence.num_tokens for s in samples]
    return {
        "input_ids": torch.from_numpy(np.concatenate([s.sequence.token_ids for s in samples])).long()[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_segments": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "parents": torch.full((len(lengths),), -1),
    }


def operations(row: dict[str, Tensor], config: Any) -> float:
    """Multiply-adds of one forward of the layers: matrix products per token, scores and values per visible pair."""
    plan = RowPlan.from_segments(row["cu_segments"].cpu(), row["parents"].cpu())
    pairs = sum(n * start + n * (n + 1) / 2 for n, start in zip(plan.lengths, plan.starts, strict=True))
    heads = config.num_attention_heads * config.head_dim
    width = heads + 2 * config.num_key_value_heads * config.head_dim
    per_token = config.hidden_size * (width + heads + 3 * config.intermediate_size)
    return config.num_hidden_layers * (plan.num_tokens * per_token + 2.0 * heads * pairs)


def build(size: str, dtype: torch.dtype, device: str) -> nn.Module:
    torch.manual_seed(0)
    shape = {"num_key_value_heads": 2 if size == "tiny" else 8, "head_dim": 16 if size == "tiny" else 128}
    config = Qwen3Config(
        **SIZES[size], **shape, vocab_size=1000 if size == "tiny" else VOCAB, tie_word_embeddings=True,
        max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return install_packed_forward(model, "sdpa")


def kernels_of(args: argparse.Namespace) -> list[str]:
    """Ways to compute the layers: Liger's last, and only where it is installed."""
    found = importlib.util.find_spec("liger_kernel") is not None
    return [k for k in args.kernels.split(",") if k != "liger" or found]


def use_kernels(model: Any, kernels: str) -> None:
    """Compiled layers, Liger's norm, gate and rotary embedding in place of transformers' own, or neither."""
    uncompile_layers(model.model)
    rotary = modeling_qwen3.__dict__.setdefault("_rotary_of_transformers", modeling_qwen3.apply_rotary_pos_emb)
    modeling_qwen3.apply_rotary_pos_emb = rotary
    if kernels == "compile":
        compile_layers(model.model)
    if kernels == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        norm, gate = modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP
        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False, model=model)
        modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP = norm, gate  # of models that are built later


def trunk(model: Any, row: dict[str, Tensor], backend: str) -> Tensor:
    plan = RowPlan.from_segments(row["cu_segments"], row["parents"], backend)
    filler = flex.padded_length(plan.num_tokens) - plan.num_tokens if backend == "flex" else 0  # as the packed forward
    return model.model(
        input_ids=nn.functional.pad(row["input_ids"], (0, filler)),
        position_ids=nn.functional.pad(row["position_ids"], (0, filler)),
        attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=row["input_ids"].device),
        use_cache=False,
        packed_attention=plan,
    ).last_hidden_state


def load_trl(path: Path) -> Any:
    """TRL's packing module from its file, its kernel loader replaced."""
    spec = importlib.util.spec_from_file_location("trl_packing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size, **_):
        assert causal
        left = window_size[0] if window_size[0] >= 0 else -1
        return varlen_attn(q, k, v, cu_q, cu_k, int(max_q), int(max_k), scale=softmax_scale, window_size=(left, 0))

    module._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    module.register_tree_attention()
    return module


def trl_trunk(module: Any, model: Any, samples: list[TrainingSample], device: str) -> Callable[[], Tensor]:
    """A forward of the same layers over TRL's row; the row is made once, outside the timing."""
    tree = module.TreeRow()
    for sample in samples:
        sequence = sample.sequence
        tree.add(
            {
                "input_ids": torch.from_numpy(sequence.token_ids.astype(np.int64)),
                "completion_mask": torch.from_numpy(sequence.loss_mask.astype(np.int64)),
                "old_log_probs": torch.from_numpy(sequence.sampler_logprobs),
                "advantage": sample.advantage,
                "group_id": sample.group_id,
            }
        )
    packed = {name: value.to(device) for name, value in tree.pack().items()}
    longest = packed["tree_max_seqlens"].tolist()

    def forward() -> Tensor:
        return model.model(
            input_ids=packed["input_ids"][None],
            position_ids=packed["position_ids"][None],
            use_cache=False,
            tree_kv_index=packed["tree_kv_index"],
            tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
            tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
            tree_max_seqlen_q=longest[0],
            tree_max_seqlen_k=longest[1],
        ).last_hidden_state

    return forward


def timed(forward: Callable[[], Tensor], model: nn.Module, repeats: int) -> tuple[float, float, float]:
    """(median ms of forward and backward, peak GiB above the parameters, seconds of the first two calls)."""
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def once() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        hidden = forward()
        hidden.backward(torch.full_like(hidden, 1e-3)) if hidden.dim() else hidden.backward()
        torch.cuda.synchronize()
        for parameter in model.parameters():
            parameter.grad = None
        return 1e3 * (time.perf_counter() - started)

    warm = sum(once() for _ in range(2)) / 1e3
    taken = [once() for _ in range(repeats)]
    return statistics.median(taken), (torch.cuda.max_memory_allocated() - weights) / 2**30, warm


def speed(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """The table of one model size."""
    model: Any = build(size, torch.bfloat16, "cuda")
    samples = samples_of(args.groups, args.rollouts, args.prompt, args.completion, model.config.vocab_size)
    tree = {name: value.cuda() for name, value in pack_row(samples, 8).items()}
    plain = {name: value.cuda() for name, value in plain_layout(samples).items()}
    bound = operations(plain, model.config) / operations(tree, model.config)
    tokens = [row["input_ids"].shape[1] for row in (plain, tree)]
    trained = len(tree["target_ids"])
    print(f"\n{size}: {tokens[0]} tokens plain, {tokens[1]} as a trie (ratio {tokens[0] / tokens[1]:.2f}), "
          f"bound by operations {bound:.2f}")  # fmt: skip
    print(f"{'trunk':>8} {'attention':>10} {'plain ms':>9} {'tree ms':>8} {'ratio':>6} {'of bound':>8} {'GiB':>6} "
          f"{'first s':>8} {'trained tok/s':>13}")  # fmt: skip
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for kernels in kernels_of(args):
        use_kernels(model, kernels)
        for backend in args.backends.split(","):
            ms, first = [], 0.0
            for row in (plain, tree):
                taken, peak, warm = timed(lambda r=row, b=backend: trunk(model, r, b), model, args.repeats)
                ms.append(taken)
                first += warm
            found[kernels, backend] = (ms[0], ms[1])
            ratio = ms[0] / ms[1]
            print(f"{kernels:>8} {backend:>10} {ms[0]:9.0f} {ms[1]:8.0f} {ratio:6.2f} {ratio / bound:8.1%} {peak:6.1f} "
                  f"{first:8.1f} {trained / ms[1] * 1e3:13,.0f}", flush=True)  # fmt: skip
    use_kernels(model, "eager")  # Liger's rotary embedding is the module's, so anybody's: TRL's next
    if args.trl is not None:  # Liger's other replacements stay in the model
        del model
        release()
        model = build(size, torch.bfloat16, "cuda")
    result = {"bound": bound, "ms": {f"{k}/{b}": [round(x, 1) for x in v] for (k, b), v in found.items()}}
    if args.trl is not None:
        module = load_trl(args.trl)
        model.set_attn_implementation(module.TREE_ATTENTION)
        ms_trl, peak, _ = timed(trl_trunk(module, model, samples, "cuda"), model, args.repeats)
        print(f"{'TRL':>8} {'its own':>10} {'':>9} {ms_trl:8.0f} {'':>6} {'':>8} {peak:6.1f} {'':>8} "
              f"{trained / ms_trl * 1e3:13,.0f}", flush=True)  # fmt: skip
        result["trl_ms"] = round(ms_trl, 1)
    print(f"graphs compiled so far {compiled_graphs()}, FlexAttention shapes {len(flex.compiled_shapes)}")
    result["whole_step"] = whole_step(size, tree, args)
    best = min(v[1] for (kernels, _), v in found.items() if kernels != "liger")
    result["ratio_over_eager_varlen"] = found["eager", "varlen"][1] / best if ("eager", "varlen") in found else None
    result["share_of_bound"] = max(p / t / bound for p, t in found.values())
    return result


def whole_step(size: str, tree: dict[str, Tensor], args: argparse.Namespace) -> dict[str, float]:
    """Layers, chunked head and loss together, as a training step has them."""
    model: Any = build(size, torch.bfloat16, "cuda")
    compile_layers(model.model)
    taken = {}
    for backend in args.backends.split(","):
        model.__dict__["_attention_backend"], model.__dict__["_attention_choices"] = backend, {}

        def forward() -> Tensor:
            output = model(**tree, temperature=1.0)
            return async_grpo_loss(output, tree, LossSettings(), len(tree["target_ids"]))[0]

        ms, peak, _ = timed(forward, model, args.repeats)
        print(f"whole step (layers, head, loss), compiled, {backend}: {ms:.0f} ms, peak {peak:.1f} GiB, "
              f"{len(tree['target_ids']) / ms * 1e3:,.0f} trained tokens/s", flush=True)  # fmt: skip
        taken[backend] = round(ms, 1)
    return taken


def error(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Each back end against a float64 model on one group."""
    reference: Any = build(size, torch.float64, "cuda")
    samples = samples_of(1, args.rollouts, args.prompt, args.completion, reference.config.vocab_size)
    row = {name: value.cuda() for name, value in pack_row(samples, 8).items()}

    def run(model: Any, backend: str) -> tuple[Tensor, list[Tensor]]:
        model.__dict__["_attention_backend"], model.__dict__["_attention_choices"] = backend, {}
        output = model(**row, temperature=1.0)
        loss, _ = async_grpo_loss(output, row, LossSettings(score_centering=False), len(row["target_ids"]))
        (output.logprobs.mean() + loss).backward()
        return output.logprobs.detach().double().cpu(), [p.grad.detach().cpu() for p in model.parameters()]

    reference.bfloat16().double()  # the weights that the bf16 model has
    want, want_grads = run(reference, "sdpa")
    norm = sum(g.square().sum() for g in want_grads).sqrt()
    del reference
    found = {}
    print(f"\n{size}: error against float64 on one group ({row['input_ids'].shape[1]} tokens)")
    print(f"{'trunk':>8} {'attention':>10} {'mean |dlogp|':>12} {'max |dlogp|':>12} {'gradient':>9}")
    for kernels in kernels_of(args):
        for backend in [*args.backends.split(","), "sdpa"]:
            model: Any = build(size, torch.float64, "cuda").to(torch.bfloat16)
            use_kernels(model, kernels)
            got, grads = run(model, backend)
            gradient = (
                sum((a.double() - b).square().sum() for a, b in zip(grads, want_grads, strict=True)).sqrt() / norm
            )
            d = (got - want).abs()
            print(f"{kernels:>8} {backend:>10} {d.mean():12.2e} {d.max():12.2e} {gradient:9.2%}", flush=True)
            found[f"{kernels}/{backend}"] = [float(d.mean()), float(d.max()), float(gradient)]
            del model, got, grads
            release()
    return found


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.6b,1.7b")
    parser.add_argument("--backends", default="varlen,flex")
    parser.add_argument("--kernels", default="eager,compile,liger")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2004)
    parser.add_argument("--completion", type=int, default=480)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trl", type=Path, default=None, help="TRL's experimental/async_grpo/packing.py")
    parser.add_argument("--no-error", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_trainer needs a CUDA device; benchmarks.packed_row runs on a CPU.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results: dict[str, Any] = {}
    for size in args.sizes.split(","):
        results[size] = speed(size, args)
        release()
    if not args.no_error:
        results["error"] = error(args.sizes.split(",")[0], args)
    first = results[args.sizes.split(",")[0]]
    print(
        json.dumps(
            {
                "benchmark": "gpu_trainer",
                "ratio": first["ratio_over_eager_varlen"],
                "goal": GOAL_OVER_EAGER,
                "share_of_bound": first["share_of_bound"],
                "goal_share_of_bound": GOAL_OF_BOUND,
                **results,
            }
        )
    )


if __name__ == "__main__":
    main()
