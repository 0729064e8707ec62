"""CPU time of packing one row: prefix trie and index arrays, ours beside TRL 1.16.0's `TreeRow`, on the same samples.

Both sides do what their trainer does per row: ask whether each sample fits, take it, then make the row's tensors
(tokens, positions, segment bounds, gathered key/value indices, loss terms with targets, log-probabilities and
advantages). TRL runs in its own interpreter (see rollout_worker.py), which times itself. The sides take turns; medians
of process CPU time. Their tensors are compared first: every index must be equal. The goal: 20 times as fast.

    OMP_NUM_THREADS=1 python -m benchmarks.packing

Then ours alone from 1e4 to 1e7 tokens, in more and in longer samples: nanoseconds per token must not grow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

GOAL = 20.0
ROOT = Path(__file__).parents[1]
UNBOUNDED = 1 << 40  # the row under test takes every sample
SIZES = (10**4, 10**5, 10**6, 10**7)


class Raw(NamedTuple):
    """A sample before either side's own container."""

    tokens: np.ndarray  # int32 [n]
    trained: np.ndarray  # bool [n]
    logprobs: np.ndarray  # float32 [n]
    group: int
    advantage: float


class Case(NamedTuple):
    """`turns` > 1: every turn of a rollout is a sample that repeats the conversation so far and trains its own part."""

    groups: int
    rollouts: int  # per group
    prompt: int  # tokens
    completion: int  # tokens of each turn
    turns: int = 1
    system: int = 0  # leading prompt tokens common to all groups


CASES = {
    "long prompts": Case(4, 8, 2004, 480),  # 79,488 tokens: the row of the trainer's benchmark
    "multi-turn": Case(2, 4, 1000, 400, turns=5, system=300),
    "math": Case(8, 8, 120, 500),
    "nothing shared": Case(32, 1, 500, 1000),
    "very short": Case(16, 8, 16, 8),
}
HEADLINE = "long prompts"


def samples_of(case: Case, seed: int = 0) -> list[Raw]:
    rng = np.random.default_rng(seed)

    def draw(n: int) -> np.ndarray:
        return rng.integers(0, 150_000, n).astype(np.int32)

    made, system = [], draw(case.system)
    for group in range(case.groups):
        prompt = np.concatenate([system, draw(case.prompt - case.system)])
        for _ in range(case.rollouts):
            talk = prompt
            for _ in range(case.turns):
                talk = np.concatenate([talk, draw(case.completion)])
                trained = np.arange(len(talk)) >= len(talk) - case.completion
                logprobs = np.where(trained, rng.normal(-1, 0.3, len(talk)), 0).astype(np.float32)
                made.append(Raw(talk, trained, logprobs, group, float(np.float32(rng.normal()))))
    return made


