"""`asyncgrpo doctor CONFIG`: check everything that can be checked before a run, and say what to change."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.embedded import check_prefect_reachable, configured_api_url
from asyncgrpo_core.launch.imports import resolve_model_path
from asyncgrpo_core.launch.placement import Placement, place
from asyncgrpo_core.launch.reward_probe import check_picklable, probe_reward, reward_name
from asyncgrpo_core.launch.run_folder import RUNS_FOLDER
from asyncgrpo_core.launch.vllm_server import plan_server

if TYPE_CHECKING:
    from asyncgrpo_core.server.capabilities import ServerCapabilities

FAIL_EXIT_CODE = 2
SERVER_WAIT_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line of the table. `level` is "ok", "warn" or "fail"."""

    level: str
    check: str
    text: str


class Examination:
    """Collects findings; a check that raises is a failure, and the next one is made all the same."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def ok(self, check: str, text: str) -> None:
        self.findings.append(Finding("ok", check, text))

    def warn(self, check: str, text: str) -> None:
        self.findings.append(Finding("warn", check, text))

    def fail(self, check: str, text: str) -> None:
        self.findings.append(Finding("fail", check, text))

    def run(self, check: str, function: Callable[[], Any], text: Callable[[Any], str] | str) -> Any:
        """Make one check; its result, or None when it failed."""
        try:
            result = function()
        except AsyncGRPOError as error:
            self.fail(check, " ".join(str(error).split()))
            return None
        except Exception as error:  # a check of someone else's code may raise anything
            self.fail(check, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return None
        self.ok(check, text if isinstance(text, str) else text(result))
        return result

    @property
    def failed(self) -> bool:
        return any(f.level == "fail" for f in self.findings)


def run_doctor(cfg: RunConfig) -> int:
    """Print the table; 0 when nothing failed, else 2."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    exam = examine(cfg)
    width = max(len(f.check) for f in exam.findings)
    for finding in exam.findings:
        print(f"{finding.level:<4}  {finding.check:<{width}}  {finding.text}")
    failures = sum(f.level == "fail" for f in exam.findings)
    warnings = sum(f.level == "warn" for f in exam.findings)
    print(f"\n{failures} failed, {warnings} warnings, {len(exam.findings) - failures - warnings} ok")
    return FAIL_EXIT_CODE if exam.failed else 0


def examine(cfg: RunConfig) -> Examination:
    """Every check, in the order in which a run would meet what it checks."""
    exam = Examination()
    exam.ok("config", f"{cfg.name}: {cfg.training.num_generations} rollouts per prompt")
    placement = exam.run("devices", lambda: place(cfg), _placement_text)
    _check_training(exam, cfg)
    rows = _check_data(exam, cfg)
    _check_code(exam, cfg, rows)
    _check_model(exam, cfg, rows)
    _check_server(exam, cfg, placement)
    _check_disk(exam, cfg)
    _check_trackers(exam, cfg)
    return exam


def _placement_text(placement: Placement) -> str:
    if placement.device == "cpu":
        return "CPU, weights by shared memory"
    return (
        f"trainer on GPU {list(placement.trainer)}, server on {list(placement.server)}, weights by {placement.backend}"
    )


def _check_training(exam: Examination, cfg: RunConfig) -> None:
    from asyncgrpo_core.launch.build import training_args

    exam.run(
        "training",
        lambda: training_args(cfg.training, output_dir=Path(RUNS_FOLDER), server_url="http://127.0.0.1:1"),
        lambda args: f"learning_rate {args.learning_rate:g}, max_steps {args.max_steps}, dtype {args.dtype}",
    )


def _check_data(exam: Examination, cfg: RunConfig) -> list[dict[str, Any]]:
    """Load the rows; the first one, for the checks that need one."""
    from asyncgrpo_core.launch.dataset import load_heldout_rows, load_train_dataset

    rows: list[dict[str, Any]] = []
    if cfg.data.train is not None:
        dataset = exam.run(
            "data.train",
            lambda: load_train_dataset(cfg.data, needs_prompt=cfg.environment is None),
            lambda d: f"{len(d) if hasattr(d, '__len__') else 'a stream of'} rows, columns {d.column_names}",
        )
        if dataset is not None:
            rows = [dict(next(iter(dataset)))]
    if cfg.data.heldout is None:
        exam.warn("data.heldout", "no held-out rows: the run will not say what it has learned")
    else:
        exam.run("data.heldout", lambda: load_heldout_rows(cfg.data, cfg.evaluation.n), lambda r: f"{len(r)} rows")
    return rows


