"""A CPU trainer leaves half of the cores to the server beside it."""

from __future__ import annotations

import pytest
import torch

from asyncgrpo_core import AsyncGRPOConfig
from asyncgrpo_core.training import cores


@pytest.fixture
def threads(monkeypatch):
    """What torch is asked for on a machine of eight cores; empty when nothing is changed."""
    asked = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


def config(tmp_path, url="http://localhost:8000"):
    return AsyncGRPOConfig(output_dir=str(tmp_path), vllm_server_base_url=url, use_cpu=True)


def test_half_of_the_cores_beside_a_local_server(tmp_path, threads):
    cores.share_cores(config(tmp_path))
    assert threads == [4]


def test_all_of_them_when_the_server_is_elsewhere(tmp_path, threads):
    cores.share_cores(config(tmp_path, "http://10.1.2.3:8000"))
    assert threads == []


def test_omp_num_threads_decides(tmp_path, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    cores.share_cores(config(tmp_path))
    assert threads == []
