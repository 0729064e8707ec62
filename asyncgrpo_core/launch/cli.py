"""The command line: `asyncgrpo quickstart | train | serve | doctor`.

Only argparse is imported until a command is known. Errors are one paragraph on stderr; their traceback goes to
RUN/logs/flow.log. Exit code: 0 done, 1 failed while running, 2 bad configuration or arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError, RunInterrupted


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as exc:  # argparse: 0 after --help, 2 after a bad argument
        return exc.code if isinstance(exc.code, int) else 2
    try:
        return int(args.command(args))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return RunInterrupted.exit_code
    except AsyncGRPOError as error:
        print(f"\n{paragraph(error)}" if sys.stdout.isatty() else paragraph(error), file=sys.stderr)
        return error.exit_code


def paragraph(error: BaseException) -> str:
    """An error as one paragraph: its message, which holds the fix."""
    text = " ".join(str(error).split())
    kind = "Error" if not isinstance(error, RunInterrupted) else "Stopped"
    return f"{kind}: {text}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncgrpo", description="Asynchronous GRPO training of language models: one command, nothing lost."
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    quickstart = commands.add_parser("quickstart", help="train the shipped small policy, on a CPU, in a few minutes")
    _run_arguments(quickstart)
    quickstart.set_defaults(command=_quickstart)

    train = commands.add_parser("train", help="train as a config file says")
    train.add_argument("config", metavar="CONFIG", help="YAML file; start from examples/quickstart.yaml")
    _run_arguments(train)
    train.set_defaults(command=_train)

    serve = commands.add_parser("serve", help="start only the vLLM server, with the flags that this config needs")
    serve.add_argument("config", metavar="CONFIG", help="YAML file")
    _common_arguments(serve)
    serve.set_defaults(command=_serve)

    doctor = commands.add_parser("doctor", help="check everything that can be checked before a run")
    doctor.add_argument("config", metavar="CONFIG", help="YAML file")
    _common_arguments(doctor)
    doctor.set_defaults(command=_doctor)
    return parser


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, e.g. --set training.max_steps=60; the value is YAML; may be repeated",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="the run folder (default: runs/<name>-<time>)")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _common_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --run-dir, or the newest one of this name"
    )


def _overrides(args: argparse.Namespace) -> list[str]:
    overrides = list(args.overrides)
    if getattr(args, "resume", False):
        overrides.append("resume=true")
    return overrides


def _load(args: argparse.Namespace, *, quickstart: bool = False):
    from pathlib import Path

    from asyncgrpo_core.launch.loading import load_config, quickstart_config

    overrides = _overrides(args)
    cfg = quickstart_config(overrides) if quickstart else load_config(Path(args.config), overrides)
    if args.run_dir is not None:
        if not args.run_dir.strip():
            raise ConfigError("--run-dir is empty.", "Give a folder.")
        cfg.run_dir = args.run_dir
    return cfg


def _quickstart(args: argparse.Namespace) -> int:
    from asyncgrpo_core.launch.session import run_training

    return run_training(_load(args, quickstart=True))


def _train(args: argparse.Namespace) -> int:
    from asyncgrpo_core.launch.session import run_training

    return run_training(_load(args))


def _serve(args: argparse.Namespace) -> int:
    from asyncgrpo_core.launch.serve import serve

    return serve(_load(args))


def _doctor(args: argparse.Namespace) -> int:
    from asyncgrpo_core.launch.doctor import run_doctor

    return run_doctor(_load(args))


if __name__ == "__main__":
    sys.exit(main())
