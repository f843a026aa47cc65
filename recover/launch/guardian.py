"""The guardian: a small process that removes all of a job, however its launcher ends.

The launcher holds the only write end of the guardian's stdin. When that closes, because the
launcher has finished or was killed, the guardian kills every process with the job's session in its
environment, and removes the job's directories. It is run as a plain file, with the standard library
only, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time

SCRATCH = "scratch-directory"  # a file in the session: where the job's other directory is
_PATIENCE = 30.0  # seconds; a process in an uninterruptible sleep may never end


def main(session: str, scratch: str, address: str = "") -> None:
    """Make the directories, say "ready", wait for the end of the launcher, clean up.

    `address`: the file with the address of the page, which a launcher that is killed cannot remove.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    made = []
    told = _content(address)
    lock = -1
    try:
        lock = _make_session(session, scratch)
        made.append(session)
        os.mkdir(scratch, 0o700)
        made.append(scratch)
        os.write(1, b"ready\n")
        sys.stdin.buffer.read()
    except BrokenPipeError:
        pass  # the launcher had ended before
    finally:
        clean(session, made)
        if lock >= 0:
            os.close(lock)
        if told and _content(address) == told:
            os.unlink(address)


def _make_session(session: str, scratch: str) -> int:
    """Make the directory of the session. Returns the descriptor of its lock: see `stale_sessions`.

    It gets its name when it is locked, so that no other job can take it for one that was left.
    """
    parent, name = os.path.split(session)
    draft = os.path.join(parent, f".{name}")
    os.mkdir(draft, 0o700)
    lock = hold(draft)
    with open(os.path.join(draft, SCRATCH), "w") as file:
        file.write(scratch)
    os.rename(draft, session)
    return lock


def hold(session: str) -> int:
    """Lock the directory of a session for as long as the descriptor that is returned is open."""
    descriptor = os.open(session, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        pass  # a file system without locks: such a session is never taken for one that was left
    return descriptor


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def clean(session: str, directories: list[str]) -> None:
    """Kill every process of the session, then remove the directories."""
    deadline = time.monotonic() + _PATIENCE
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:  # twice: a process may have been between fork and exec
        found = members(session)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        quiet = 0 if found else quiet + 1
        time.sleep(0.02)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def members(session: str) -> list[int]:
    """Every process with this session in its environment (a zombie has none)."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and is_member(int(name), session)]


def mark(session: str) -> str:
    """The beginning of a variable that every process of the job has: the path of its job file, in
    the session. Ranks that join have a job file of their own."""
    return f"RECOVER_JOB={session}/"


def is_member(pid: int, session: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    return any(variable.startswith(mark(session).encode()) for variable in variables)


if __name__ == "__main__":
    main(*sys.argv[1:])
