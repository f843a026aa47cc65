"""File operations for the files of a run: records, logs, markers, the placement of ranks.

Agents, launchers and ranks write these files through `FILES` only. A failure to write raises
nothing: the content stays in memory, is written as soon as the disk takes it, and the failure is
reported once. A read through the same object returns content that waits, so a supervisor is not
misled by its own full disk.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

PATIENCE = (
    300.0  # seconds that a process waits for the disk at the end of a run, for all that it has to write
)
AGAIN = 0.5  # seconds between two tries
MOST = 16 << 20  # bytes of appended lines that wait for one file; of more the oldest are dropped, and counted
# Errors that may pass while we wait: no space, permissions, a file server, a mount.
PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
        *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    }
)
_NUMBER = re.compile(
    r"\(os error (\d+)\)|\[Errno (\d+)\]"
)  # how safetensors, and others, write the number of an error in its text


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    return _number_of(error) in PASSING


def lacks_room(error: BaseException) -> bool:
    """Whether the disk, or the user's part of it, is full."""
    return _number_of(error) in (errno.ENOSPC, errno.EDQUOT)


def _number_of(error: BaseException) -> int | None:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (named := _NUMBER.search(str(error))):
        number = int(named[1] or named[2])
    return number


class TornError(OSError):
    """The end of the file may hold a part of the data."""