def _check_code(exam: Examination, cfg: RunConfig, rows: list[dict[str, Any]]) -> None:
    """Import what the config names and call every reward function once."""
    from asyncgrpo_core.launch.build import import_callable, import_environment, import_loop

    for index, path in enumerate(cfg.rewards):
        key = f"rewards.{index}"
        function = exam.run(f"{key} import", partial(import_callable, path, key), path)
        if function is not None:
            text = partial("{} gave {}".format, reward_name(function))
            exam.run(f"{key} called once", partial(probe_reward, function, rows[0] if rows else {}), text)
    tools = []
    for index, path in enumerate(cfg.tools):
        key = f"tools.{index}"
        tool = exam.run(f"{key} import", partial(import_callable, path, key), path)
        if tool is not None:
            tools.append(tool)
            exam.run(f"{key} pickle", partial(check_picklable, tool, "the tool"), "can be sent to the rollout process")
    if tools or cfg.environment is not None:
        from asyncgrpo_core.launch.agent_checks import describe_environments, describe_tools
    if tools:
        exam.run("tools", lambda: describe_tools(tools), str)
    if cfg.environment is not None:
        made = exam.run("environment", lambda: import_environment(cfg.environment), str(cfg.environment))
        if made is not None:
            exam.run("environments", lambda: describe_environments(made, tools, cfg.training.tool_timeout), str)
    if cfg.loop is not None:
        exam.run("loop", lambda: import_loop(cfg.loop), cfg.loop)


def _check_model(exam: Examination, cfg: RunConfig, rows: list[dict[str, Any]]) -> None:
    """The model's files, its tokenizer, and the chat template rendered once."""
    path = exam.run("model.path", lambda: resolve_model_path(cfg.model.path), lambda p: p)
    if path is None:
        return
    from types import SimpleNamespace

    from asyncgrpo_core.models.loading import load_processing_class

    settings = SimpleNamespace(
        model_init_kwargs={"revision": cfg.model.revision} if cfg.model.revision else None,
        trust_remote_code=cfg.model.trust_remote_code,
        dtype=cfg.training.dtype,
    )
    tokenizer = exam.run(
        "tokenizer", lambda: load_processing_class(path, settings), lambda t: f"{len(t)} tokens, pad {t.pad_token!r}"
    )
    if tokenizer is None:
        return
    schemas = _check_turns(exam, cfg, tokenizer) if cfg.tools or cfg.environment is not None else []
    if not rows or "prompt" not in rows[0]:
        return
    ids = exam.run(
        "chat template",
        lambda: tokenizer.apply_chat_template(
            rows[0]["prompt"],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **({"tools": schemas} if schemas else {}),
            **(cfg.training.chat_template_kwargs or {}),
        ),
        lambda ids: f"the first prompt has {len(ids)} tokens" + (", tools included" if schemas else ""),
    )
    limit = cfg.server.max_model_len
    if ids is not None and limit is not None and len(ids) + cfg.training.max_completion_length > limit:
        exam.fail(
            "length",
            f"{len(ids)} prompt tokens + max_completion_length {cfg.training.max_completion_length} > "
            f"server.max_model_len {limit}: raise server.max_model_len or lower max_completion_length",
        )
    if ids is not None and cfg.training.token_budget is not None:
        _check_budget(exam, len(ids), cfg.training.max_completion_length, cfg.training.token_budget)


def _check_budget(exam: Examination, prompt: int, completion: int, budget: int) -> None:
    """A sample longer than a row is dropped: some of them, or all."""
    if prompt + 1 > budget:
        text = "every sample of it is dropped: raise training.token_budget"
        exam.fail("token_budget", f"{prompt} prompt tokens and training.token_budget {budget}: {text}")
    elif prompt + completion > budget:
        text = "longer samples are dropped"
        exam.warn("token_budget", f"{prompt} prompt tokens + max_completion_length {completion} > {budget}: {text}")


def _check_turns(exam: Examination, cfg: RunConfig, tokenizer: Any) -> list[dict[str, Any]]:
    """Whether later turns go on from the tokens before; the schemas of the trainer's tools."""
    from asyncgrpo_core.launch.agent_checks import tool_schemas, try_template
    from asyncgrpo_core.launch.build import import_callable

    try:
        schemas = tool_schemas([import_callable(path, f"tools.{i}") for i, path in enumerate(cfg.tools)])
    except ConfigError:
        return []  # said already
    settings = (cfg.training.chat_template_kwargs, cfg.training.turn_prompts)
    report = exam.run("turns", lambda: try_template(tokenizer, schemas, *settings), lambda r: r.text)
    if report is not None and not (report.keeps_prefix and report.shows_tools):
        exam.findings.pop()
        exam.warn("turns", report.text)
    return schemas


