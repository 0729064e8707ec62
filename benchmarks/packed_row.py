"""Time of forward, loss and backward of one packed row, beside the same samples as a padded batch.

The baseline is what one writes without this project: a right-padded batch, transformers' own SDPA attention, all
logits, log_softmax and gather, then the same loss. Both run in turn in one process; medians; the gradients are
compared first.

OMP_NUM_THREADS=1 python -m benchmarks.packed_row                      # 0.8M parameters, 128 samples of 24 tokens
python -m benchmarks.packed_row --device cuda --size 0.6b --samples 32 --prompt 512 --completion 512
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncgrpo_core.models.forward import PolicyOutput, install_packed_forward
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.types import Slot, TopLogprobs, TrainingSample, TrainingSequence

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 260},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip


def random_sample(rng: np.random.Generator, prompt: int, completion: int, vocab: int, k: int) -> TrainingSample:
    n = prompt + completion
    mask = np.arange(n) >= prompt
    top = TopLogprobs(
        rng.integers(0, vocab, (completion, k)).astype(np.int32), np.full((completion, k), -3.0, np.float32)
    )
    tokens = rng.integers(0, vocab, n).astype(np.int32)
    sequence = TrainingSequence(tokens, mask, np.where(mask, -5.0, 0.0).astype(np.float32), np.zeros(n, np.int32), top)
    return TrainingSample(sequence, float(rng.normal()), 0.0, 1.0, Slot(0, 0, 0), 0, 0, 0, "benchmark")


def padded_output(model: torch.nn.Module, samples: list[TrainingSample], row: dict[str, torch.Tensor]) -> PolicyOutput:
    """The baseline's forward: [samples, longest] tokens, [samples, longest, vocabulary] log-probabilities."""
    device = row["input_ids"].device
    longest = max(s.sequence.num_tokens for s in samples)
    ids = torch.zeros((len(samples), longest), dtype=torch.long, device=device)
    mask, trained = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i, sample in enumerate(samples):
        n = sample.sequence.num_tokens
        ids[i, :n] = torch.from_numpy(sample.sequence.token_ids.astype(np.int64))
        mask[i, :n] = 1
        trained[i, : n - 1] = torch.from_numpy(sample.sequence.loss_mask[1:])
    logp = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)[trained]
    entropy = -(logp.exp() * logp).sum(-1).detach()
    return PolicyOutput(logp.gather(1, row["target_ids"][:, None])[:, 0], entropy, logp.gather(1, row["top_ids"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--vocab", type=int, default=None)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--completion", type=int, default=8)
    parser.add_argument("--spread", type=int, default=0, help="prompts vary by up to this many tokens more")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    shape = {**SIZES[args.size], **({"vocab_size": args.vocab} if args.vocab else {})}
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).train()
    if args.device == "cuda":
        model.bfloat16().gradient_checkpointing_enable()
    baseline = copy.deepcopy(model)
    install_packed_forward(model)
    rng = np.random.default_rng(0)
    samples = [
        random_sample(rng, args.prompt + int(rng.integers(0, args.spread + 1)), args.completion, shape["vocab_size"], 8)
        for _ in range(args.samples)
    ]
    row = {name: value.to(args.device) for name, value in pack_row(samples, 8).items()}
    trained = len(row["target_ids"])
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {row['input_ids'].shape[1]} tokens, {trained} trained")

    def synchronised() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()  # CPU seconds: other processes of the machine do not count

    def step(which: str) -> tuple[float, float, float]:
        started = synchronised()
        if which == "packed":
            output = model(**row, temperature=1.0)
        else:
            output = padded_output(baseline, samples, row)
        forwarded = synchronised()
        loss, _ = async_grpo_loss(output, row, LossSettings(), trained)
        lost = synchronised()
        loss.backward()
        return forwarded - started, lost - forwarded, synchronised() - lost

    for which in ("packed", "padded"):
        step(which)
    largest = max((a.grad - b.grad).abs().max().item() for a, b in _pairs(model, baseline))
    print(f"largest difference of a gradient entry, packed against padded: {largest:.1e}")
    times: dict[str, list[tuple[float, float, float]]] = {"packed": [], "padded": []}
    for _ in range(args.repeats):
        for which, taken in times.items():
            taken.append(step(which))
    print(f"{'median ms':>10} {'forward':>9} {'loss':>7} {'backward':>9} {'total':>9}")
    totals = {}
    for which, taken in times.items():
        medians = [1e3 * statistics.median(column) for column in zip(*taken, strict=True)]
        totals[which] = sum(medians)
        print(f"{which:>10} {medians[0]:9.1f} {medians[1]:7.1f} {medians[2]:9.1f} {totals[which]:9.1f}")
    if args.device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if args.profile:
        with torch.profiler.profile() as profile:
            step("packed")
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=50))
    print(json.dumps({"benchmark": "packed_row", "ratio": totals["padded"] / totals["packed"], "goal": 1.0}))


def _pairs(model: torch.nn.Module, baseline: torch.nn.Module):
    return zip(model.parameters(), baseline.parameters(), strict=True)


if __name__ == "__main__":
    main()
