"""Peak memory and time of the language-model head against row length: chunked, and dense as one would write it.

Each run is one forward and backward pass of the head alone: log-probability of the sampled token, entropy, the
sampler's top 8, and a loss with a different coefficient for each of them. `dense` is linear, float, log_softmax,
gather: its [tokens, vocabulary] matrices grow with the row. Memory is what a pass needs above its inputs; the gradient
of the weight is part of it, on both sides. On a CPU it is the growth of the peak resident size of a fresh process, on
a GPU that of torch.cuda.max_memory_allocated.

On a GPU the chunk size is swept too, gradients are compared with float64, and where they can be imported the fused
heads of Liger (0.8.5 was read) and cut-cross-entropy (25.1.1) run beside. They are no replacement, as their sources
say:

- Liger's fused linear cross entropy and cut-cross-entropy return the log-probability of *one* token per position (a
  cross entropy). There is no entropy, no gather of other tokens' log-probabilities and no normalisation over a
  candidate set; neither returns its logsumexp with a gradient, from which the others could be made. Liger's fused PPO
  and GRPO losses likewise take one chosen token per position.
- Liger computes the gradient in the forward pass, for a loss that is linear in the log-probabilities with known
  coefficients. Here the coefficients are functions of what the head returns (score centering, sequence-level masks).
- cut-cross-entropy skips gradient entries below a threshold by default, which is not exact (filter_eps; off here).

So they compute less; their rows say how near the chunked head is to a kernel that does only that.

    OMP_NUM_THREADS=1 python -m benchmarks.head_memory                # vocabulary 32,000, width 128, float32
    python -m benchmarks.head_memory --device cuda                    # vocabulary 151,936, width 1,024, bfloat16
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo_core.models.head import LogitTransform, chunked_log_probs

GOAL = 0.1  # peak of the chunked head over that of the dense one, at the longest row that both manage
K, SET_SIZE, TEMPERATURE = 8, 32, 0.9
SHAPES = {
    "cpu": {"vocab": 32_000, "width": 128, "lengths": [512, 1024, 2048, 4096], "dtype": torch.float32},
    "cuda": {"vocab": 151_936, "width": 1024, "lengths": [2048, 4096, 8192, 16384, 32768], "dtype": torch.bfloat16},
}


class Inputs(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N]
    top: Tensor  # [N, K], the sampled token first
    sets: tuple[Tensor, Tensor]  # SET_SIZE candidates of each token, the top ones among them
    coefficients: Tensor  # [N, 1 + K], the loss is their sum with the log-probabilities


def make_inputs(length: int, vocab: int, width: int, dtype: torch.dtype, device: str) -> Inputs:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(length, width, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) / width**0.5).to(device, dtype).requires_grad_()
    # candidates one stride apart from a random start: distinct, and cheap to make for any length
    start = torch.randint(0, vocab, (length, 1), generator=g)
    ids = (start + torch.arange(SET_SIZE) * (vocab // SET_SIZE)) % vocab
    offsets = torch.arange(length + 1) * SET_SIZE
    coefficients = torch.randn(length, 1 + K, generator=g) / length
    sets = (ids.sort(dim=1).values.reshape(-1).to(device), offsets.to(device))
    return Inputs(hidden, weight, ids[:, 0].to(device), ids[:, :K].to(device), sets, coefficients.to(device))


def _loss(x: Inputs, logprobs: Tensor, top: Tensor) -> Tensor:
    return (x.coefficients[:, 0] * logprobs).sum() + (x.coefficients[:, 1:] * top).sum()


def chunked(x: Inputs, **settings) -> Tensor:
    logprobs, _, top = chunked_log_probs(x.hidden, x.weight, x.target, x.top, LogitTransform(TEMPERATURE), **settings)
    return _loss(x, logprobs, top)


def chunked_sets(x: Inputs) -> Tensor:
    return chunked(x, candidates=x.sets)


def dense(x: Inputs) -> Tensor:
    logits = torch.nn.functional.linear(x.hidden, x.weight)
    logp = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():
        _entropy = -(logp.exp() * logp).sum(-1)
    return _loss(x, logp.gather(1, x.target[:, None])[:, 0], logp.gather(1, x.top))


def liger(x: Inputs) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x.hidden, x.weight, x.target)[0]


def cut_cross_entropy(x: Inputs) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x.hidden, x.weight, x.target, filter_eps=None)


OURS: dict[str, Callable[..., Tensor]] = {"chunked": chunked, "chunked, candidate sets": chunked_sets, "dense": dense}
THEIRS: dict[str, Callable[..., Tensor]] = {
    "Liger, cross entropy only": liger,
    "cut-cross-entropy, cross entropy only": cut_cross_entropy,
}


def one_pass(x: Inputs, head: Callable[..., Tensor]) -> None:
    head(x).backward()
    x.hidden.grad = x.weight.grad = None


# -- CPU: a fresh process for every number


def resident_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")


def measure_here(name: str, length: int, shape: dict, repeats: int) -> dict:
    """In this process: MiB above the inputs, and the smallest CPU milliseconds."""
    head = OURS[name]
    one_pass(make_inputs(8, 64, 8, shape["dtype"], "cpu"), head)  # what is loaded on first use
    x = make_inputs(length, shape["vocab"], shape["width"], shape["dtype"], "cpu")
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator still holds would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before = resident_kib("VmRSS")
    one_pass(x, head)
    peak = resident_kib("VmHWM") - before
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        one_pass(x, head)
        taken.append(time.process_time() - started)
    return {"mib": peak / 1024, "ms": 1e3 * min(taken)}


def measure_cpu(name: str, length: int, shape: dict, repeats: int) -> dict:
    command = [sys.executable, "-m", "benchmarks.head_memory", "--one", name, "--lengths", str(length)]
    command += ["--vocab", str(shape["vocab"]), "--width", str(shape["width"]), "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


# -- GPU


def measure_cuda(head: Callable[..., Tensor], x: Inputs, repeats: int) -> dict | None:
    """MiB above the inputs and median milliseconds; None where the GPU's memory is not enough."""
    try:
        one_pass(x, head)  # compiles, and warms the allocator
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one_pass(x, head)
        peak = torch.cuda.max_memory_allocated() - before
        taken = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started = time.perf_counter()
            one_pass(x, head)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        x.hidden.grad = x.weight.grad = None
        torch.cuda.empty_cache()
        return None
    return {"mib": peak / 2**20, "ms": 1e3 * statistics.median(taken)}


