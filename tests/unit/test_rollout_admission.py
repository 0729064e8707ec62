"""Token allowance and gate."""

from __future__ import annotations

import asyncio

import pytest

from asyncgrpo_core.rollout.admission import RolloutGate, TokenAdmission


def test_one_group_at_a_time_until_the_first_finishes() -> None:
    """F109."""
    admission = TokenAdmission(1000)
    assert admission.may_start()
    admission.group_started()
    assert not admission.may_start()
    admission.group_generated(100)
    assert admission.may_start()


def test_groups_start_while_produced_plus_expected_is_below_the_allowance() -> None:
    """F107: groups of 100 tokens under an allowance of 1000: ten, whether queued or in progress."""
    admission = TokenAdmission(1000)
    started = 0
    while admission.may_start():
        admission.group_started()
        started += 1
        if started == 1:
            admission.group_generated(100)
    assert started == 10
    for _ in range(4):  # four reach the buffer: still ten in all
        admission.group_generated(100)
        admission.group_ended(100)
    assert not admission.may_start()
    admission.allowance += 100  # the trainer used one up
    assert admission.may_start()


def test_dropped_groups_give_their_room_back() -> None:
    admission = TokenAdmission(100)
    admission.group_started()
    admission.group_generated(100)
    assert not admission.may_start()
    admission.group_ended(0)
    assert admission.may_start()


def test_the_estimate_follows_the_groups_finished_lately() -> None:
    admission = TokenAdmission(10**9)
    for size in [1000] * 64 + [10] * 64:
        admission.group_started()
        admission.group_generated(size)
        admission.group_ended(0)
    assert admission.group_estimate == 10.0


def test_after_a_failure_one_group_at_a_time_until_one_succeeds() -> None:
    admission = TokenAdmission(10**6)
    admission.group_started()
    admission.group_generated(10)
    admission.group_started()
    admission.group_failed()
    assert not admission.may_start()  # the first is still being scored
    admission.group_ended(10)
    assert admission.may_start()
    admission.group_started()
    assert not admission.may_start()
    admission.group_generated(10)
    assert admission.may_start()


async def test_gate_never_lets_more_than_its_limit_in_and_keeps_order() -> None:
    gate, entered, running, most = RolloutGate(2), [], 0, 0

    async def rollout(number: int) -> None:
        nonlocal running, most
        async with gate:
            entered.append(number)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(rollout(i) for i in range(7)))
    assert most == 2 and entered == list(range(7)) and gate.running == 0


async def test_lowering_the_limit_lets_running_go_on_and_new_wait() -> None:
    """F113."""
    gate = RolloutGate(3)
    for _ in range(3):
        await gate.__aenter__()
    gate.set_limit(1)
    waiter = asyncio.create_task(gate.__aenter__())
    await asyncio.sleep(0)
    await gate.__aexit__()
    await gate.__aexit__()
    await asyncio.sleep(0)
    assert gate.running == 1 and not waiter.done()
    await gate.__aexit__()
    await waiter
    assert gate.running == 1


async def test_cancelled_waiters_leave_no_trace() -> None:
    gate = RolloutGate(1)
    await gate.__aenter__()
    first, second = (asyncio.create_task(gate.__aenter__()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    await gate.__aexit__()
    await second
    third = asyncio.create_task(gate.__aenter__())
    await asyncio.sleep(0)
    await gate.__aexit__()  # gives the place to the third ...
    third.cancel()  # ... which is cancelled before it runs
    await asyncio.gather(third, return_exceptions=True)
    assert gate.running == 0 and gate.has_room


async def test_a_waiter_that_is_cancelled_in_the_turn_of_a_release_is_passed_over() -> None:
    gate = RolloutGate(1)
    await gate.__aenter__()
    cancelled, patient = (asyncio.create_task(gate.__aenter__()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await gate.__aexit__()  # before the cancelled task runs
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await patient
    assert gate.running == 1 and gate.waiting == 0


@pytest.mark.parametrize("allowance", [1, 100])
def test_the_boundary_of_the_allowance_is_exclusive(allowance) -> None:
    """F017, F107, F109: a group starts while produced plus expected is *under* the allowance."""
    admission = TokenAdmission(allowance)
    admission.group_started()
    admission.group_generated(allowance)
    admission.group_ended(allowance)
    assert not admission.may_start()
    admission.allowance += 1
    assert admission.may_start()
    assert not TokenAdmission(0).may_start()
