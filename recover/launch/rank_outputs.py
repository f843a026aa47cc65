"""Where the ranks of this host write: a pipe for each, or a terminal where the launcher has one, so that their words
are told apart and arrive as they were written, carriage returns included. mpirun would mix them.
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
_slaves: dict[int, int] = {}  # of the terminals, by the end that is read


def label(rank: int) -> bytes:
    return f"[rank {rank}] ".encode()


def make(session: Path, ranks: Collection[int]) -> dict[int, tuple[int, int]]:
    """For the launcher, before ranks are started: what to read, with the rank that writes there and the stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What is read of a rank, where it is kept, and its terminals; those who join later have higher numbers.
    wanted = 256 + 6 * (max(ranks, default=0) + 1)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    found = {}
    for rank in ranks:
        for stream in STREAMS:
            path = session / f"{rank}.{stream}"
            if os.isatty(stream):
                end, slave = (
                    os.openpty()
                )  # the slave stays open: a terminal that nobody has is an error to read from
                _imitate(stream, slave, len(label(rank)))
                path.symlink_to(os.ttyname(slave))
                _slaves[end] = slave
            else:
                os.mkfifo(path, 0o600)
                end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found[end] = rank, stream
    return found


def close(end: int) -> None:
    """Nobody reads there any more."""
    os.close(end)
    if (slave := _slaves.pop(end, None)) is not None:
        os.close(slave)


def remove(session: Path, rank: int) -> None:
    """The places that were made for a rank whose number is not used again."""
    for stream in STREAMS:
        (session / f"{rank}.{stream}").unlink(missing_ok=True)


def take(session: Path, rank: int) -> bool:
    """For a rank: write there from now on, and its children too. False if the launcher has made no such place."""
    for stream in STREAMS:
        try:
            place = os.open(session / f"{rank}.{stream}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # none was made, or nobody reads there any more
            return False
        os.set_blocking(place, True)
        os.dup2(place, stream)
        os.close(place)
    return True


def _imitate(terminal: int, slave: int, margin: int) -> None:
    """As wide as the real one, less what is put before each line; nothing is translated on the way."""
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    rows, columns, *_ = struct.unpack("4H", fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
    size = struct.pack("4H", rows, max(20, columns - margin) if columns else 0, 0, 0)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
