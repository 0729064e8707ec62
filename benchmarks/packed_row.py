"""Time of forward, loss and backward of one packed row, and where it goes.

OMP_NUM_THREADS=1 python -m benchmarks.packed_row                      # 0.8M parameters, 128 samples of 24 tokens
python -m benchmarks.packed_row --device cuda --size 0.6b --samples 32 --prompt 512 --completion 512
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncgrpo_core.models.forward import install_packed_forward
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

    def step() -> tuple[float, float, float]:
        started = synchronised()
        output = model(**row, temperature=1.0)
        forwarded = synchronised()
        loss, _ = async_grpo_loss(output, row, LossSettings(), trained)
        lost = synchronised()
        loss.backward()
        done = synchronised()
        model.zero_grad()
        return forwarded - started, lost - forwarded, done - lost

    for _ in range(2):
        step()
    times = [step() for _ in range(args.repeats)]
    medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
    print("median ms: forward {:.1f}, loss {:.1f}, backward {:.1f}".format(*medians), f"total {sum(medians):.1f}")
    if args.device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if args.profile:
        with torch.profiler.profile() as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=50))


if __name__ == "__main__":
    main()