def theirs_that_run(x: Inputs) -> dict[str, Callable[..., Tensor]]:
    found = {}
    for name, head in THEIRS.items():
        try:
            one_pass(x, head)
            found[name] = head
        except ImportError as error:
            print(f"{name}: not importable ({error})")
        except Exception as error:  # a kernel of another project; the benchmark goes on without it
            print(f"{name}: does not run here ({type(error).__name__}: {str(error)[:200]})")
    return found


def sweep_chunks(x: Inputs, repeats: int) -> None:
    print(f"\nchunk size at {len(x.target)} tokens\n{'elements':>12} {'compiled':>9} {'peak MiB':>9} {'ms':>9}")
    for fused in (True, False):
        for power in range(24, 29):
            found = measure_cuda(lambda y, p=power, f=fused: chunked(y, chunk_elements=1 << p, fused=f), x, repeats)
            numbers = "out of memory" if found is None else f"{found['mib']:9.0f} {found['ms']:9.2f}"
            print(f"{'2^' + str(power):>12} {fused!s:>9} {numbers}")


def compare_gradients(shape: dict, length: int = 512) -> None:
    """Largest error of a gradient against float64, over the largest entry."""
    x = make_inputs(length, shape["vocab"], shape["width"], shape["dtype"], "cuda")
    exact = Inputs(x.hidden.detach().double().requires_grad_(), x.weight.detach().double().requires_grad_(), *x[2:])
    want = torch.autograd.grad(dense(exact), (exact.hidden, exact.weight))
    print(f"\nerror of the gradients against float64, {length} tokens\n{'':>24} {'hidden':>9} {'weight':>9}")
    heads = {
        "chunked": chunked,
        "chunked, uncompiled": lambda y: chunked(y, fused=False),
        "chunked, 4 chunks": lambda y: chunked(y, chunk_elements=length // 4 * shape["vocab"]),
        "dense": dense,
    }
    for name, head in heads.items():
        got = torch.autograd.grad(head(x), (x.hidden, x.weight))
        errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)]
        print(f"{name:>24} {errors[0]:9.1e} {errors[1]:9.1e}")


# -- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=OURS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = SHAPES[args.device]
    shape |= {name: value for name in ("vocab", "width", "lengths") if (value := getattr(args, name)) is not None}
    if args.one:
        print(json.dumps(measure_here(args.one, shape["lengths"][0], shape, args.repeats)))
        return
    heads = dict(OURS)
    inputs = partial(make_inputs, vocab=shape["vocab"], width=shape["width"], dtype=shape["dtype"], device="cuda")
    if args.device == "cuda":
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
        heads |= theirs_that_run(inputs(512))
    print(f"vocabulary {shape['vocab']}, width {shape['width']}, {str(shape['dtype']).removeprefix('torch.')}, top {K}")
    print(f"{'tokens':>7} {'head':>38} {'peak MiB':>9} {'ms':>9}   float32 logits MiB")
    ratio, length_of_ratio = None, None
    for length in shape["lengths"]:
        x = inputs(length) if args.device == "cuda" else None
        found = {}
        for name, head in heads.items():
            if x is None:
                found[name] = measure_cpu(name, length, shape, args.repeats)
            else:
                found[name] = measure_cuda(head, x, args.repeats)
            numbers = "      out of memory" if found[name] is None else "{mib:9.0f} {ms:9.2f}".format(**found[name])
            print(f"{length:7d} {name:>38} {numbers}   {length * shape['vocab'] * 4 / 2**20:.0f}", flush=True)
        if found["chunked"] is not None and found["dense"] is not None:
            ratio, length_of_ratio = found["chunked"]["mib"] / found["dense"]["mib"], length
        if length == shape["lengths"][-1] and x is not None:
            sweep_chunks(x, args.repeats)
        del x
    if args.device == "cuda":
        compare_gradients(shape)
    print(json.dumps({"benchmark": "head_memory", "ratio": ratio, "goal": GOAL, "tokens": length_of_ratio}))


if __name__ == "__main__":
    main()
