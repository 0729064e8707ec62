"""What the ranks do in test_training_ranks.py: `python -m tests.ranks.rank_jobs JOB ...` under torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import TrainerCallback

from asyncgrpo_core.errors import NonFiniteError, ServerError, WeightSyncError
from asyncgrpo_core.launch.stopping import StopSignal
from tests.ranks.rank_parts import Watch, make_trainer, parameters_of


def train(kind: str, model: Path, out: Path, *, name: str | None = None, resume: Path | None = None, **settings: Any):
    """One run; every rank leaves what it saw in OUT/<name>-<rank>.pt."""
    AcceleratorState._reset_state()  # it keeps how the run before was sharded
    name = name or kind
    watch = Watch()
    more = {"fsdp": True} if kind == "fsdp" else {}
    trainer = make_trainer(model, out / name, callbacks=[watch], **more, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    fake: Any = trainer.pipeline
    found = {
        "history": trainer.state.log_history,
        "gradients": watch.gradients,
        "parameters": parameters_of(trainer),
        "sharded": any(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
        "class": type(trainer.model_wrapped).__name__,
        "sent": fake.sent,
        "scores": fake.scores,
        "finished": fake.finished,
        "stopped": fake.stopped,
    }
    torch.save(found, out / f"{name}-{trainer.args.process_index}.pt")
    return trainer


def parity(model: str, out: str, plain_checkpoint: str) -> None:
    """The same steps under DDP and FSDP2 (which saves), and FSDP2 going on from a checkpoint of one rank."""
    train("ddp", Path(model), Path(out), loss_normalization="constant")
    trainer = train("fsdp", Path(model), Path(out), save_strategy="steps", save_steps=2)
    trainer.save_model(str(Path(out) / "whole"))
    train("fsdp", Path(model), Path(out), name="resumed", resume=Path(plain_checkpoint))


def adapter(model: str, out: str, plain_checkpoint: str | None = None) -> None:
    """A LoRA adapter: on one rank without a checkpoint to go on from, else under FSDP2, and on from that one."""
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "save_strategy": "steps", "save_steps": 2}
    kind = "one" if plain_checkpoint is None else "fsdp"
    torch.manual_seed(5)
    train(kind, Path(model), Path(out), name=f"adapter-{kind}", **more)
    if plain_checkpoint is not None:
        train(kind, Path(model), Path(out), name="adapter-resumed", resume=Path(plain_checkpoint), **more)


def mixed(model: str, out: str) -> None:
    """FSDP2 with bf16 mixed precision from bf16 weights: the dtypes of weights, moments and files."""
    settings = {"bf16": True, "weights": torch.bfloat16, "save_strategy": "steps", "save_steps": 2}
    trainer = train("fsdp", Path(model), Path(out), name="mixed", **settings)
    moments = [value for state in trainer.optimizer.state_dict()["state"].values() for value in state.values()]
    found = {
        "weights": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "moments": sorted({str(moment.dtype) for moment in moments if moment.ndim}),
    }
    (Path(out) / f"mixed-{os.environ['RANK']}.json").write_text(json.dumps(found))


class OnRankZero(TrainerCallback):
    """Asks for a checkpoint at the first log, and for the end at the second: on rank 0 alone, where metrics are."""

    trainer: Any = None

    def on_step_begin(self, args, state, control, **kwargs):
        if args.process_index == 0:
            self.trainer.log({"something/else": 1.0})  # on one rank only: nobody else need do anything

    def on_log(self, args, state, control, logs=None, **kwargs):
        if args.process_index == 0 and "loss" in (logs or {}):
            control.should_save = state.global_step == 1
            control.should_training_stop = state.global_step == 2


class SignalOnOne(TrainerCallback):
    """What a signal does, on rank 1 alone, in the first step."""

    trainer: Any = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 0:
            self.trainer.request_stop("SIGTERM")


class AfterTheFirstStep(TrainerCallback):
    """A signal that comes to rank 1 alone, while rank 0 waits for samples."""

    def __init__(self, trainer: Callable[[], Any]) -> None:
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 1:
            threading.Timer(0.5, self.trainer().request_stop, ["SIGTERM"]).start()


def agree(model: str, out: str) -> None:
    """Decisions that are made on one rank: where every rank ended, and what it thinks of it."""
    folder, found = Path(out), {}
    AcceleratorState._reset_state()
    decides = OnRankZero()
    one = decides.trainer = make_trainer(Path(model), folder / "callback", callbacks=[decides])
    one.train()
    found["callback"] = [one.state.global_step, one.stop_reason]
    AcceleratorState._reset_state()
    signal = SignalOnOne()
    two = make_trainer(Path(model), folder / "signal", callbacks=[signal])
    signal.trainer = two
    two.train()
    found["signal"] = [two.state.global_step, two.stop_reason]
    AcceleratorState._reset_state()
    three: Any = make_trainer(Path(model), folder / "agree-waiting", callbacks=[AfterTheFirstStep(lambda: three)])

    def wait(number: int) -> None:
        while number == 1 and not three._should_stop():
            time.sleep(0.01)

    three.pipeline.on_plan = wait
    three.train()
    found["waiting"] = [three.state.global_step, three.stop_reason]
    (folder / f"agreed-{os.environ['RANK']}.json").write_text(json.dumps(found))


class CannotBePickled(Exception):
    def __init__(self) -> None:
        super().__init__("of user code")
        self.held = lambda: None


def fail(model: str, out: str) -> None:
    """Errors on rank 0, one run after the other: what each rank caught, and how soon."""

    def away(number: int) -> None:
        if number == 1:
            raise ServerError("The server is away.", "Start it.")

    def broken_sync(number: int, link: Any) -> None:
        if number == 1:
            assert len(list(islice(link.parameters(), 3))) == 3  # abandoned half-way through the gathers
            raise WeightSyncError("The server refused tensor 3.")

    def user_code(number: int) -> None:
        if number == 1:
            raise CannotBePickled

    found = {}
    for name, more in {
        "plan": {"on_plan": away},
        "sync": {"on_sync": broken_sync},
        "pickle": {"on_plan": user_code},
    }.items():
        AcceleratorState._reset_state()
        trainer = make_trainer(Path(model), Path(out) / name, fsdp=True)
        vars(trainer.pipeline).update(more)
        started = time.monotonic()
        try:
            trainer.train()
        except Exception as error:
            found[name] = [type(error).__name__, str(error), time.monotonic() - started, trainer.pipeline.stopped]
    (Path(out) / f"failed-{os.environ['RANK']}.json").write_text(json.dumps(found))


def lose(model: str, out: str) -> None:
    """Rank 1 fails while rank 0 waits for samples."""
    AcceleratorState._reset_state()
    trainer: Any = make_trainer(Path(model), Path(out) / "lose")
    if trainer.args.process_index == 1:

        def broken(*_args):
            raise ZeroDivisionError("a bug of rank 1")

        trainer.pipeline.link = None
        trainer.get_batch_samples = broken
    else:

        def wait(number: int) -> None:
            while True:  # as SampleSource does
                trainer._should_stop()
                time.sleep(0.01)

        trainer.pipeline.on_plan = wait
    try:
        trainer.train()
    except Exception as error:
        (Path(out) / f"lost-{os.environ['RANK']}.json").write_text(json.dumps([type(error).__name__, str(error)]))


def stopped(model: str, out: str) -> None:
    """Waits for samples of the second step until a signal comes, as a run does that is stopped."""
    stop = StopSignal()
    stop.install()
    trainer: Any = make_trainer(Path(model), Path(out) / "stopped", fsdp=True)
    stop.arm(trainer.request_stop)

    def wait(number: int) -> None:
        if number == 1:
            (Path(out) / "stopped-waits").touch()
            while not trainer._should_stop():
                time.sleep(0.02)

    trainer.pipeline.on_plan = wait
    trainer.train()
    found = [trainer.state.global_step, trainer.stop_reason]
    (Path(out) / f"stopped-{os.environ['RANK']}.json").write_text(json.dumps(found))


def end_inside(model: str, out: str, where: str, how: str) -> None:
    """Rank 1 gets a signal in the middle of the second step's forward, backward or save; what rank 0 makes of it."""
    stop = StopSignal()
    stop.install()  # torchrun sends TERM to the rank that is left: it must get as far as to say why
    sharded = where != "backward"
    trainer: Any = make_trainer(
        Path(model), Path(out) / "run", fsdp=sharded, ddp_timeout=15, save_strategy="steps", save_steps=1
    )
    stop.arm(trainer.request_stop)
    rank = trainer.args.process_index
    holder = trainer.accelerator if where == "backward" else trainer
    name = {"forward": "compute_loss", "backward": "backward", "save": "_save_optimizer_and_scheduler"}[where]
    real = getattr(holder, name)

    def ending(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and trainer.state.global_step == (2 if where == "save" else 1):
            os.kill(os.getpid(), getattr(signal, how))
        return real(*args, **kwargs)

    setattr(holder, name, ending)
    try:
        trainer.train()
    except Exception as error:
        ended = [type(error).__name__, str(error), trainer.pipeline.stopped]
        (Path(out) / f"ended-{rank}.json").write_text(json.dumps(ended))
        raise


def everything(model: str, out: str, plain_checkpoint: str) -> None:
    """All of it in one start: importing torch and transformers takes longer than the runs."""
    parity(model, out, plain_checkpoint)
    adapter(model, out, str(Path(out) / "adapter-one" / "checkpoint-2"))
    mixed(model, out)
    agree(model, out)
    fail(model, out)
    lose(model, out)


def nonfinite(model: str, out: str) -> None:
    """Rank 1's row of the second micro-batch is poisoned: once in the middle of a run, then until the run ends."""
    for kind, poisoned in (("ddp", (1,)), ("fsdp", (0, 1))):
        AcceleratorState._reset_state()
        folder = Path(out) / kind
        more = {"fsdp": True} if kind == "fsdp" else {}
        trainer = make_trainer(Path(model), folder, max_nonfinite_steps=2, **more)
        for number in poisoned:
            row = trainer.pipeline.steps[number][1].rows[-1]
            next(s for s in row if s.sequence.num_trained).advantage = float("nan")
        error = ""
        try:
            trainer.train()
        except NonFiniteError as raised:
            error = str(raised)
        rank = trainer.args.process_index
        found = {"error": error, "skipped": trainer.pipeline.skipped, "history": trainer.state.log_history}
        found["parameters"] = parameters_of(trainer)
        torch.save(found, Path(out) / f"nonfinite-{kind}-{rank}.pt")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    torch.distributed.destroy_process_group()
