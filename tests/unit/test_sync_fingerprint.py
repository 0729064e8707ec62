"""The digest that a GPU computes in place: the same everywhere, and another for every change."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.models import parameters
from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.sync import fingerprint as module
from asyncgrpo_core.sync.checksums import compare_checksums
from asyncgrpo_core.sync.fingerprint import fingerprint, fingerprints
from tests.tiny_architectures import make_architecture

MASK = 2**64 - 1


def splitmix(x: int) -> int:
    """The finalizer of SplitMix64, in Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expected(data: bytes) -> str:
    """The definition, word by word."""
    padded = data + bytes(-len(data) % 8)
    words = (int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8))
    total = sum(splitmix((word + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i, word in enumerate(words))
    return f"{splitmix((total + len(data) * 0x9E3779B97F4A7C15) & MASK):016x}"


def of_bytes(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@given(st.binary(max_size=200), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_it_is_the_sum_of_mixed_words_in_parts_of_any_size(data, chunk_words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_WORDS", chunk_words)
        assert fingerprint(of_bytes(data)) == expected(data)


@given(st.binary(min_size=1, max_size=100), st.data())
@settings(max_examples=60, deadline=None)
def test_every_changed_bit_and_every_exchange_of_words_is_seen(data, draw):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert fingerprint(of_bytes(bytes(changed))) != fingerprint(of_bytes(data))
    assert fingerprint(of_bytes(data + b"\0")) != fingerprint(of_bytes(data))
    words = [data[i : i + 8] for i in range(0, len(data) - len(data) % 8, 8)]
    if len(words) > 1 and words[0] != words[-1]:
        exchanged = b"".join([words[-1], *words[1:-1], words[0], data[8 * len(words) :]])
        assert fingerprint(of_bytes(exchanged)) != fingerprint(of_bytes(data))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_it_is_of_the_bytes_in_row_major_order_whatever_the_strides(dtype):
    tensor = (torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    turned = tensor.transpose(0, 2)
    assert fingerprint(tensor) == expected(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert fingerprint(turned) == fingerprint(turned.contiguous().clone())
    assert fingerprint(tensor[1:]) == fingerprint(tensor[1:].clone())  # bytes that do not begin at a word
    assert fingerprint(tensor[0, 0, 0]) == fingerprint(tensor[:1, :1, :1].clone())


@pytest.mark.parametrize("num_bytes", [100, 104])
@pytest.mark.parametrize("offset", range(8))
def test_memory_that_begins_anywhere_is_read(offset, num_bytes):
    """Both where a storage begins and where in it the tensor does."""
    data = np.arange(num_bytes, dtype=np.uint8)
    for begin in range(8):
        tensor = torch.from_numpy(data[begin:])[offset:]
        assert fingerprint(tensor) == expected(data[begin + offset :].tobytes())


def test_weights_that_a_server_has_emptied_say_nothing():
    """As vLLM's CPU kernels do with matrices that they have packed."""
    sent = [("a.weight", torch.ones(4, 4)), ("b.weight", torch.ones(4))]
    held = {**held_by(sent), "dp0:pp0:pcp0:tp0:a.weight": fingerprint(torch.empty(0))}
    evidence = compare_checksums(held, sent, torch.bfloat16, fingerprints=True)
    assert evidence is not None
    assert (evidence.matched, evidence.differing, evidence.unchecked) == (("b.weight",), (), ("a.weight",))


def test_the_names_keep_their_order_and_an_empty_tensor_has_a_digest_too():
    named = {"b": torch.ones(3), "empty": torch.empty(0), "a": torch.zeros(2, requires_grad=True)}
    found = fingerprints(named.items())
    assert list(found) == ["b", "empty", "a"]
    assert found == {name: fingerprint(tensor) for name, tensor in named.items()}
    assert fingerprints([]) == {} and found["empty"] == expected(b"")


def held_by(sent):
    return {f"dp0:pp0:pcp0:tp0:{name}": fingerprint(tensor.detach().bfloat16()) for name, tensor in sent}


@pytest.fixture
def to_host(monkeypatch):
    """Tensors that `cpu` was called of. On a CPU it copies nothing; on a GPU it is the way to the host."""
    moved = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or original(tensor))
    return moved


@pytest.mark.parametrize("frozen", [False, True])
def test_live_weights_stay_where_they_are_and_copies_go_to_the_host(frozen, to_host, monkeypatch):
    """Gathered shards are copies: all of them would be a second model on the GPU of the trainer's first rank."""
    model = make_architecture("llama").requires_grad_(not frozen)
    sent = list(iter_server_parameters(model))
    assert all(tensor.live_weight for _, tensor in sent)
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for _, tensor in sent} == addresses
    evidence = compare_checksums(held_by(sent), sent, torch.bfloat16, fingerprints=True)
    assert evidence is not None and len(evidence.matched) == len(sent)
    kept = sum(tensor.dtype == torch.float32 for tensor in to_host)
    monkeypatch.setattr(parameters, "_is_sharded", lambda tensor: True)
    monkeypatch.setattr(parameters, "_full", lambda tensor: tensor.clone())  # as if it had been gathered
    to_host.clear()
    gathered = list(iter_server_parameters(model))
    assert not any(getattr(tensor, "live_weight", False) for _, tensor in gathered)
    compare_checksums(held_by(sent), gathered, torch.bfloat16, fingerprints=True)
    assert sum(tensor.dtype == torch.float32 for tensor in to_host) == kept + len(sent)


def test_merged_adapters_and_converted_experts_are_copies():
    moe = make_architecture("qwen3_moe")
    sent = dict(iter_server_parameters(moe))
    assert not any(getattr(tensor, "live_weight", False) for name, tensor in sent.items() if ".experts." in name)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = dict(iter_server_parameters(peft.get_peft_model(make_architecture("llama"), config)))
    live = {name for name, tensor in adapted.items() if getattr(tensor, "live_weight", False)}
    assert live == {name for name in adapted if "q_proj" not in name}


def test_a_gpu_without_room_leaves_it_to_the_host(monkeypatch, caplog):
    sent = [("a.weight", torch.ones(4, 4))]
    original, full = module.fingerprint, []

    def no_room(tensor):
        if not full:
            full.append(tensor)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(tensor)

    monkeypatch.setattr("asyncgrpo_core.sync.checksums.fingerprint", no_room)
    evidence = compare_checksums(held_by(sent), sent, torch.bfloat16, fingerprints=True)
    assert evidence is not None and evidence.equal and "no room" in caplog.text
