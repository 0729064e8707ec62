"""The guard against real processes: whoever is killed, nothing is left in a bounded time.

The tree under test is the hard case: a child whose own child has a session of its own and ignores SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncgrpo_core.errors import AsyncGRPOError
from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.guard import start_guarded, sweep_stale
from asyncgrpo_core.guard.process_table import ProcessId
from asyncgrpo_core.guard.records import GuardRecord, read_record, record_path

DEADLINE_S = 30.0  # generous for a loaded machine; the waits end as soon as they can

TREE = """
setsid sh -c 'trap "" TERM INT HUP; echo $$ > "$1/grandchild.tmp"; mv "$1/grandchild.tmp" "$1/grandchild";
              exec sleep 1000' sh "$1" &
{child}
"""

OWNER = """
import json, os, signal, sys, time
from pathlib import Path
from asyncgrpo_core.guard import start_guarded
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in a shell's background ignores it
spec = json.loads(sys.argv[1])
process = start_guarded(spec["argv"], name="tree", run_dir=Path(spec["run_dir"]),
                        log_path=Path(spec["run_dir"]) / "logs" / "tree.log", grace_s=0.5,
                        on_owner_death=spec.get("hook"))
if spec.get("fork") and os.fork() == 0:
    Path(spec["run_dir"], "fork").write_text(str(os.getpid()))
    time.sleep(1000)
done = Path(spec["run_dir"], "guard")
done.with_suffix(".tmp").write_text(str(process.guard_pid))
os.replace(done.with_suffix(".tmp"), done)
if spec.get("leave"):
    sys.exit(0)
