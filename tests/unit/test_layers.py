"""Imports only go down (design.md, 'Layers'), read from the source with `ast`: nothing is imported to find out."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
L0 = {"types", "errors", "metrics", "ledger", "ledger_counts", "ledger_schema", "slots", "guard", "manifest"}
LEVEL = {"server": 1, "packing": 1, "models": 1, "tracking": 1, "rollout": 2, "sync": 2, "training": 3, "launch": 4}
QUICKSTART = "quickstart"
MAX_FILE_LINES = 350  # 'about 300'


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    # A finalizer that the garbage collector runs in the middle of parsing (a forgotten asyncio task logs) breaks
    # CPython 3.11's parser: "AST constructor recursion depth mismatch".
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import statement of a file, also inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def level_of(module: str) -> int | None:
    """The layer of one of our modules; None for a library. `rewards` is the public face of rollout/scoring (L2)."""
    parts = module.split(".")
    if parts[0] == "flows":
        return 6
    if parts[0] == "tasks":
        return 5
    if parts[0] != "asyncgrpo_core":
        return None
    if len(parts) == 1 or parts[1] in L0:
        return 0
    if parts[1] == "rewards":
        return 2
    return LEVEL.get(parts[1], 0)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("asyncgrpo_core.") else module.split(".")[0]


ALL = sources("asyncgrpo_core", "tasks", "flows")


@pytest.mark.parametrize("path", ALL, ids=module_of)
def test_imports_only_go_down(path: Path):
    here = module_of(path)
    if here == "asyncgrpo_core":
        return  # loads its public names on first use; its TYPE_CHECKING imports name the upper layers
    level = level_of(here)
    if package_of(here) == QUICKSTART:
        level = 0
    assert level is not None
    for module, line in imports(path):
        other = level_of(module)
        if other is None or package_of(module) == package_of(here):
            continue
        assert other < level or other == level == 0, (
            f"{path.relative_to(ROOT)}:{line}: L{level} imports {module} (L{other})"
        )


@pytest.mark.parametrize("path", ALL, ids=module_of)
def test_a_file_stays_readable(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    assert path.stem not in ("utils", "helpers", "common")


def users_of(library: str, *folders: str) -> set[str]:
    return {
        module_of(path)
        for path in sources(*folders)
        if any(module == library or module.startswith(f"{library}.") for module, _ in imports(path))
    }


def test_the_core_never_imports_prefect():
    assert users_of("prefect", "asyncgrpo_core") == set()


def test_mlflow_is_imported_in_one_module():
    assert users_of("mlflow", "asyncgrpo_core", "tasks", "flows") == {"asyncgrpo_core.tracking.mlflow_store"}


def test_vllm_is_imported_in_sync_alone():
    packages = {package_of(module) for module in users_of("vllm", "asyncgrpo_core", "tasks", "flows")}
    assert packages == {"sync"}


def test_torch_stays_out_of_the_light_packages():
    light = {"server", "tracking", "launch", "guard", "tasks", "flows", *L0}
    # trainer_main sets torch's threads inside the trainer process, from within a function
    assert {m for m in users_of("torch", "asyncgrpo_core", "tasks", "flows") if package_of(m) in light} == {
        "asyncgrpo_core.launch.trainer_main"
    }


def test_the_check_sees_an_upward_import(tmp_path: Path):
    """The test of the test: what it reads from a source is what stands there, also inside a function."""
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from asyncgrpo_core.training import loss\n")
    assert ("asyncgrpo_core.training.loss", 2) in list(imports(file))
    assert level_of("asyncgrpo_core.training.loss") == 3 > level_of("asyncgrpo_core.server.control")
