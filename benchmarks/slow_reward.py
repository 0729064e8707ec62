"""A slow reward function must not slow training: the quickstart with and without one, in turn, on one machine.

    python benchmarks/slow_reward.py [--steps 40] [--repeats 1]

The slow one takes 2 s for one completion in ten (an async function, as a judge behind HTTP is), awaited in parallel
inside a group, many groups at once. Both runs have max_staleness 16, so that generation may run ahead while rewards are
awaited. Compared are the trained tokens per second of the training window. Goal: within 10 %, i.e. a ratio of at least
0.9. The runs alternate and the medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from asyncgrpo_core.quickstart.task import exact_answer_reward

ROOT = Path(__file__).resolve().parents[1]
SLOW_SHARE, SLOW_S = 10, 2.0
GOAL = 0.9


async def slow_exact_answer_reward(
    prompts: list, completions: list, completion_ids: list, answer: list, **kwargs: Any
) -> list[float]:
    """The quickstart's reward; 2 s for one completion in ten, which one is drawn from prompt, tokens and place."""

    async def one(index: int) -> float:
        key = json.dumps([prompts[index][-1]["content"], completion_ids[index], index])
        if zlib.crc32(key.encode()) % SLOW_SHARE == 0:
            await asyncio.sleep(SLOW_S)
        return exact_answer_reward([completions[index]], [answer[index]], [completion_ids[index]])[0]

    return list(await asyncio.gather(*(one(index) for index in range(len(completions)))))


def run(slow: bool, steps: int, folder: Path) -> dict[str, float]:
    """One quickstart; its throughput and the time that rewards took."""
    reward = (
        "benchmarks.slow_reward:slow_exact_answer_reward"
        if slow
        else "asyncgrpo_core.quickstart.task:exact_answer_reward"
    )
    settings = {
        "name": "slow" if slow else "plain",
        "rewards": json.dumps([reward]),
        "training.max_steps": steps,
        "training.max_staleness": 16,
        "evaluation.n": 0,
        "tracking.uri": f"sqlite:///{folder / 'mlflow.db'}",
    }
    run_dir = folder / f"{settings['name']}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "asyncgrpo_core.launch.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run([*command, "--run-dir", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(
            f"The run in {run_dir} failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    summary = json.loads((run_dir / "run_summary.json").read_text())
    return {
        "trained_tokens_per_s": summary["throughput"]["trained_tokens_per_s"],
        "generated_tokens_per_s": summary["throughput"]["generated_tokens_per_s"],
        "train_s": summary["train_s"],
        "reward_last": summary["reward"]["last"],
        "dropped_stale": summary["ledger"]["dropped"]["stale"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1, help="pairs of runs")
    args = parser.parse_args()
    results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="slow-reward-") as folder:
        for repeat in range(args.repeats):
            for slow in (False, True) if repeat % 2 == 0 else (True, False):
                results[slow].append(run(slow, args.steps, Path(folder)))
                print(f"{'slow' if slow else 'plain'}: {results[slow][-1]}", flush=True)
    medians = {
        slow: {name: statistics.median(r[name] for r in runs) for name in runs[0]} for slow, runs in results.items()
    }
    print(f"\n{'':>24} {'plain':>12} {'slow reward':>12}")
    for name in medians[False]:
        print(f"{name:>24} {medians[False][name]:>12.2f} {medians[True][name]:>12.2f}")
    ratio = medians[True]["trained_tokens_per_s"] / medians[False]["trained_tokens_per_s"]
    report = {"benchmark": "slow_reward", "ratio": round(ratio, 3), "goal": GOAL, "steps": args.steps}
    print(json.dumps(report | {"repeats": args.repeats, "plain": medians[False], "slow": medians[True]}))


if __name__ == "__main__":
    main()
