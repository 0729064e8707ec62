"""`asyncgrpo serve CONFIG`: only the vLLM server, until Ctrl-C."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

from asyncgrpo_core.errors import ConfigError, RunInterrupted
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.logs import log_to_file
from asyncgrpo_core.launch.placement import place
from asyncgrpo_core.launch.progress import console
from asyncgrpo_core.launch.run_folder import (
    choose_run_dir,
    make_run_dir,
    refuse_live_run,
    release_ownership,
    resolve,
    take_ownership,
)
from asyncgrpo_core.launch.vllm_server import ServerSlot, plan_server, served_model_name


def serve(cfg: RunConfig) -> int:
    """Start the server that this config needs and keep it until the command is interrupted.

    Raises:
        ConfigError: `server.url` names a server that runs already.
        ServerError: the server did not start, or died.
        RunInterrupted: always, at the end, when it is interrupted.
    """
    if cfg.server.url is not None:
        raise ConfigError(
            f"server.url = {cfg.server.url!r} names what runs already, so there is no server to start.",
            "Remove server.url (and training.vllm_server_base_url).",
        )
    if cfg.run_dir is None:
        cfg.name = f"{cfg.name}-serve"
    run_dir = choose_run_dir(cfg)
    cfg = resolve(cfg, run_dir)
    if "load_format" not in cfg.server.model_fields_set:
        cfg.server.load_format = "auto"  # whoever looks at this server before the first sync wants the real weights
    command = plan_server(cfg, place(cfg))
    assert command is not None
    refuse_live_run(run_dir)
    make_run_dir(run_dir, folders=["logs"])
    log_to_file(run_dir / "logs" / "flow.log")
    take_ownership(run_dir)
    slot = ServerSlot(command, command.base_url)
    before = signal.signal(signal.SIGTERM, _terminated)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would have it ignored
    try:
        console().status("starting vLLM")
        slot.start(run_dir, cfg.server.start_timeout_s, lambda line: console().status(line.partition(":")[0]))
        console().say(ready_text(command.base_url, served_model_name(cfg), run_dir))
        while True:
            slot.raise_if_dead()
            time.sleep(0.5)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
        slot.stop()
        release_ownership(run_dir)


def ready_text(url: str, model: str, run_dir: Path) -> str:
    """What is printed when the server is healthy."""
    return (
        f"vLLM is ready: {url}\n"
        f"  model name: {model}\n"
        f"  use it:     AsyncGRPOConfig(vllm_server_base_url={url!r}), or --set server.url={url}\n"
        f"  log:        {run_dir / 'logs' / 'server-0.log'}\n"
        "Ctrl-C stops it."
    )


def _terminated(number: int, frame: FrameType | None) -> None:
    raise RunInterrupted("The server was stopped by SIGTERM.")
