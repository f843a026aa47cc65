"""What a launcher says does not wait for whoever reads it."""

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
    """A reader that does nothing by itself, and a writer."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_words_are_kept_while_nobody_reads_and_come_out_in_their_order(pipe: tuple[int, int]) -> None:
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


def test_of_more_than_is_kept_the_oldest_is_left_out_and_that_is_told(
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


def test_at_the_end_a_slow_reader_gets_all_and_one_that_never_reads_is_left_after_a_signal(
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


def test_a_reader_that_is_gone_is_told_of_once() -> None:
    out, (reader, writer) = Outlet(), os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        out.write(writer, b"hello\n")
    assert out.pass_on()
    os.close(writer)


def test_a_reader_that_goes_before_the_end_does_not_change_how_it_ends() -> None:
    out, (reader, writer) = Outlet(), os.pipe()
    out.write(writer, b"." * 100_000)
    os.close(reader)
    out.finish()
    assert out.pass_on()
    os.close(writer)


def test_words_for_a_full_disk_are_kept_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `recover run > log`: the launcher goes on, and at the end it does not wait for ever."""
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


def test_saying_something_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        say("nobody hears this")


def test_what_is_said_goes_to_the_stderr_of_this_moment(capsys: pytest.CaptureFixture[str]) -> None:
    say("rank 3 was lost – too")
    print("after it", file=sys.stderr)
    assert capsys.readouterr().err == "recover: rank 3 was lost – too\nafter it\n"
