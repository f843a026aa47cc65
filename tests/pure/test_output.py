"""The launcher never waits for the reader of its output."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover.job import output
from recover.job.output import Outlet, say


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe: its reading end, which no thread reads, and its writing end."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A job whose output is not read survives deaths and loses output only beyond 4 MiB, the oldest first.",
)
def test_output_queue_keeps_unread_output_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    out, said, heard = Outlet(), [b"%d " % number * 50 + b"\n" for number in range(2000)], b""
    for line in said:
        out.write(writer, line)
    assert not out.pass_on()
    while len(heard) < len(b"".join(said)):
        heard += os.read(reader, 1 << 16)
        out.pass_on()
    assert heard == b"".join(said)
    assert out.pass_on()


def test_output_queue_drops_the_oldest_output_and_reports_it(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST", 1000)
    reader, writer = pipe
    out, filler = Outlet(), b"." * (1 << 16)
    os.write(writer, filler)
    for number in range(100):
        out.write(writer, b"%099d\n" % number)
    os.read(reader, 1 << 16)
    assert out.pass_on()
    first, *lines = os.read(reader, 1 << 16).decode().splitlines()
    assert first == "[9000 unread bytes were dropped]"
    assert list(map(int, lines)) == list(range(90, 100))


def test_output_queue_drains_to_a_slow_reader_at_the_end(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    out, heard = Outlet(), []
    out.write(writer, b"." * 100_000)

    def read_slowly() -> None:
        while sum(map(len, heard)) < 100_000:
            heard.append(os.read(reader, 10_000))

    slow = threading.Timer(0.2, read_slowly)
    slow.start()
    out.finish()
    slow.join()
    out.write(writer, b"." * 100_000)
    out.patience = 0.1
    out.finish()
    assert not out.pass_on()


def test_output_queue_reports_a_closed_reader_once() -> None:
    out, (reader, writer) = Outlet(), os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        out.write(writer, b"hello\n")
    assert out.pass_on()
    os.close(writer)


def test_output_queue_ends_normally_after_its_reader_closed() -> None:
    out, (reader, writer) = Outlet(), os.pipe()
    out.write(writer, b"." * 100_000)
    os.close(reader)
    out.finish()
    assert out.pass_on()
    os.close(writer)


def test_output_queue_keeps_output_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `recover run > log` the launcher goes on, and at the end it does not wait for ever."""
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    out, write, room = Outlet(), os.write, [3]

    def short(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = write(descriptor, data[: room[0]])
        room[0] -= size
        return size

    monkeypatch.setattr(os, "write", short)
    for number in range(5):
        out.write(file, b"line %d\n" % number)
    assert not out.pass_on()
    monkeypatch.setattr(output, "_FOR_ROOM", 0.05)
    out.finish()
    room[0] = 1 << 20
    assert out.pass_on()
    os.close(file)
    assert (tmp_path / "log").read_text().splitlines() == [f"line {number}" for number in range(5)]


def test_log_output_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        say("nobody hears this")


def test_log_output_goes_to_the_current_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("rank 3 was lost – too")
    print("after it", file=sys.stderr)
    assert capsys.readouterr().err == "recover: rank 3 was lost – too\nafter it\n"