time.sleep(1000)
"""


def tree_argv(folder: Path, child: str = "exec sleep 1000") -> list[str]:
    return ["sh", "-c", TREE.format(child=child), "sh", str(folder)]


def wait_for(condition, what: str):
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)
    return value


def read_pid(path: Path) -> ProcessId:
    """The process whose id appears in a file."""
    text = wait_for(lambda: path.exists() and path.read_text().strip(), f"{path.name} to be written")
    process = table.identify(int(text))
    assert process is not None, f"{path.name} {text} has ended already"
    return process


def assert_gone(*processes: ProcessId) -> None:
    wait_for(lambda: not any(table.is_running(p) for p in processes), f"the end of {processes}")


@pytest.fixture
def run_dir(tmp_path):
    """A run folder; whatever a failing test leaves behind is killed."""
    yield tmp_path
    left = table.marked(table.RUN_MARK, str(tmp_path.resolve()))
    table.kill_all(left)
    assert not left, "the test left processes behind"


@pytest.fixture
def start_tree(run_dir):
    """Start the tree in this process; stopped at the end."""
    started = []

    def start(child: str = "exec sleep 1000", **kwargs):
        kwargs.setdefault("grace_s", 0.5)
        process = start_guarded(
            tree_argv(run_dir, child), name="tree", run_dir=run_dir, log_path=run_dir / "logs" / "tree.log", **kwargs
        )
        started.append(process)
        return process, read_pid(run_dir / "grandchild")

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def start_owner(run_dir):
    """Start the tree in another process that owns it; returns owner, guard, child, grandchild."""
    owners, below = [], []

    def start(**spec):
        spec = {"run_dir": str(run_dir), "argv": tree_argv(run_dir), **spec}
        owner = subprocess.Popen([sys.executable, "-c", OWNER, json.dumps(spec)])
        owners.append(owner)
        guard = read_pid(run_dir / "guard")
        record = read_record(record_path(run_dir, "tree"))
        assert record is not None and record.child is not None
        below.extend([guard, record.child, read_pid(run_dir / "grandchild")])
        return owner, *below

    yield start
    for owner in owners:
        owner.kill()
        owner.wait()
    assert_gone(*below)


# -- the owner stops it


def test_stop_ends_the_whole_tree_and_is_idempotent(run_dir, start_tree):
    process, grandchild = start_tree()
    child = table.identify(process.pid)
    assert process.poll() is None
    assert process.stop() == -signal.SIGTERM
    assert not table.is_running(child) and not table.is_running(grandchild)
    assert process.stop() == -signal.SIGTERM
    assert process.poll() == -signal.SIGTERM
    assert list((run_dir / "guards").iterdir()) == []


def test_a_child_that_ignores_term_is_killed_after_its_grace(start_tree):
    process, grandchild = start_tree('trap "" TERM; exec sleep 1000', grace_s=0.2)
    start = time.monotonic()
    assert process.stop() == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - start < DEADLINE_S
    assert not table.is_running(grandchild)


def test_the_grace_lets_a_child_end_by_itself(start_tree):
    process, grandchild = start_tree('trap "exit 7" TERM; while :; do sleep 0.05; done', grace_s=DEADLINE_S)
    assert process.stop() == 7
    assert not table.is_running(grandchild)


# -- the child ends


def test_exit_code_and_log_are_reported_and_leftovers_ended(run_dir, start_tree):
    process, grandchild = start_tree("while [ ! -e $1/grandchild ]; do sleep 0.01; done; echo one; echo two; exit 3")
    assert process.wait(DEADLINE_S) == 3
    assert not table.is_running(grandchild)
    assert process.log_tail(1) == ["two"]
    assert not record_path(run_dir, "tree").exists()


def test_a_killed_child_is_reported_and_its_children_ended(start_tree):
    process, grandchild = start_tree()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not table.is_running(grandchild)


def test_wait_gives_up_at_its_deadline(start_tree):
    process, _ = start_tree()
    assert process.wait(0.05) is None


# -- the owner dies


def test_owner_killed(run_dir, start_owner):
    owner, *rest = start_owner()
    owner.kill()
    assert_gone(*rest)
    assert not record_path(run_dir, "tree").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_owner_ended_by_a_signal(start_owner, number):
    owner, *rest = start_owner()
    owner.send_signal(number)
    assert_gone(*rest)


def test_owner_that_just_returns(run_dir, start_owner):
    owner, guard, *_ = start_owner(leave=True)
    owner.wait(timeout=DEADLINE_S)
    assert_gone(guard)
    assert table.marked(table.RUN_MARK, str(run_dir.resolve())) == []


def test_owner_killed_while_a_forked_child_holds_its_pipe(run_dir, start_owner):
    """The pipe never closes then; the changed parent tells the guard."""
    owner, *rest = start_owner(fork=True)
    forked = read_pid(run_dir / "fork")
    owner.kill()
    assert_gone(*rest)
    assert table.is_running(forked), "the test needs the fork to outlive the guard"
    table.kill_all([forked])


def test_last_will_runs_when_the_owner_died_after_everything_has_ended(run_dir, start_owner):
    note = run_dir / "will"
    script = f"kill -0 $(cat {run_dir}/grandchild) 2>/dev/null && echo alive > {note} || echo gone > {note}"
    owner, guard, *_ = start_owner(hook=["sh", "-c", script])
    owner.kill()
    assert_gone(guard)
    assert note.read_text() == "gone\n"


def test_last_will_does_not_run_on_stop(run_dir, start_tree):
    process, _ = start_tree(on_owner_death=["touch", str(run_dir / "will")])
    process.stop()
    assert not (run_dir / "will").exists()


# -- the guard dies


def test_guard_killed_takes_the_child_along_and_poll_sweeps_the_rest(run_dir, start_tree):
    process, grandchild = start_tree()
    child = table.identify(process.pid)
    os.kill(process.guard_pid, signal.SIGKILL)
    assert_gone(child)
    wait_for(lambda: process.poll() is not None, "poll to see the end")
    assert process.poll() == -signal.SIGKILL
    assert not table.is_running(grandchild)
    assert not record_path(run_dir, "tree").exists()
    assert process.stop() == -signal.SIGKILL


def test_guard_ignores_polite_signals(start_tree):
    process, grandchild = start_tree()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(process.guard_pid, number)
    time.sleep(0.6)  # two of its watch intervals
    assert process.poll() is None and table.is_running(grandchild)


def test_guard_and_owner_killed_then_swept(run_dir, start_owner):
    owner, guard, child, grandchild = start_owner()
    os.kill(guard.pid, signal.SIGSTOP)  # it must not act on the owner's end before it dies itself
    owner.kill()
    owner.wait()
    os.kill(guard.pid, signal.SIGKILL)
    assert_gone(guard, child)
    assert table.is_running(grandchild), "this is the case that only a sweep can clean up"
    assert sweep_stale(run_dir) == [grandchild.pid]
    assert not table.is_running(grandchild)
    assert sweep_stale(run_dir) == []


def test_sweep_finds_a_process_that_lost_its_mark_by_the_recorded_list(run_dir, start_owner):
    argv = tree_argv(run_dir)
    argv[2] = argv[2].replace("setsid sh", f"env -u {table.GUARD_MARK} setsid sh")
    owner, guard, child, grandchild = start_owner(argv=argv)
    record = record_path(run_dir, "tree")
    wait_for(lambda: list(grandchild) in json.loads(record.read_text())["descendants"], "the list of descendants")
    os.kill(guard.pid, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    os.kill(guard.pid, signal.SIGKILL)
    assert_gone(guard, child)
    assert grandchild not in table.marked(table.GUARD_MARK, read_record(record).guard_id)
    assert sweep_stale(run_dir) == [grandchild.pid]


# -- sweeping what is not ours


def dead_record(run_dir: Path, **changes) -> GuardRecord:
    gone = ProcessId(2**22 - 1, 1)  # above the kernel's pid limit by default: nobody's
    values = {
        "name": "old",
        "guard_id": "f" * 32,
        "run_dir": str(run_dir),
        "boot_id": table.boot_id(),
        "grace_s": 1.0,
        "log": "",
        "owner": gone,
        "guard": gone,
        "state": "running",
        "child": gone,
        **changes,
    }
    return GuardRecord(**values)


@pytest.fixture
def bystander():
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_sweep_leaves_a_live_run_alone(run_dir, start_owner):
    _, *rest = start_owner()
    assert sweep_stale(run_dir) == []
    assert all(table.is_running(p) for p in rest)


def test_sweep_compares_start_times(run_dir, bystander):
    """A pid of the list was given to another process meanwhile: that one lives on."""
    named = table.identify(bystander.pid)
    recycled = ProcessId(named.pid, named.start_ticks - 1)
    record = dead_record(run_dir, descendants=[recycled], guard=recycled, child=recycled)
    record.write()
    assert sweep_stale(run_dir) == []
    assert bystander.poll() is None
    assert not record.path.exists()
    # The same record with the right start time is killed, so the comparison is what saved it.
    dead_record(run_dir, descendants=[named]).write()
    assert sweep_stale(run_dir) == [named.pid]


def test_sweep_ignores_a_record_of_another_boot(run_dir, bystander):
    record = dead_record(run_dir, boot_id="another", descendants=[table.identify(bystander.pid)])
    record.write()
    assert sweep_stale(run_dir) == []
    assert bystander.poll() is None
    assert not record.path.exists()


def test_sweep_names_a_broken_record(run_dir):
    path = record_path(run_dir, "old")
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(AsyncGRPOError, match=r"old\.json"):
        sweep_stale(run_dir)


def test_record_round_trip(run_dir):
    record = dead_record(run_dir, descendants=[ProcessId(1, 2), ProcessId(3, 4)])
    record.write()
    again = read_record(record.path)
    assert asdict(again) == asdict(record)
    assert isinstance(again.descendants[0], ProcessId) and isinstance(again.guard, ProcessId)


# -- starting


def test_a_program_that_does_not_exist_is_named(run_dir):
    with pytest.raises(AsyncGRPOError, match="No such file or directory: /no/such/program"):
        start_guarded(["/no/such/program"], name="x", run_dir=run_dir, log_path=run_dir / "x.log")
    assert not record_path(run_dir, "x").exists()


def test_a_second_one_of_the_same_name_is_refused(run_dir, start_tree):
    process, _ = start_tree()
    with pytest.raises(AsyncGRPOError, match=f"'tree' already runs in .*{process.guard_pid}"):
        start_guarded(["true"], name="tree", run_dir=run_dir, log_path=run_dir / "x.log")


def test_the_name_is_free_again_after_the_child_ended(run_dir):
    for code in ("1", "2"):
        process = start_guarded(["sh", "-c", f"exit {code}"], name="x", run_dir=run_dir, log_path=run_dir / "x.log")
        wait_for(lambda: process.poll() is not None, "the child's end")  # noqa: B023
        assert process.poll() == int(code)
    process.stop()


def test_the_child_has_default_signals_the_given_environment_and_our_marks(run_dir):
    program = (
        "import os, signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.getsid(0) == os.getpid(), "
        "os.environ.get('HELLO'), os.environ['ASYNCGRPO_RUN'])"
    )
    log = run_dir / "logs" / "x.log"
    process = start_guarded(
        [sys.executable, "-c", program], name="x", run_dir=run_dir, log_path=log, env={"HELLO": "you"}
    )
    assert process.wait(DEADLINE_S) == 0
    assert log.read_text() == f"True True True you {run_dir.resolve()}\n"
    process.stop()
