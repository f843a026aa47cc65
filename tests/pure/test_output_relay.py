"""The output of ranks arrives whole, in order and labelled, in whatever pieces it is read."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recover.launch import output_relay as relay_module
from recover.launch import rank_outputs
from recover.launch.output_relay import Relay

PLAIN = st.text("ab \r\n", max_size=12).map(str.encode)
DRAWN = st.sampled_from(
    [b"\r 10%|#    |", b"\r\x1b[2K\x1b[1A\x1b[2Kbar", b"\x1b[32mgreen\x1b[0m\n", b"\x1b[?25l"]
)


class Ranks:
    """Pipes of three ranks, each with one stream."""

    def __init__(self, monkeypatch: Any = None) -> None:
        ends = [os.pipe() for _ in range(3)]
        self.writes = [write for _, write in ends]
        process: Any = SimpleNamespace(stdout=None, stderr=None)
        self.relay = Relay(process, outputs={read: (rank, 1) for rank, (read, _) in enumerate(ends)})

    def say(self, rank: int, data: bytes) -> None:
        os.write(self.writes[rank], data)
        self.relay.pump(0)

    def end(self) -> None:
        for write in self.writes:
            os.close(write)
        for _ in range(3):
            self.relay.pump(0)


@pytest.mark.guarantee(
    "User code",
    "Output of ranks arrives whole, in order and labelled, and progress bars are redrawn in place.",
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.tuples(st.integers(0, 2), PLAIN | DRAWN), max_size=25),
    patience=st.sampled_from([0.0, 9.0]),
)
def test_relay_prefixes_each_line_with_its_rank_and_loses_nothing(
    said: list[tuple[int, bytes]], patience: float
) -> None:
    out, held = os.memfd_create("out"), (relay_module.PATIENCE, relay_module.OUTLET)
    shown: Any = SimpleNamespace(write=lambda target, data: os.write(out, data), pass_on=lambda: True)
    relay_module.PATIENCE, relay_module.OUTLET = patience, shown
    try:
        ranks = Ranks()
        for rank, data in said:
            if data:
                ranks.say(rank, data)
        ranks.end()
    finally:
        relay_module.PATIENCE, relay_module.OUTLET = held
    text = os.pread(out, 1 << 20, 0)
    os.close(out)
    for rank in range(3):
        mine = b"".join(data for who, data in said if who == rank)
        words = re.sub(rb"\x1b\[[0-?]*[ -/]*[@-~]|[\r\n]", b"|", mine)
        pieces = re.findall(
            rb"\[rank %d\] ([^\[]*)" % rank, re.sub(rb"\x1b\[[0-?]*[ -/]*[@-~]|[\r\n]", b"|", text)
        )
        assert b"".join(pieces).replace(b"|", b"") == words.replace(b"|", b"")
    for piece in re.split(rb"[\r\n]", re.sub(rb"\x1b\[[0-?]*[ -/]*[@-~]", b"", text)):
        assert not piece or re.fullmatch(rb"\[rank \d\] [^\[]+", piece), text


@pytest.mark.guarantee(
    "User code",
    "Output of ranks arrives whole, in order and labelled, and progress bars are redrawn in place.",
)
def test_progress_bar_is_redrawn_until_another_rank_prints(capfd: pytest.CaptureFixture[str]) -> None:
    held, relay_module.PATIENCE = relay_module.PATIENCE, 0.0
    try:
        ranks = Ranks()
        for part in (b"\r 10%", b"\r 20", b"%", b"\r 30%"):
            ranks.say(0, part)
        ranks.say(1, b"hello\n")
        ranks.say(0, b"\r 40%\n")
        ranks.end()
    finally:
        relay_module.PATIENCE = held
    sys.stdout.flush()
    assert capfd.readouterr().out == (
        "\r[rank 0]  10%\r[rank 0]  20%\r[rank 0]  30%\n[rank 1] hello\n\r[rank 0]  40%\n"
    )


def test_ended_process_closes_no_descriptor_of_another() -> None:
    (out, said), (err, told) = os.pipe(), os.pipe()
    process: Any = SimpleNamespace(stdout=open(out, "rb"), stderr=open(err, "rb"))  # noqa: SIM115
    relay = Relay()
    relay.add(process)
    os.close(said)
    os.close(told)
    relay.drain(30.0)
    assert not relay._pipes
    ends = [end for _ in range(4) for end in os.pipe()]  # these get the closed descriptors' numbers
    del process
    gc.collect()
    for end in ends:
        os.close(end)


@pytest.mark.guarantee(
    "Rejoining replicas",
    "Memory, files, threads, keys and step time do not grow over hundreds of deaths and rejoins.",
)
@pytest.mark.parametrize("terminal", [False, True])
def test_relay_closes_the_descriptors_of_a_forgotten_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """This includes a rank that never opened its outputs, and a terminal that does not report that its last writer has
    gone."""
    monkeypatch.setattr(rank_outputs.os, "isatty", lambda stream: terminal)
    monkeypatch.setattr(rank_outputs, "_imitate", lambda *_: None)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    relay = Relay()
    for rank in (7, 8):
        relay._read(rank_outputs.make(tmp_path, [rank]), tmp_path)
    with open(tmp_path / "7.1", "wb", buffering=0) as place:
        place.write(b"last words")
    relay.pump(5.0)  # a terminal delivers output with a delay
    for rank in (7, 8):
        relay.forget(rank_outputs.label(rank))
        rank_outputs.remove(tmp_path, rank)
    relay._selector.close()
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.out", "8.out"]
    assert (tmp_path / "7.out").read_bytes() == b"last words"


def test_relay_hides_internal_messages_of_mpirun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[bytes] = []
    outlet: Any = SimpleNamespace(write=lambda target, data: shown.append(data), pass_on=lambda: True)
    monkeypatch.setattr(relay_module, "OUTLET", outlet)
    (from_mpirun, mpirun), (from_rank, rank) = os.pipe(), os.pipe()
    process: Any = SimpleNamespace(stdout=None, stderr=os.fdopen(from_mpirun, "rb", buffering=0))
    relay = Relay(process, outputs={from_rank: (0, 2)})
    noise = b"[warn] Epoll MOD(4) on fd 19 failed. Old events were 6; read change was 2 (del): Bad file descriptor\n"
    os.write(mpirun, b"a\n" + noise + b"[warn] of something else\n" + noise[:20])
    os.write(rank, noise)
    relay.pump(1)
    os.write(mpirun, noise[20:] + b"b\n")
    for end in (mpirun, rank):
        os.close(end)
    for _ in range(4):
        relay.pump(0.1)
    said = b"".join(shown)
    assert said.replace(b"[rank 0] " + noise, b"") == b"a\n[warn] of something else\nb\n"
    assert b"[rank 0] " + noise in said, "a rank may say what it likes"


def test_relay_drains_although_its_own_output_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent drains the output before it reports the ends of its ranks to the others."""

    def gone(*_: Any) -> None:
        raise BrokenPipeError

    ranks = Ranks()
    for rank, write in enumerate(ranks.writes):
        os.write(write, b"words of rank %d\nand half a line" % rank)
        os.close(write)
    monkeypatch.setattr(relay_module, "OUTLET", SimpleNamespace(write=gone, pass_on=gone))
    ranks.relay.drain(0.3)
    monkeypatch.setattr(relay_module, "OUTLET", SimpleNamespace(write=gone, pass_on=lambda: True))
    ranks.relay.drain(0.3)
