"""What a push to the hub takes and what stays (F196): HfApi's own upload, with its two calls to the hub recorded."""

from __future__ import annotations

import inspect
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.hf_api
import peft
import pytest
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from transformers import trainer as transformers_trainer

from asyncgrpo_core import AsyncGRPOTrainer
from asyncgrpo_core.ledger import LedgerWriter
from asyncgrpo_core.manifest import problem_with
from asyncgrpo_core.sync.lora_store import AdapterStore
from asyncgrpo_core.training.pipeline import Pipeline
from asyncgrpo_core.training.run_context import set_aside
from tests.ranks.rank_parts import make_trainer, parameters_of
from tests.tiny_model import write_model

TOKEN = "hf_writes_here"


class Hub:
    """Records repositories and commits; `files` are the bytes of a commit by path, read when it is made."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def create_repo(self, _api, repo_id, **kwargs):
        self.created.append({"repo_id": repo_id, **kwargs})
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_commit(self, _api, repo_id, operations, *, commit_message, token=None, revision=None, **_kwargs):
        files = {operation.path_in_repo: Path(operation.path_or_fileobj).read_bytes() for operation in operations}
        with self.lock:
            self.commits.append(
                {"repo_id": repo_id, "message": commit_message, "token": token, "revision": revision, "files": files}
            )
        return f"commit {len(self.commits)}"


@pytest.fixture
def hub(monkeypatch):
    recorded = Hub()
    for name in ("create_repo", "create_commit"):
        method = getattr(recorded, name)
        monkeypatch.setattr(HfApi, name, lambda api, *args, method=method, **kwargs: method(api, *args, **kwargs))
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *args, **kwargs: None)  # asks the hub about the model card
    monkeypatch.setattr(huggingface_hub.hf_api, "is_xet_available", lambda: False)  # one commit per upload
    return recorded


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "model")


def keep_a_run(trainer, output: Path) -> list[str]:
    """Everything that a script's run leaves in `output_dir` for itself, by the objects that put it there."""
    pipeline = Pipeline(
        trainer.args,
        trainer.run,
        model_name="policy",
        num_rows=4,
        worker_arguments={},
        window=trainer.window,
        should_stop=lambda: False,
        stop_requested=lambda: False,
    )
    ledger = trainer.run.run_dir / "ledger.sqlite"
    LedgerWriter(ledger, num_rows=4).close()
    set_aside(ledger)  # of a run before
    LedgerWriter(ledger, num_rows=4).close()
    open_ledger = sqlite3.connect(ledger)  # -wal and -shm lie beside it while it is written
    folders = [pipeline.buffer.directory, trainer.guard.folder, AdapterStore(output, Path).directory]
    folders.append(trainer.run.run_dir / "logs")  # log_path of the worker
    folders.append(output.resolve() / ".hidden")  # as that of a checkpoint which is being saved
    for folder in folders:
        (folder / "deep").mkdir(parents=True, exist_ok=True)
        (folder / "file").write_text("private")
        (folder / "deep" / "file").write_text("private")
    open_ledger.close()
    kept = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    kept += [path for path in output.iterdir() if path.name.startswith("ledger")]
    return [path.relative_to(output.resolve()).as_posix() for path in map(Path.resolve, kept)]


def trained(model: Path, output: Path, **settings: Any):
    trainer = make_trainer(model, output, hub_token=TOKEN, hub_model_id="me/policy", **settings)
    private = keep_a_run(trainer, output)
    assert len(private) >= 10
    trainer.train()
    return trainer, private


