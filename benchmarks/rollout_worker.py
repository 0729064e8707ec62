"""Tokens that a rollout worker handles per CPU second: ours beside TRL 1.16.0's, on the same recorded replies.

A stand-in server (replay_server.py) answers every request at once, so the worker's own CPU time is what limits it.
Each side is its worker process as its trainer would start it, plus a process that takes the samples and does not
count. The sides are measured in turn, several times; those not measured are stopped (SIGSTOP), so that what else the
machine does hits all of them alike. Medians. The goal: 5 times TRL's tokens per CPU second, asked as TRL asks for
them: the sampled token's log-probability only, no score centering.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout_worker
    OMP_NUM_THREADS=1 python -m benchmarks.rollout_worker --minutes 30 --memory    # does the worker's memory stay flat?

TRL comes from the package index into its own environment under .cache/, without its dependencies: it shares torch,
transformers and aiohttp with this interpreter's environment, so both sides run the same versions of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.rollout_replies import POLICY, RECORDED_TOKENS, recording

TRL = "trl==1.16.0"
GOAL = 5.0
CACHE = Path(__file__).parents[1] / ".cache" / "rollout_benchmark"
# what each side does, for the table: name -> (arguments of rollout_sides, what is asked for)
SIDES: dict[str, tuple[list[str], str]] = {
    "TRL 1.16.0": (["trl"], "/v1/completions, sampled log-probability and text"),
    "ours": (["ours", "--token-route", "1"], "/inference/v1/generate, sampled log-probability, policy versions"),
    "ours, TRL's route": (["ours", "--token-route", "0"], "/v1/completions, sampled log-probability"),
    "ours, top 8": (["ours", "--top-logprobs", "8"], "/inference/v1/generate, 8 most likely tokens, policy versions"),
}


def trl_python() -> Path:
    """The interpreter of TRL's environment; made on the first call."""
    folder = CACHE / TRL.replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", TRL], check=True)
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(site) / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        done.touch()
    return python


def tokenizer_folder(folder: Path, python: Path | None) -> Path:
    """The start policy's tokenizer for both sides, with Qwen3's chat template: TRL refuses a template it does not know.

    The template is the one that TRL ships. Without TRL (`python` None) the policy's own, which renders the same ids.
    """
    target = folder / "tokenizer"
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(POLICY / name, target)
    if python is not None:
        (template,) = python.parents[1].glob("lib/python*/site-packages/trl/chat_templates/qwen3.jinja")
        shutil.copy(template, target / "chat_template.jinja")
    return target


@dataclass
class Window:
    """One measurement: what a worker did until it had used a number of CPU seconds."""

    tokens: int
    cpu_s: float
    wall_s: float
    stand_in_cpu_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.cpu_s


