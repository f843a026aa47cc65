"""Records, logs and markers on a disk that fails: nothing raises, and nothing is lost if there is room later."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover.checkpoint import saver as saving
from recover.checkpoint.directory import FACTS, CheckpointError
from recover.checkpoint.saver import Saver
from recover.checkpoint.tensors import Tensors, Written
from recover.job import record_files as files_module
from recover.job.record_files import Disk, RecordFiles, is_transient
from recover.job.spec import JobSpec
from recover.launch import output_relay as relays
from recover.launch import verdict as verdicts
from recover.launch.hosts import hang_detection, run_directory
from recover.launch.hosts.placement import Seat
from recover.launch.verdict import Verdict, find_marker, write_marker
from recover.runs.records import job_log, json_lines
from recover.runs.records.job_log import JobLog, job_lines
from recover.runs.records.json_lines import LineFile, read_lines
from recover.runs.writing import journal as journals
from recover.runs.writing.journal import Journal
from recover.runs.writing.run_records import write_json
from recover.world import rank_exit, slot_notes
from recover.world.liveness.signs import Sign
from recover.world.slot_notes import RunNotes

OPERATIONS = ("append", "replace", "read", "read_end", "truncate", "remove", "modified", "open_to_append")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT)
USERS = (
    run_directory,
    journals,
    relays,
    verdicts,
    job_log,
    json_lines,
    rank_exit,
    slot_notes,
    hang_detection,
)


class FailingDisk(Disk):
    """A disk that fails in the operations in `fails`, for as long as they are in it."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.failed = 0

    def _try(self, operation: str, path: Path) -> None:
        if operation in self.fails and "session" not in path.parts:  # the session lies in memory
            self.failed += 1
            raise OSError(self.fails[operation], os.strerror(self.fails[operation]), str(path))


def _failing(operation: str) -> Callable[..., Any]:
    def act(self: FailingDisk, path: Path, *arguments: Any) -> Any:
        self._try(operation, path)
        return getattr(Disk, operation)(self, path, *arguments)

    return act


for _operation in OPERATIONS:
    setattr(FailingDisk, _operation, _failing(_operation))


