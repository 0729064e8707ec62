"""The shm backend's files, and the plugin's registration."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import asyncgrpo_core.sync
from asyncgrpo_core.errors import ConfigError, WeightSyncError
from asyncgrpo_core.sync.shm import ShmBackend
from asyncgrpo_core.sync.shm_files import FAULT_ENV, PREFIX, check_fault, fault_from_environment, sweep_stale
from tests.unit.sync_fakes import FakeServer, Policy


def test_views_tied_and_transposed_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = {"whole": base, "rows": base[1:3], "transposed": base.t(), "again": base}
    backend = ShmBackend(FakeServer(), lambda: sent.items(), directory=tmp_path)
    transfer = backend.prepare(3, compare=False)
    written = load_file(transfer.payload.path)
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in sent.items()
    }
    assert transfer.num_bytes == transfer.payload.path.stat().st_size
    backend.close()
    assert list(tmp_path.iterdir()) == []


def test_file_is_private_to_process_and_version(tmp_path: Path) -> None:
    policy = Policy()
    paths = [
        ShmBackend(FakeServer(), policy.parameters, directory=tmp_path).prepare(v, compare=False).payload.path
        for v in (1, 1, 2)
    ]
    assert len(set(paths)) == 3
    assert all(path.name.startswith(f"{PREFIX}{os.getpid()}-") for path in paths)


def test_nothing_to_send_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no parameters"):
        ShmBackend(FakeServer(), lambda: iter(()), directory=tmp_path).prepare(0, compare=False)


def test_unwritable_file_is_an_error_with_the_size(tmp_path: Path) -> None:
    backend = ShmBackend(FakeServer(), Policy().parameters, directory=tmp_path)
    tmp_path.rmdir()
    with pytest.raises(WeightSyncError, match="MiB of weights"):
        backend.prepare(0, compare=False)


def test_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no writable directory"):
        ShmBackend(FakeServer(), Policy().parameters, directory=tmp_path / "missing")


def test_files_of_killed_trainers_are_swept(tmp_path: Path) -> None:
    """Only old ones of processes that are gone: a younger one may belong to another container."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    old, young = (tmp_path / f"{PREFIX}{gone.pid}-a-v{v}.safetensors" for v in (1, 2))
    mine = tmp_path / f"{PREFIX}{os.getpid()}-b-v1.safetensors"
    other = tmp_path / "something-else"
    for path in (old, young, mine, other):
        path.write_text("x")
    past = time.time() - 7200
    for path in (old, mine, other):
        os.utime(path, (past, past))
    assert sweep_stale(tmp_path) == [old]
    assert {path.name for path in tmp_path.iterdir()} == {young.name, mine.name, other.name}


@pytest.mark.parametrize("fault", ["lm_head", "all"])
def test_fault_is_passed_with_the_update(tmp_path: Path, fault: str) -> None:
    server = FakeServer()
    backend = ShmBackend(server, Policy().parameters, directory=tmp_path, fault=fault)
    backend.deliver(backend.prepare(0, compare=False))
    sent = next(call[1] for call in server.calls if call[0] == "update_weights")
    assert sent["fault"] == fault


def test_misspelt_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="lm_haed"):
        check_fault("lm_haed")
    monkeypatch.setenv(FAULT_ENV, "everything")
    with pytest.raises(ValueError, match=FAULT_ENV):
        fault_from_environment()
    monkeypatch.setenv(FAULT_ENV, "all")
    assert fault_from_environment() == "all"
    monkeypatch.delenv(FAULT_ENV)
    assert fault_from_environment() is None


def test_plugin_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls the function in every process, possibly twice, and its factory refuses a name it has."""
    from asyncgrpo_core.sync.vllm_plugin import register

    class Factory:
        _registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012

        @classmethod
        def register_engine(cls, name: str, module: str, class_name: str) -> None:
            if name in cls._registry:
                raise ValueError(name)
            cls._registry[name] = (module, class_name)

    package = ModuleType("vllm.distributed.weight_transfer")
    package.WeightTransferEngineFactory = Factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", ModuleType("vllm.distributed"))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", package)
    register()
    register()
    assert Factory._registry == {"shm": ("asyncgrpo_core.sync.shm_engine", "ShmWeightTransferEngine")}


def test_plugin_is_light() -> None:
    """vLLM imports the plugin in all of its processes."""
    code = (
        "import sys; import asyncgrpo_core.sync.vllm_plugin, asyncgrpo_core.sync.shm_files; "
        "heavy = {'torch', 'vllm', 'numpy', 'safetensors'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_the_engine_imports_vllm_when_it_is_imported() -> None:
    """The trainer side works where there is no vLLM: everywhere else the import stands inside a function."""
    package = Path(asyncgrpo_core.sync.__file__).parent
    importers = set()
    for path in package.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "vllm" for name in names):
                importers.add(path.name)
    assert importers == {"shm_engine.py"}