class Disk:
    """The operations on files, which raise OSError. Tests replace it by a disk that fails."""

    def append(self, path: Path, data: bytes) -> None:
        """Append all of the data, or nothing. Makes the directory again if it is gone."""
        file = self._opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            before = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                try:
                    os.ftruncate(file, before)
                except OSError as error:
                    raise TornError(error.errno, f"half a line may be left: {error.strerror}") from None
                raise
        finally:
            os.close(file)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the content of the file, by all of the data or not at all."""
        draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            file = self._opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                while data:
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
            os.replace(draft, path)
        except OSError:
            try:
                os.unlink(draft)  # half a draft takes space, too
            except OSError:
                pass
            raise

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def read_end(self, path: Path, most: int) -> bytes:
        """The last bytes of the file."""
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read()

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def modified(self, path: Path) -> int:
        return path.stat().st_mtime_ns

    def open_to_append(self, path: Path) -> int:
        """A descriptor, for output that is copied as it arrives."""
        return self._opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _opened(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o644)


class RecordFiles:
    """File operations that never raise OSError, except through `disk`. `report` is called once,
    with a sentence for the user."""

    def __init__(self, disk: Disk | None = None, report: Callable[[str], object] | None = None) -> None:
        self.disk = disk or Disk()
        self.report = report or _print
        self.while_waiting: Callable[[], object] = lambda: (
            None
        )  # called while we wait, so that no watchdog acts
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._lines: dict[Path, list[bytes]] = {}
        self._whole: dict[Path, bytes] = {}
        self._dropped: Counter[Path] = Counter()
        self._reported = self._waits = False
        self.patience = PATIENCE  # seconds of patience that are left

    def append(self, path: Path, data: bytes) -> bool:
        """Append `data`, one record. Returns whether all records of the file are on disk."""
        with self._lock:
            waiting = self._lines.setdefault(path, [])
            waiting.append(data)
            error = self._write(path)
            while sum(map(len, waiting)) > MOST:
                del waiting[0]
                self._dropped[path] += 1
            return self._done(error)

    def replace(self, path: Path, data: bytes) -> bool:
        """Set the content of the file. Returns whether it is on disk."""
        with self._lock:
            self.keep(path, data)
            return self._done(self._write(path))

    def keep(self, path: Path, data: bytes) -> None:
        """As `replace`, but nothing is written before the next `flush`: the caller has something
        urgent to do first."""
        with self._lock:
            self._whole[path] = data

    def read(self, path: Path) -> bytes | None:
        """The content of the file, even if it still waits to be written; None if there is none, or
        it cannot be read."""
        with self._lock:
            if path in self._whole:
                return self._whole[path]
        try:
            return self.disk.read(path)
        except OSError:
            return None

    def remove(self, path: Path) -> None:
        with self._lock:
            self._whole.pop(path, None)
            self._lines.pop(path, None)
        try:
            self.disk.remove(path)
        except OSError:
            pass

    def modified(self, path: Path) -> int:
        """When the file or directory was last changed, in nanoseconds; 0 if that cannot be read."""
        try:
            return self.disk.modified(path)
        except OSError:
            return 0

    def open_to_append(self, path: Path) -> int | None:
        """A descriptor, or None."""
        try:
            return self.disk.open_to_append(path)
        except OSError as error:
            self._done(error)
            return None

    @property
    def waiting(self) -> list[Path]:
        """The files with content that is not on disk yet."""
        with self._lock:
            return sorted({*self._whole, *self._lines})

    def flush(self) -> bool:
        """Try to write all that waits. Returns whether all of it is on disk."""
        return self._done(self._flush())

    def settle(self) -> bool:
        """At the end of a process: wait for the disk, while there is patience, and report what was
        lost."""
        self.retry(self._flush_or_raise, "the last records")
        lost = [
            f"{path} ({count} lines)" if (count := len(self._lines.get(path, ()))) else str(path)
            for path in self.waiting
        ]
        lost += [f"{path} ({count} earlier lines)" for path, count in self._dropped.items()]
        if lost:
            self._tell(f"lost, for the disk did not take it: {', '.join(lost)}")
        return not lost

    def retry(self, act: Callable[[], object], what: str) -> bool:
        """Call `act` until it raises no OSError, while there is patience. Returns whether it was
        done."""
        while True:
            try:
                act()
                return True
            except OSError as error:
                if not self.wait_for(error, what):
                    return False

    def wait_for(self, error: Exception, what: str) -> bool:
        """Wait for a moment after a failure to write, if it may succeed later and there is
        patience. Returns whether to try again. The first wait is reported."""
        if not is_transient(error) or self.patience <= 0:
            return False
        if not self._waits:
            self._waits = True
            self._tell(
                f"{error}; waiting up to {self.patience:g} s for the disk to take {what}; make room, or give up by "
                "Ctrl-C twice"
            )
        self.pause()
        self.patience -= AGAIN
        return True

    def pause(self) -> None:
        """Wait for a moment for the disk."""
        self.while_waiting()
        time.sleep(AGAIN)

    def _flush_or_raise(self) -> None:
        if error := self._flush():
            raise error

    def _flush(self) -> OSError | None:
        """Write all files that wait; a file that fails does not keep the others waiting."""
        first = None
        with self._lock:
            for path in [*self._lines, *self._whole]:
                error = self._write(path)
                first = first or error
        return first

    def _write(self, path: Path) -> OSError | None:
        """Write the content that waits for this file."""
        try:
            while lines := self._lines.get(path):
                self.disk.append(path, lines[0])
                del lines[0]
            self._lines.pop(path, None)
            if path in self._whole:
                self.disk.replace(path, self._whole[path])
                del self._whole[path]
        except OSError as error:
            if error.filename is None:  # os.write knows only a descriptor
                error.filename = str(path)
            return error
        return None

    def _done(self, error: OSError | None) -> bool:
        if error is not None and not self._reported:
            self._reported = True
            self._tell(f"{error}; the run goes on, and records are kept in memory until they can be written")
        return error is None

    def _tell(self, text: str) -> None:
        try:
            self.report(text)
        except OSError:
            pass  # the report has no reader


def _print(text: str) -> None:
    print(f"recover: {text}", file=sys.stderr, flush=True)


FILES = RecordFiles()
# A process that a rank forks does not write for it, and must not inherit a lock that is taken.
os.register_at_fork(after_in_child=FILES._begin)
