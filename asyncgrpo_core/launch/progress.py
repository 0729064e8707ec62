"""How far a run is, from the trainer process to the person who watches: RUN/progress.json and one console line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from asyncgrpo_core.launch.run_folder import write_json

PROGRESS_FILE = "progress.json"
LINE_EVERY_STEPS = 5  # where the console is no terminal
LINE_EVERY_S = 10.0
PHASE_EVERY_S = 20.0


@dataclass(frozen=True)
class Progress:
    """The newest state of training; None where it is not known yet.

    Example: Progress("training", 12, 80, 0.53, 2100.0, 1.4) -> "step 12/80 | reward 0.530 | 2,100 tok/s | ..."
    """

    phase: str
    step: int = 0
    max_steps: int | None = None
    reward: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None

    def line(self) -> str:
        """One line for the console."""
        if self.phase != "training" or self.step == 0:
            return self.phase
        steps = f"step {self.step}" + (f"/{self.max_steps}" if self.max_steps else "")
        parts = [steps]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.staleness is not None:
            parts.append(f"staleness {self.staleness:.1f}")
        return " | ".join(parts)


def write_progress(run_dir: Path, progress: Progress) -> None:
    write_json(run_dir / PROGRESS_FILE, asdict(progress))


def read_progress(run_dir: Path) -> Progress | None:
    """The newest progress of the trainer; None before there is any."""
    try:
        data = json.loads((run_dir / PROGRESS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Progress(**{f.name: data.get(f.name, f.default) for f in fields(Progress)})


class Console:
    """A live line on a terminal; elsewhere a line every few steps. A closed pipe ends the output, not the run."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._given = stream
        self._live = self._stream.isatty() if live is None else live
        self._open_line = False
        self._last = ""
        self._last_step = -LINE_EVERY_STEPS
        self._last_at = float("-inf")

    @property
    def _stream(self) -> TextIO:
        return self._given or sys.stdout

    def progress(self, progress: Progress) -> None:
        """Show the newest state; cheap to call often."""
        line = progress.line()
        if line == self._last:
            return
        if self._live:
            width = shutil.get_terminal_size().columns
            self._write(f"\r\x1b[2K{line[: width - 1]}")
            self._open_line = True
        elif not self._is_due(progress):
            return
        else:
            self._write(line + "\n")
        self._last, self._last_at = line, time.monotonic()
        self._last_step = progress.step if progress.phase == "training" else -LINE_EVERY_STEPS

    def _is_due(self, progress: Progress) -> bool:
        if progress.phase != "training" or progress.step == 0:
            # "vLLM server starting, 5 s: ..." and the same with 10 s are one phase
            same = _kind(progress.phase) == _kind(self._last)
            return not same or time.monotonic() - self._last_at >= PHASE_EVERY_S
        return (
            progress.step - self._last_step >= LINE_EVERY_STEPS
            or progress.step == progress.max_steps
            or time.monotonic() - self._last_at >= LINE_EVERY_S
        )

    def status(self, text: str) -> None:
        """A phase before or after training."""
        self.progress(Progress(phase=text))

    def say(self, text: str = "") -> None:
        """A whole line (or several) that stays."""
        if self._open_line:
            self._write("\n")
            self._open_line = False
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            # The reader has gone (a closed terminal, `| head`): training goes on without a console.
            self._given = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
            self._live = False


def _kind(line: str) -> str:
    return line.partition(",")[0]


_console: Console | None = None


def console() -> Console:
    """The console of this process."""
    global _console
    if _console is None:
        _console = Console()
    return _console