def test_f196_the_model_goes_and_what_the_run_keeps_for_itself_stays(hub, model, tmp_path):
    output = tmp_path / "run"
    trainer, private = trained(model, output, save_strategy="steps", save_steps=2)
    (output / "notes.md").write_text("of the user")
    assert trainer.push_to_hub("Enough", revision="v1") == "commit 1"
    assert hub.created == [{"repo_id": "me/policy", "token": TOKEN, "private": None, "exist_ok": True}]
    (commit,) = hub.commits
    assert {name: commit[name] for name in ("repo_id", "message", "token", "revision")} == {
        "repo_id": "me/policy",
        "message": "Enough",
        "token": TOKEN,
        "revision": "v1",
    }
    files = commit["files"]
    needed = {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md", "notes.md"}
    assert needed <= files.keys()
    assert not set(private) & files.keys() and not any("/" in name for name in files)
    assert b"- async-grpo" in files["README.md"]
    assert not any(word in name for name in files for word in ("optimizer", "scheduler", "rng", "ledger", "samples"))
    assert not any(TOKEN.encode() in content for content in files.values())
    assert (output / "checkpoint-2" / "optimizer.pt").is_file() and (output / private[0]).is_file()  # only not pushed


def test_f196_what_was_pushed_is_the_policy(hub, model, tmp_path):
    trainer, _ = trained(model, tmp_path / "run")
    trainer.push_to_hub()
    assert hub.commits[0]["message"] == "End of training" and hub.commits[0]["revision"] is None
    for name, content in hub.commits[0]["files"].items():
        (tmp_path / "pulled").mkdir(exist_ok=True)
        (tmp_path / "pulled" / name).write_bytes(content)
    pulled = AutoModelForCausalLM.from_pretrained(tmp_path / "pulled")
    want = parameters_of(trainer)
    assert all((value == want[name]).all() for name, value in pulled.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "pulled").chat_template == trainer.processing_class.chat_template


def test_f196_of_an_adapter_only_the_adapter_goes(hub, model, tmp_path):
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer, private = trained(model, tmp_path / "run", peft_config=adapter)
    trainer.push_to_hub(token="hf_other")
    files, token = hub.commits[0]["files"], hub.commits[0]["token"]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files.keys() and token == "hf_other"
    assert b"- async-grpo" in files["README.md"]
    assert "model.safetensors" not in files and not set(private) & files.keys()


def test_f196_without_a_name_the_repository_is_called_as_the_folder_and_a_future_is_returned(hub, model, tmp_path):
    trainer = make_trainer(model, tmp_path / "my-policy")
    trainer.train()
    future = trainer.push_to_hub(blocking=False)
    assert future.result(60) == "commit 1"
    assert hub.created[0]["repo_id"] == "my-policy" and hub.commits[0]["repo_id"] == "me/my-policy"


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_f196_pushes_while_training_hold_the_model_and_whole_checkpoints_when_asked(hub, model, tmp_path, strategy):
    output = tmp_path / "run"
    settings = {"push_to_hub": True, "hub_strategy": strategy, "hub_always_push": True}
    trainer, private = trained(model, output, save_strategy="steps", save_steps=1, max_steps=2, **settings)
    trainer._finish_current_push()
    models = [c for c in hub.commits if not c["message"].endswith(", checkpoint")]
    checkpoints = [c for c in hub.commits if c["message"].endswith(", checkpoint")]
    assert sorted({c["message"] for c in models}) == ["Training in progress, step 1", "Training in progress, step 2"]
    for commit in models:
        assert "model.safetensors" in commit["files"] and "tokenizer.json" in commit["files"]
        assert not set(private) & commit["files"].keys()
        assert not any("/" in name or "optimizer" in name for name in commit["files"])
        assert not any(TOKEN.encode() in content for content in commit["files"].values())
    assert len(checkpoints) == (2 if strategy == "checkpoint" else 0)
    for number, commit in enumerate(checkpoints):
        folder = tmp_path / f"pulled-{number}"
        for name, content in commit["files"].items():
            path = folder / Path(name).relative_to("last-checkpoint")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert problem_with(folder) is None  # it can be resumed from


def test_f196_the_references_arguments():
    parameters = inspect.signature(AsyncGRPOTrainer.push_to_hub).parameters
    own = inspect.signature(Trainer.push_to_hub).parameters
    assert list(parameters) == ["self", "commit_message", "blocking", "token", "revision", "kwargs"]
    assert {n: p.default for n, p in parameters.items()} == {n: p.default for n, p in own.items()}
    assert parameters["commit_message"].default == "End of training" and parameters["blocking"].default is True


def test_f196_a_push_that_fails_leaves_the_way_to_the_hub_as_it_was(hub, model, tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    before = transformers_trainer.hf_api
    trainer = make_trainer(model, tmp_path / "run")
    monkeypatch.setattr(HfApi, "create_commit", refused)
    with pytest.raises(ConnectionError, match="no route"):
        trainer.push_to_hub()
    assert transformers_trainer.hf_api is before