@dataclass
class Running:
    """A side under way; `worker` is the process whose CPU time counts, with its children."""

    name: str
    process: subprocess.Popen[str]  # the consumer
    worker: psutil.Process
    log: IO[str]
    windows: list[Window] = field(default_factory=list)

    def tokens(self) -> int:
        """Generated tokens of the samples that the consumer has taken."""
        return self._ask()["tokens"]

    def _ask(self) -> dict[str, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.worker.is_running() or self.worker.status() == psutil.STATUS_ZOMBIE:
            raise self.ended("its worker is gone")
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            raise self.ended("it ended") from None

    def ended(self, how: str) -> SystemExit:
        self.log.seek(0)
        return SystemExit(f"{self.name}: {how}\n{self.log.read()[-4000:]}")

    def cpu_s(self) -> float:
        return sum(_cpu_s(process) for process in self._processes())

    def rss(self) -> int:
        return sum(process.memory_info().rss for process in self._processes())

    def freeze(self) -> int:
        """Stop the worker, let the consumer take what has arrived, stop it too; the tokens taken so far."""
        for process in self._processes():
            process.send_signal(signal.SIGSTOP)
        taken, same, now = -1, 0, {"pending": 1}
        while same < 3 or (now["pending"] and same < 30):  # half a sample stays pending
            time.sleep(0.05)
            now = self._ask()
            same = same + 1 if now["tokens"] == taken else 0
            taken = now["tokens"]
        self.process.send_signal(signal.SIGSTOP)
        return taken

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        for process in self._processes():
            process.send_signal(signal.SIGCONT)

    def use(self, cpu_s: float) -> None:
        """Run on until the worker has used so much more CPU time."""
        end = self.cpu_s() + cpu_s
        asked_at = time.monotonic()
        while self.cpu_s() < end:
            time.sleep(0.02)
            if time.monotonic() > asked_at + 5.0:
                self.tokens()  # raises when the side has ended
                asked_at = time.monotonic()

    def _processes(self) -> list[psutil.Process]:
        return [self.worker, *self.worker.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def stand_in(reply_tokens: int) -> Iterator[tuple[str, psutil.Process]]:
    """A replay server: its URL and process."""
    command = [sys.executable, "-m", "benchmarks.replay_server", "--reply-tokens", str(reply_tokens)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def side(name: str, python: Path, shared: list[str], extra: list[str] | None = None) -> Iterator[Running]:
    """A side, started and past its first samples."""
    arguments, _ = SIDES[name]
    command = [str(python), "-W", "ignore", "-m", "benchmarks.rollout_sides", *arguments, *shared, *(extra or [])]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- lives as long as this context
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    running = None
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            log.seek(0)
            raise SystemExit(f"{name} did not start:\n{log.read()[-4000:]}")
        running = Running(name, process, psutil.Process(json.loads(line)["pid"]), log)
        deadline = time.monotonic() + 300.0
        while running.tokens() == 0:
            if time.monotonic() > deadline:
                raise running.ended("no sample in 300 s")
            time.sleep(0.2)
        yield running
    finally:
        if running is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                running.go_on()
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()  # tells it to end
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
        process.kill()
        process.wait()


def measure(running: Running, server: psutil.Process, seconds: float, settle_s: float = 0.7) -> Window:
    """Let a frozen side run until its worker has used `seconds` of CPU time; frozen again after it."""
    running.go_on()
    running.use(settle_s)  # its connections have idled
    tokens = running.freeze()
    cpu_s, server_s, started = running.cpu_s(), _cpu_s(server), time.monotonic()
    running.go_on()
    running.use(seconds)
    wall_s = time.monotonic() - started
    taken = running.freeze() - tokens
    return Window(taken, running.cpu_s() - cpu_s, wall_s, _cpu_s(server) - server_s)


def compare(args: argparse.Namespace, folder: Path, python: Path | None, reply_tokens: int) -> dict[str, Running]:
    """All sides on replies of one length."""
    names = [name for name in args.only or SIDES if name != "TRL 1.16.0" or python is not None]
    shared = ["--tokenizer", str(folder / "tokenizer"), "--in-flight", str(args.in_flight)]
    shared += ["--reply-tokens", str(reply_tokens)]
    running: dict[str, Running] = {}
    with stand_in(reply_tokens) as (url, server), contextlib.ExitStack() as stack:
        for name in names:
            interpreter = python if name == "TRL 1.16.0" and python is not None else Path(sys.executable)
            running[name] = stack.enter_context(side(name, interpreter, [*shared, "--url", url]))
            running[name].freeze()
        for _ in range(args.repeats):
            for one in running.values():
                one.windows.append(measure(one, server, args.seconds))
    return running


def table(reply_tokens: int, sides: dict[str, Running]) -> dict[str, float]:
    """Print one length's table; tokens per CPU second of every side (medians)."""
    print(f"\nReplies of {reply_tokens} tokens to prompts of {len(recording()['prompt_ids'])}, groups of 8")
    header = (
        "side",
        "tokens per CPU s",
        "lowest",
        "highest",
        "us per token",
        "tokens/s wall",
        "stand-in CPU",
        "asks for",
    )
    print("{:>18} {:>17} {:>9} {:>9} {:>13} {:>14} {:>13}  {}".format(*header))
    medians = {}
    for name, one in sides.items():
        rates = [window.rate for window in one.windows]
        medians[name] = statistics.median(rates)
        wall = statistics.median(window.tokens / window.wall_s for window in one.windows)
        share = sum(w.stand_in_cpu_s for w in one.windows) / sum(w.cpu_s for w in one.windows)
        print(
            f"{name:>18} {medians[name]:17,.0f} {min(rates):9,.0f} {max(rates):9,.0f} {1e6 / medians[name]:13.2f} "
            f"{wall:14,.0f} {share:12.0%}   {SIDES[name][1]}"
        )
    return medians


def memory(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Our worker for `--minutes`: its resident memory by thirds of the run."""
    name = "ours, top 8" if args.top_logprobs else "ours"
    reply_tokens = args.reply_tokens[0]
    shared = ["--tokenizer", str(folder / "tokenizer"), "--in-flight", str(args.in_flight)]
    shared += ["--reply-tokens", str(reply_tokens)]
    samples: list[tuple[float, int]] = []
    with stand_in(reply_tokens) as (url, _), side(name, Path(sys.executable), [*shared, "--url", url]) as running:
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 60.0 * args.minutes:
            samples.append((passed, running.rss()))
            if len(samples) % 60 == 0:
                print(
                    f"{passed / 60:5.1f} min {samples[-1][1] / 2**20:8.1f} MiB {running.tokens():>14,} tokens",
                    flush=True,
                )
            time.sleep(1.0)
        tokens = running.tokens()
    return {"side": name, "tokens": tokens, "minutes": args.minutes, **growth([rss / 2**20 for _, rss in samples])}


def growth(rss_mib: list[float]) -> dict[str, Any]:
    """Means of the run's thirds, MiB; flat when the last differs from the middle by at most 2 % or 4 MiB."""
    third = len(rss_mib) // 3
    first, middle, last = (statistics.fmean(rss_mib[i * third : (i + 1) * third]) for i in range(3))
    return {
        "first_third_mib": round(first, 1), "middle_third_mib": round(middle, 1), "last_third_mib": round(last, 1),
        "growth_mib": round(last - middle, 2), "flat": last - middle <= max(4.0, 0.02 * middle),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[2 * RECORDED_TOKENS, 8 * RECORDED_TOKENS])
    parser.add_argument("--top-logprobs", type=int, choices=(0, 8), default=8, help="of the worker in --memory")
    parser.add_argument("--skip-trl", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(SIDES), help="measure only these sides")
    parser.add_argument("--parts", action="store_true", help="also split our worker's CPU time by part")
    parser.add_argument("--memory", action="store_true", help="instead: our worker's memory over --minutes")
    parser.add_argument("--minutes", type=float, default=3.0)
    args = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        folder = Path(name)
        python = None if args.skip_trl or args.memory else trl_python()
        tokenizer_folder(folder, python)
        result: dict[str, Any] = {"benchmark": "rollout_worker"}
        if args.memory:
            result |= memory(args, folder)
            print(json.dumps(result))
            return
        ratios = []
        for reply_tokens in args.reply_tokens:
            medians = table(reply_tokens, compare(args, folder, python, reply_tokens))
            result[f"tokens_per_cpu_s_{reply_tokens}"] = {side: round(rate) for side, rate in medians.items()}
            if {"ours", "TRL 1.16.0"} <= medians.keys():
                ratios.append(medians["ours"] / medians["TRL 1.16.0"])
                print(f"ours / TRL's: {ratios[-1]:.2f}, goal {GOAL:g}")
        if args.parts:
            from benchmarks.rollout_parts import print_parts

            print_parts(args, folder)
    result |= {"ratio": round(min(ratios), 2) if ratios else None, "goal": GOAL}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