def our_side(raw: list[Raw]) -> Callable[[], dict[str, torch.Tensor]]:
    from asyncgrpo_core.packing.trie import PrefixTrie
    from asyncgrpo_core.packing.trie_layout import key_value_index, lay_out
    from asyncgrpo_core.types import Slot, TrainingSample, TrainingSequence

    samples = [
        TrainingSample(
            TrainingSequence(r.tokens, r.trained, r.logprobs, np.zeros(len(r.tokens), np.int32)),
            r.advantage, 0.0, 0.0, Slot(0, r.group, r.group), 0, r.group, 0, "benchmark",
        )
        for r in raw
    ]  # fmt: skip

    def row() -> dict[str, torch.Tensor]:
        trie = PrefixTrie()
        for sample in samples:
            if not trie.fits(sample, UNBOUNDED):
                raise AssertionError("no bound was set")
            trie.add(sample)
        layout = lay_out(trie)
        index, cu_keys = key_value_index(layout)
        logprobs = [s.sequence.sampler_logprobs[s.sequence.loss_mask] for s in samples]
        longest = [int(np.diff(layout.cu_segments).max()), int(np.diff(cu_keys).max())]
        arrays = {
            "input_ids": layout.input_ids,
            "position_ids": layout.position_ids,
            "tree_kv_index": index,
            "tree_cu_seqlens_q": layout.cu_segments.astype(np.int32),
            "tree_cu_seqlens_k": cu_keys.astype(np.int32),
            "tree_max_seqlens": np.array(longest),
            "token_index": layout.target_positions,
            "target_ids": layout.target_ids,
            "old_log_probs": np.concatenate(logprobs),
            "advantages": np.array([s.advantage for s in samples], np.float32)[layout.sample_index],
            "segment_id": layout.sample_index,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    return row


def trl_side(raw: list[Raw]) -> Callable[[], dict[str, torch.Tensor]]:
    from trl.experimental.async_grpo.packing import TreeRow

    samples = [
        {
            "input_ids": torch.from_numpy(r.tokens.astype(np.int64)),
            "completion_mask": torch.from_numpy(r.trained.astype(np.int64)),
            "old_log_probs": torch.from_numpy(r.logprobs),
            "advantage": r.advantage,
            "group_id": r.group,
        }
        for r in raw
    ]

    def row() -> dict[str, torch.Tensor]:
        tree = TreeRow()
        for sample in samples:
            if not tree.fits(sample, UNBOUNDED):
                raise AssertionError("no bound was set")
            tree.add(sample)
        return tree.pack()

    return row


def timed(row: Callable[[], Any]) -> float:
    start = time.process_time()
    row()
    return time.process_time() - start


def serve_trl(folder: Path) -> None:
    """The child: a case's name per line; the first time the tensors go to a file, after that the CPU seconds out."""
    rows: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in rows:
            rows[name] = trl_side(samples_of(CASES[name]))
            torch.save(rows[name](), folder / "row.pt")
            print(0.0, flush=True)
        else:
            print(timed(rows[name]), flush=True)


def ask(child: subprocess.Popen[str], name: str) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(name + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        raise SystemExit("TRL's side ended; its error is above")
    return float(answer)


def assert_equal_rows(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    labels = theirs.pop("shift_labels")
    theirs["target_ids"] = labels[theirs["token_index"]]
    for name, value in theirs.items():
        if not torch.equal(ours[name].to(value.dtype), value):
            raise SystemExit(f"{name} differs between the sides")


def compare(repeats: int) -> dict[str, float]:
    """Times both sides on every case and prints the table; TRL's median time over ours by case."""
    from benchmarks.rollout_worker import trl_python

    print(f"{'row':>15} {'samples':>8} {'tokens':>8} {'forwarded':>10} {'ours ms':>9} {'TRL ms':>9} {'ratio':>7}")
    ratios = {}
    with tempfile.TemporaryDirectory() as name:
        command = [str(trl_python()), "-m", "benchmarks.packing", "--serve-trl", name]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            for case in CASES:
                raw = samples_of(CASES[case])
                row = our_side(raw)
                ask(child, case)
                ours = row()
                assert_equal_rows(ours, torch.load(Path(name) / "row.pt"))
                pairs = [(timed(row), ask(child, case)) for _ in range(repeats)]
                mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
                ratios[case] = theirs / mine
                tokens = sum(len(r.tokens) for r in raw)
                print(
                    f"{case:>15} {len(raw):>8} {tokens:>8,} {len(ours['input_ids']):>10,} {1e3 * mine:>9.2f} "
                    f"{1e3 * theirs:>9.1f} {ratios[case]:>7.1f}",
                    flush=True,
                )
            assert child.stdin is not None
            child.stdin.close()
    return ratios


def scale(repeats: int) -> dict[str, dict[str, float]]:
    """Nanoseconds per token of ours: by more samples of 2,484 tokens, and by eight longer samples."""
    print(f"\n{'tokens':>11} {'more samples':>17} {'longer samples':>17}   (nanoseconds per token)")
    found: dict[str, dict[str, float]] = {"more samples": {}, "longer samples": {}}
    for size in SIZES:
        shapes = {
            "more samples": Case(max(1, size // (4 * 2484)), 4, 2004, 480),
            "longer samples": Case(1, 8, size * 8 // 80, size * 2 // 80),
        }
        for name, case in shapes.items():
            raw = samples_of(case)
            row = our_side(raw)
            row()
            seconds = statistics.median(timed(row) for _ in range(repeats))
            found[name][f"{size:.0e}"] = round(1e9 * seconds / sum(len(r.tokens) for r in raw), 1)
        print(f"{size:>11,} " + " ".join(f"{values[f'{size:.0e}']:>17}" for values in found.values()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--serve-trl", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve_trl is not None:
        serve_trl(args.serve_trl)
        return
    ratios = compare(args.repeats)
    per_token = scale(min(args.repeats, 5))
    print(json.dumps({
        "ratio": round(ratios[HEADLINE], 1), "goal": GOAL, "row": HEADLINE,
        "ratios": {name: round(ratio, 1) for name, ratio in ratios.items()}, "ns_per_token": per_token,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