def _check_server(exam: Examination, cfg: RunConfig, placement: Placement | None) -> None:
    if cfg.server.url is not None:
        for url in cfg.server.urls:
            exam.run("server settings", partial(_check_running_server, cfg, url, exam), f"{url} fits this config")
        return
    if placement is None:
        return
    exam.run("server command", lambda: plan_server(cfg, placement), "its flags can be given")
    if cfg.server.python is None:
        from importlib.util import find_spec

        if find_spec("vllm") is None:
            exam.fail("vllm", "not installed here: install the extra cpu or gpu, or set server.python or server.url")
        else:
            exam.ok("vllm", "installed")
    if cfg.server.port is not None:
        exam.run("server.port", lambda: _check_port(cfg.server.host, cfg.server.port), f"{cfg.server.port} is free")


def _check_running_server(cfg: RunConfig, url: str, exam: Examination) -> None:
    from asyncgrpo_core.server.checks import ServerWants, check_server
    from asyncgrpo_core.server.control import VLLMControl

    model = cfg.model.served_model_name or resolve_model_path(cfg.model.path)
    training = cfg.training
    with VLLMControl(url, timeout_s=10.0) as control:
        control.wait_until_ready(SERVER_WAIT_S)
        wants = ServerWants(
            served_model_name=model,
            num_sampler_logprobs=training.num_sampler_logprobs if training.score_centering else 0,
            needed_len=training.max_completion_length + 1,
            dtype=training.dtype,
            restricted_sampling=training.top_k > 0 or training.top_p < 1 or bool(training.min_p),
        )
        capabilities = control.capabilities()
        for warning in check_server(capabilities, wants):
            exam.warn("server settings", f"{url}: {warning}" if len(cfg.server.urls) > 1 else warning)
        _check_adapter(cfg, url, capabilities, exam)


def _check_adapter(cfg: RunConfig, url: str, capabilities: ServerCapabilities, exam: Examination) -> None:
    """Whether a running server can take the adapter alone; merged weights are sent where it cannot."""
    from asyncgrpo_core.server.adapters import LORA_BACKEND, AdapterWants, adapter_sync_obstacle, check_adapter_flags

    if cfg.model.lora is None or cfg.training.weight_sync_backend not in (None, LORA_BACKEND):
        return
    wants = AdapterWants(rank=cfg.model.lora.r, max_staleness=cfg.training.max_staleness)
    obstacle = adapter_sync_obstacle(wants, [capabilities], [url])
    if not obstacle:
        check_adapter_flags(wants, capabilities)
        exam.ok("adapter", f"{url} takes the adapter alone")
    elif cfg.training.weight_sync_backend == LORA_BACKEND:
        exam.fail("adapter", f"training.weight_sync_backend is 'lora', but {obstacle}")
    else:
        exam.ok("adapter", f"full weights with the adapter merged are sent: {obstacle}")


def _check_port(host: str, port: int | None) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port or 0))
        except OSError as error:
            raise AsyncGRPOError(
                f"Port {port} on {host} is taken ({error.strerror}).", "Set another server.port, or none: a free one."
            ) from error


def _check_disk(exam: Examination, cfg: RunConfig) -> None:
    folder = Path(cfg.run_dir).expanduser() if cfg.run_dir else Path(RUNS_FOLDER)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{free:.1f} GiB free at {folder.absolute()}"
    if free < cfg.resources.min_free_disk_gib:
        exam.warn("disk", f"{text}, less than resources.min_free_disk_gib = {cfg.resources.min_free_disk_gib:g}")
    else:
        exam.ok("disk", text)


def _check_trackers(exam: Examination, cfg: RunConfig) -> None:
    from asyncgrpo_core.tracking.reach import check_reachable

    if cfg.tracking.enabled:
        uri = cfg.tracking.resolved_uri()
        exam.run("MLflow", lambda: check_reachable(uri, cfg.tracking.reach_timeout_s), uri)
    else:
        exam.warn("MLflow", "tracking.enabled is false: nothing is recorded")
    url = exam.run("Prefect settings", configured_api_url, lambda u: u or "none: a server is started for the run")
    if url:
        exam.run("Prefect", lambda: check_prefect_reachable(url), url)
