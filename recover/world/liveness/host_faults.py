"""Faults of this host: memory that ran out, a full disk, failing GPUs and memory.

Everything is read with the rights of an ordinary user. A source that cannot be read is skipped.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from pathlib import Path
from typing import Any

_GROUPS = Path("/sys/fs/cgroup")
_KEPT = 200  # lines of the kernel's log
_RECENT = 30.0  # seconds: older messages of hardware have nothing to do with a death
_ROOM = 64 * 1024  # bytes; with less a disk counts as full
_HARDWARE = re.compile(
    r"NVRM: Xid|\[Hardware Error\]|mce: |EDAC .* UE |GPU has fallen off the bus", re.IGNORECASE
)
_NUMBER = re.compile(r"\b\d+\b")


class HostFaults:
    """The faults of this host since this object was made."""

    def __init__(self) -> None:
        self._kernel = _KernelLog()
        self._gpus = _Gpus()
        self._memory_errors = _uncorrected()

    def poll(self) -> None:
        """Read new messages. To be called often, since messages are dated when they are read."""
        self._kernel.poll()
        self._gpus.poll()

    def look(self, pid: int) -> tuple[list[str], list[str]]:
        """Messages of the kernel about a process that has just died, or about hardware, and
        messages of the GPUs."""
        self.poll()
        since = time.monotonic() - _RECENT
        said = [
            line
            for at, line in self._kernel.said
            if (at >= since and _HARDWARE.search(line)) or (pid and str(pid) in _NUMBER.findall(line))
        ]
        if (now := _uncorrected()) > self._memory_errors:
            said.append(f"EDAC: {now - self._memory_errors} uncorrected memory errors")
            self._memory_errors = now
        return said, [text for at, text in self._gpus.told if at >= since]


def cgroup_of(pid: int) -> str:
    """The file that counts OOM kills in the control group of a process; "" where there is none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            candidates = [_GROUPS / "memory" / path.lstrip("/"), _GROUPS / "memory"]
            name = "memory.oom_control"
        elif not controllers:
            candidates = [_GROUPS / path.lstrip("/"), _GROUPS, _GROUPS / "unified" / path.lstrip("/")]
            name = "memory.events"
        else:
            continue
        # Inside a container the path may be the host's, and the group itself is mounted at the top.
        for candidate in candidates:
            if (candidate / name).exists():
                return str(candidate / name)
    return ""


def oom_kills(counter: str) -> int:
    try:
        fields = dict(line.split() for line in Path(counter).read_text().splitlines()) if counter else {}
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def disk_is_full(place: Path) -> bool:
    try:
        room = os.statvfs(place)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < _ROOM or (room.f_files > 0 and room.f_favail == 0)


def _uncorrected() -> int:
    """Uncorrected memory errors, as the memory controllers count them."""
    total = 0
    for path in Path("/sys/devices/system/edac/mc").glob("mc*/ue_count"):
        try:
            total += int(path.read_text())
        except (OSError, ValueError):
            pass
    return total


class _KernelLog:
    """New messages of the kernel; none where its log cannot be read."""

    def __init__(self) -> None:
        self.said: deque[tuple[float, str]] = deque(maxlen=_KEPT)
        try:
            self._file: int | None = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self._file = None

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def poll(self) -> None:
        while self._file is not None:
            try:
                record = os.read(self._file, 8192).decode(errors="replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # some were overwritten before they were read
            except OSError:
                break
            self.said.append((time.monotonic(), record.partition(";")[2].partition("\n")[0]))


class _Gpus:
    """Xid errors and uncorrected ECC errors of the GPUs, where there are any, by nvidia-ml-py."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self.told: deque[tuple[float, str]] = deque(maxlen=_KEPT)
        if not Path("/dev/nvidiactl").exists():
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._events = pynvml.nvmlEventSetCreate()
            self._cards = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
            for card in self._cards:
                pynvml.nvmlDeviceRegisterEvents(card, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except Exception:  # no library, no permission, no such counter: then nothing is known
            pass
        self._errors = self._uncorrected()

    def poll(self) -> None:
        if self._nvml is None:
            return
        while True:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except Exception:  # nothing has happened
                break
            number = self._nvml.nvmlDeviceGetIndex(event.device)
            self.told.append((time.monotonic(), f"GPU {number}: Xid {event.eventData}"))
        now = self._uncorrected()
        for number, (before, count) in enumerate(zip(self._errors, now, strict=True)):
            if count > before:
                self.told.append((time.monotonic(), f"GPU {number}: {count - before} uncorrected ECC errors"))
        self._errors = now

    def _uncorrected(self) -> list[int]:
        counts = []
        for card in self._cards if self._nvml is not None else ():
            try:
                kind, since = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
                counts.append(int(self._nvml.nvmlDeviceGetTotalEccErrors(card, kind, since)))
            except Exception:  # a card without ECC
                counts.append(0)
        return counts
