"""Which backend is chosen, and what is refused with the flag to change."""

from __future__ import annotations

import pytest
import torch

from asyncgrpo_core.errors import ConfigError, ServerMismatchError
from asyncgrpo_core.sync.backend import dtype_name, name_list, select_backend


@pytest.mark.parametrize(
    ("trainer", "server", "same_gpu", "chosen"),
    [
        ("cpu", "cpu", False, "shm"),
        ("cuda", "cpu", False, "shm"),
        ("cpu", None, False, "shm"),
        ("cuda", "cuda", True, "ipc"),
        ("cuda", "cuda", False, "nccl"),
        ("cuda", None, False, "nccl"),
    ],
)
@pytest.mark.parametrize("requested", [None, "auto"])
@pytest.mark.parametrize("reported", [True, False])
def test_auto_follows_the_devices(trainer, server, same_gpu, chosen, requested, reported) -> None:
    assert (
        select_backend(
            requested,
            server_backend=chosen if reported else None,
            server_device=server,
            trainer_device=trainer,
            same_gpu=same_gpu,
        )
        == chosen
    )


@pytest.mark.parametrize(("reported", "says"), [("nccl", "by 'nccl'"), ("", "without weight transfer")])
def test_other_server_backend_names_the_flag(reported: str, says: str) -> None:
    with pytest.raises(ServerMismatchError) as error:
        select_backend(None, server_backend=reported, server_device="cpu", trainer_device="cpu")
    assert """--weight-transfer-config '{"backend": "shm"}'""" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("requested", "server", "trainer", "same_gpu", "word"),
    [
        ("nccl", "cpu", "cpu", False, "shm"),
        ("ipc", "cpu", "cuda", False, "shm"),
        ("nccl", "cuda", "cuda", True, "ipc"),  # F103: nccl needs different GPUs
        ("ipc", "cuda", "cuda", False, "nccl"),
        ("rdma", "cuda", "cuda", False, "rdma"),
    ],
)
def test_impossible_requests_are_refused(requested, server, trainer, same_gpu, word) -> None:
    with pytest.raises(ConfigError, match=word):
        select_backend(requested, server_backend=None, server_device=server, trainer_device=trainer, same_gpu=same_gpu)


def test_shm_may_be_asked_for_between_gpus() -> None:
    assert select_backend("shm", server_backend="shm", server_device="cuda", trainer_device="cuda") == "shm"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.bfloat16", "bfloat16"),
        (torch.float32, "float32"),
        ("half", "float16"),
        ("bf16", "bfloat16"),
        ("auto", None),
        (None, None),
    ],
)
def test_dtype_name(text, name) -> None:
    assert dtype_name(text) == name


def test_name_list() -> None:
    names = [f"p{i}" for i in range(10)]
    assert name_list(names[:2]) == "p0, p1"
    assert name_list(names, 20, shown=2) == "p0, p1 and 8 more"
    assert name_list(names, 10, shown=2) == "all 10 parameters (p0, p1 and 8 more)"
    assert name_list(["lm_head.weight"], 1) == "lm_head.weight"
