"""Pipes for the output of the ranks of this host, one for each, or pseudo-terminals where the
launcher has a terminal: so it is known which rank writes, and carriage returns arrive as written.
mpirun would mix the output of all ranks.
"""

from __future__ import annotations

import fcntl
import os
import resource
import struct
import termios
from collections.abc import Collection
from pathlib import Path

STREAMS = (1, 2)
_slaves: dict[int, int] = {}  # of pseudo-terminals, by the end that is read


def label(rank: int) -> bytes:
    return f"[rank {rank}] ".encode()


def make(session: Path, ranks: Collection[int]) -> dict[int, tuple[int, int]]:
    """Make the pipes of `ranks`, for the launcher before they start. Returns the ends to read, each
    with the rank that writes and the stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors for the pipes of a rank, their copies and its terminals; ranks that join have
    # higher numbers.
    wanted = 256 + 6 * (max(ranks, default=0) + 1)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    found = {}
    for rank in ranks:
        for stream in STREAMS:
            path = session / f"{rank}.{stream}"
            if os.isatty(stream):
                end, slave = os.openpty()  # the slave stays open: to read without one is an error
                _imitate(stream, slave, len(label(rank)))
                path.symlink_to(os.ttyname(slave))
                _slaves[end] = slave
            else:
                os.mkfifo(path, 0o600)
                end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found[end] = rank, stream
    return found


def close(end: int) -> None:
    """Close an end that is not read any more."""
    os.close(end)
    if (slave := _slaves.pop(end, None)) is not None:
        os.close(slave)


def remove(session: Path, rank: int) -> None:
    """Remove the pipes of a rank whose number is not used again."""
    for stream in STREAMS:
        (session / f"{rank}.{stream}").unlink(missing_ok=True)


def take(session: Path, rank: int) -> bool:
    """For a rank: write to its pipes from now on, with its children. Returns False if the launcher
    has made no pipes."""
    for stream in STREAMS:
        try:
            place = os.open(session / f"{rank}.{stream}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # none was made, or it is not read any more
            return False
        os.set_blocking(place, True)
        os.dup2(place, stream)
        os.close(place)
    return True


def _imitate(terminal: int, slave: int, margin: int) -> None:
    """Make a terminal as wide as the real one, less the label of each line; output is not translated."""
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    rows, columns, *_ = struct.unpack("4H", fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
    size = struct.pack("4H", rows, max(20, columns - margin) if columns else 0, 0, 0)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