@pytest.fixture
def disk() -> FailingDisk:
    return FailingDisk()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def files(
    disk: FailingDisk, told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[RecordFiles]:
    """Replaces the `RecordFiles` of this process in all modules that write records; this process is rank 0 of a
    job."""
    made = RecordFiles(disk, told.append)
    monkeypatch.setattr(files_module, "AGAIN", 0.001)
    for module in (*USERS, __import__("recover.runs.writing.run_records", fromlist=["FILES"])):
        monkeypatch.setattr(module, "FILES", made)
    job = JobSpec(2, run_dir=str(tmp_path), session=str(tmp_path / "session"))
    (tmp_path / "session").mkdir()
    monkeypatch.setattr(rank_exit, "current_job", lambda: job)
    monkeypatch.setattr(rank_exit.process, "rank", lambda: 0)
    monkeypatch.setattr(rank_exit, "report", lambda text: told.append(text))
    yield made
    rank_exit._in_place.cache_clear()


def a_line(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "loss": 1.5}


def everything(run_dir: Path, step: int) -> None:
    """Write and read each kind of file of agents, launchers and ranks once."""
    for journal in _journals(run_dir):
        journal.commit(a_line(step), [a_line(step)])  # type: ignore[arg-type, list-item]
    JobLog(run_dir).write({"what": "exit", "at": float(step)})
    write_marker(run_dir, 1, {"end": "fenced", "detail": f"in step {step}", "time": ""})
    assert rank_exit.record("excluded", f"in step {step}", 3), "the launcher would not find it"
    rank_exit.log(f"step {step}")
    seats = {rank: Seat("h1", rank) for rank in range(step)}
    run_directory.write_placement(run_dir, "j", {"h1": {"address": "a"}}, seats, later=step > 1)
    RunNotes(str(run_dir), 0).leave(step, [(1, 1)], "it hung")
    list(RunNotes(str(run_dir), 0).read(step))
    relays._Source(1, b"0", run_dir / "ranks" / "0.out")
    assert find_marker(run_dir, run_dir / "session", 4) == ""
    assert Verdict(run_dir, [0, 1, 4]).left[4].end is None
    journals.FILES.modified(run_dir / "ranks")
    journals.FILES.remove(run_dir / "ranks" / "5.end")


_made: dict[Path, list[Journal]] = {}


def _journals(run_dir: Path) -> list[Journal]:
    """The journals of the rank that writes, and of a rank that only keeps the lines."""
    return _made.setdefault(run_dir, [Journal(run_dir, a_world(rank)) for rank in (0, 1)])


def a_world(rank: int, *members: int) -> Any:
    return SimpleNamespace(job=JobSpec(2), rank=rank, members=members or (0, 1))


@pytest.mark.guarantee(
    "The launcher",
    "A failing file operation on a record, log, marker or placement file raises nothing, is reported once "
    "and repeated until it succeeds.",
)
@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("operation", [*OPERATIONS, "all of them"])
def test_failing_file_operation_raises_nothing_and_loses_no_record(
    files: RecordFiles, disk: FailingDisk, told: list[str], tmp_path: Path, operation: str, number: int
) -> None:
    everything(tmp_path, 1)
    disk.fails = dict.fromkeys(OPERATIONS if operation == "all of them" else [operation], number)
    for step in (2, 3):
        everything(tmp_path, step)
    assert disk.failed or operation in ("read_end", "truncate"), "nothing has failed"
    disk.fails.clear()
    everything(tmp_path, 4)
    assert files.flush()
    assert files.waiting == []
    for name in ("steps.jsonl", "incidents.jsonl"):
        assert [line["step"] for line in read_lines(tmp_path / name)] == [1, 2, 3, 4]
    assert [line["at"] for line in job_lines(tmp_path)] == [1.0, 2.0, 3.0, 4.0]
    assert (tmp_path / "ranks" / "0.log").read_text().count("step ") == 4
    assert json.loads((tmp_path / "ranks" / "1.end").read_text())["detail"] == "in step 4"
    placement = json.loads((tmp_path / "hosts.json").read_text())
    assert list(placement["ranks"]) == ["0", "1", "2", "3"]
    assert sum("kept in memory" in text and "records" in text for text in told) <= 1, "it is said once"


@pytest.mark.guarantee(
    "The launcher",
    "A failing file operation on a record, log, marker or placement file raises nothing, is reported once "
    "and repeated until it succeeds.",
)
@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_pending_markers_are_readable_by_their_writer(
    files: RecordFiles, disk: FailingDisk, tmp_path: Path, number: int
) -> None:
    disk.fails = {"replace": number}
    write_marker(tmp_path, 1, {"end": "fenced", "detail": "stopped", "time": ""})
    assert Verdict(tmp_path, [1]).lost == {1: "fenced: stopped"}
    disk.fails.clear()
    # A marker that a rank has left in memory, because the disk had no room.
    words = rank_exit.session_marker(tmp_path / "session", 0)
    words.write_text('{"end": "done", "detail": ""}')
    disk.fails = {"replace": number}
    assert "done" in find_marker(tmp_path, tmp_path / "session", 0)
    assert Verdict(tmp_path, [0]).done == [0]
    disk.fails.clear()
    assert files.settle()
    assert json.loads((tmp_path / "ranks" / "0.end").read_text())["end"] == "done"


def test_file_lines_are_whole_and_in_order_after_partial_writes(files: RecordFiles, tmp_path: Path) -> None:
    path, kept = tmp_path / "lines", os.write
    taken = [10]

    def short(file: int, data: bytes) -> int:
        if not taken[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = min(taken[0], len(data))
        taken[0] -= size
        return kept(file, data[:size])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", short)
        for number in range(5):
            files.append(path, b"line %d\n" % number)
            assert path.read_bytes() in (b"", b"line 0\n"), "half a line was left"
        assert len(files.waiting) == 1
    assert files.append(path, b"last\n")
    assert path.read_text().splitlines() == [*(f"line {number}" for number in range(5)), "last"]


def test_failing_file_does_not_delay_other_files(
    files: RecordFiles, disk: FailingDisk, tmp_path: Path
) -> None:
    disk.fails = dict.fromkeys(["append", "replace"], errno.EACCES)
    for name in ("a", "b"):
        files.append(tmp_path / name / "log", b"x\n")
        files.replace(tmp_path / name / "marker", b"y")
    disk.fails.clear()
    (tmp_path / "a").touch()  # a file in place of the directory
    assert not files.flush()
    assert (tmp_path / "b" / "log").read_bytes() + (tmp_path / "b" / "marker").read_bytes() == b"x\ny"
    assert {path.parent.name for path in files.waiting} == {"a"}


def test_moved_directory_is_created_again(files: RecordFiles, tmp_path: Path) -> None:
    write_marker(tmp_path, 0, {"end": "fenced", "detail": "x"})
    (tmp_path / "ranks").rename(tmp_path / "elsewhere")
    assert files.modified(tmp_path / "ranks") == 0
    write_marker(tmp_path, 1, {"end": "fenced", "detail": "y"})
    assert Verdict(tmp_path, [1]).lost == {1: "fenced: y"}
    assert (tmp_path / "ranks" / "1.end").exists()


@pytest.mark.guarantee(
    "The launcher",
    "A run that ends on a full disk waits for space, its last checkpoint without limit, and names what was "
    "lost.",
)
def test_last_checkpoint_waits_for_disk_space(
    files: RecordFiles, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows that could be saved instead: the checkpoint waits without limit, and a message says where room
    is missing."""
    monkeypatch.setattr(saving, "FILES", files)
    files.patience = 0.0  # records have waited in vain
    saver, tries = Saver(tmp_path, 1, 1, 0), []

    class Room(Tensors):
        def __init__(self) -> None:
            pass

        def snapshot(self, *_: Any) -> Any:
            return SimpleNamespace(nbytes=12_500_000)

        def write(self, *_: Any) -> Written:
            tries.append(1)
            if len(tries) % 4:
                raise CheckpointError("SafetensorError: No space left on device (os error 28)")
            (tmp_path / "checkpoints" / "draft-7").mkdir(parents=True, exist_ok=True)
            return Written({}, [])

    saver.save(7, Room(), {})
    saver.finish()
    assert len(tries) == 1, "one in the middle of a run waits for nobody"
    assert "the checkpoint of step 7 could not be written" in told[-1]
    tries.clear()
    saver.save(7, Room(), {}, waits=True)
    saver.finish()
    assert len(tries) == 4
    assert (tmp_path / "checkpoints" / "draft-7" / FACTS).exists()
    assert len(told) == 2, "it says so once"
    assert "it takes 12.5 MB" in told[-1]
    assert f"{tmp_path / 'checkpoints'} has" in told[-1]
    assert "give up by Ctrl-C twice" in told[-1]


def test_oldest_of_too_many_lines_are_dropped_and_reported(
    files: RecordFiles, disk: FailingDisk, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MOST", 50)
    disk.fails = {"append": errno.ENOSPC}
    for number in range(20):
        files.append(tmp_path / "log", b"%09d\n" % number)
    disk.fails.clear()
    assert not files.settle()
    assert [int(text) for text in (tmp_path / "log").read_text().split()] == list(range(15, 20))
    assert "(15 earlier lines)" in told[-1]


@pytest.mark.guarantee(
    "The launcher",
    "A run that ends on a full disk waits for space, its last checkpoint without limit, and names what was "
    "lost.",
)
def test_end_of_a_run_waits_for_the_disk_and_reports_losses(
    files: RecordFiles, disk: FailingDisk, told: list[str], tmp_path: Path
) -> None:
    disk.fails = {"append": errno.EIO, "replace": errno.EIO}
    waited: list[int] = []

    def wait() -> None:
        waited.append(1)
        assert len(waited) < 100, "it waits for ever"
        if len(waited) == 5:
            disk.fails.clear()

    files.while_waiting = wait
    files.append(tmp_path / "log", b"line\n")
    files.replace(tmp_path / "marker", b"done")
    told.clear()
    assert files.settle()
    assert len(told) == 1
    assert "waiting up to 300 s" in told[0]
    assert (tmp_path / "log").read_bytes() + (tmp_path / "marker").read_bytes() == b"line\ndone"
    # Patience has an end, and it is one limit for all files of a process together.
    disk.fails = {"append": errno.EIO}
    files.append(tmp_path / "log", b"second\n")
    files.patience = 0.003
    assert not files.settle()
    assert told[-1].endswith(f"{tmp_path / 'log'} (1 lines)")
    disk.fails = {"replace": errno.EIO}
    assert not write_json(tmp_path / "summary.json", {})
    files.patience = 300.0
    disk.fails = {"append": errno.EISDIR}
    assert not files.settle(), "nobody waits for what no time will change"
    assert files.patience == 300.0


def test_transient_errors_are_recognised_in_any_wording() -> None:
    assert all(is_transient(OSError(number, "x")) for number in ERRORS)
    assert is_transient(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert is_transient(ValueError("OSError: [Errno 5] Input/output error"))
    assert not is_transient(OSError(errno.EISDIR, "x"))
    assert not is_transient(ValueError("shape (28)"))


@pytest.mark.guarantee(
    "The launcher",
    "A run that ends on a full disk waits for space, its last checkpoint without limit, and names what was "
    "lost.",
)
def test_steps_of_a_full_disk_are_written_at_the_end_of_the_run(
    files: RecordFiles, disk: FailingDisk, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are more steps than a rank keeps of written ones; a successor has them, too."""
    monkeypatch.setattr(json_lines, "KEPT", 70)
    writer, heir = Journal(tmp_path, a_world(0)), Journal(tmp_path, a_world(1))
    many = 3 * json_lines.KEPT
    for step in range(1, many + 1):
        if step == 12:
            disk.fails = dict.fromkeys(["append", "replace"], errno.ENOSPC)
        for journal in (writer, heir):
            journal.commit(a_line(step), [])  # type: ignore[arg-type]
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == list(range(1, 12))
    files.while_waiting = disk.fails.clear
    heir._world = a_world(1, 1)  # the writer dies while it writes its last lines
    heir.finish()
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == list(range(1, many + 1))
    assert sum("waiting up to" in text for text in told) == 1


def test_lines_lost_at_the_end_are_counted_in_the_report(
    files: RecordFiles, disk: FailingDisk, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, a_world(0))
    journal.commit(a_line(1), [])  # type: ignore[arg-type]
    disk.fails = {"append": errno.ENOSPC}
    monkeypatch.setattr(json_lines, "MOST", 5)
    for step in range(2, 11):
        journal.commit(a_line(step), [])  # type: ignore[arg-type]
    files.patience = 0.0
    journal.finish()
    assert f"lost: 9 lines of {tmp_path / 'steps.jsonl'}" in told[-1]
    assert [line["step"] for line in journal.steps.all()] == [1, *range(6, 11)]


def test_written_lines_are_released_and_pending_ones_kept(
    files: RecordFiles, disk: FailingDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "KEPT", 10)
    writer: LineFile[Any] = LineFile(tmp_path / "steps.jsonl", "step")
    other: LineFile[Any] = LineFile(tmp_path / "steps.jsonl", "step")
    for step in range(1, 101):
        for one in (writer, other):
            one.kept.append(a_line(step))
        writer.write()
        other.leave_to_another()
    assert len(writer.kept) == 10
    assert len(other.kept) < 20
    disk.fails = {"append": errno.ENOSPC}
    for step in range(101, 201):
        for one in (writer, other):
            one.kept.append(a_line(step))
        with pytest.raises(OSError, match="No space"):
            writer.write()
        other.leave_to_another()
    assert [line["step"] for line in other.kept][-100:] == list(range(101, 201))


@pytest.mark.guarantee("The launcher", "A hung rank is killed before anything is written about it.")
def test_fencing_kills_although_the_marker_cannot_be_written(
    files: RecordFiles, disk: FailingDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks wait for the one that hangs: it is killed before any operation that a disk may delay."""
    disk.fails = dict.fromkeys(OPERATIONS, errno.ENOSPC)
    done: list[str] = []
    flush = files.flush

    def slow() -> bool:
        done.append("disk")
        return flush()

    files.flush = slow  # type: ignore[method-assign]
    sign = Sign(heartbeat=1, progress=(1,), late=True, stopped=True, step=3, suspects=((1, 5),))
    pulse: Any = SimpleNamespace(look=lambda now: {1: ("it was stopped", sign)}, notes=None)
    board: Any = SimpleNamespace(kill=lambda rank: done.append(f"killed {rank}"))
    hang_detection.fence(pulse, board, tmp_path)
    assert done == ["killed 1", "disk"]
    assert "fenced" in find_marker(tmp_path, tmp_path, 1), "who reaps it finds how it ended"
    assert "killed rank 1" in capsys.readouterr().err


def test_forked_process_inherits_no_held_lock(files: RecordFiles, tmp_path: Path) -> None:
    held, through = threading.Event(), threading.Event()

    def hold() -> None:
        with files._lock:
            held.set()
            through.wait(30)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(30)
    files._begin()  # the call that follows a fork
    assert files.append(tmp_path / "log", b"x\n")
    through.set()
    thread.join(30)


def test_last_checkpoint_gives_up_on_errors_other_than_a_full_disk(
    files: RecordFiles, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that has become read-only may stay so, and the job would hold its GPUs without end."""
    monkeypatch.setattr(saving, "FILES", files)
    saver, tries = Saver(tmp_path, 1, 1, 0), []

    class ReadOnly(Tensors):
        def __init__(self) -> None:
            pass

        def snapshot(self, *_: Any) -> Any:
            return SimpleNamespace(nbytes=1)

        def write(self, *_: Any) -> Written:
            tries.append(1)
            raise OSError(errno.EROFS, "Read-only file system")

    saver.save(7, ReadOnly(), {}, waits=True)
    saver.finish()
    assert len(tries) == saving.ATTEMPTS
    assert "the checkpoint of step 7 could not be written" in told[-1]
