"""In every process of a job: operations on its records fail while a file says so.

`TEST_DISK_FAILS` names the operation (or `all`), the number of the error, and the file: `append:28:/tmp/x/fails`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recover.job.record_files import FILES, Disk

OPERATIONS = ("append", "replace", "read", "read_end", "truncate", "remove", "modified", "open_to_append")


class FailingDisk(Disk):
    pass


def _failing(operation: str, which: str, number: int, trigger: Path) -> Any:
    def act(self: Disk, path: Path, *arguments: Any) -> Any:
        # Files in shared memory are on another disk.
        if which in (operation, "all") and trigger.exists() and not str(path).startswith("/dev/shm"):
            raise OSError(number, os.strerror(number), str(path))
        return getattr(Disk, operation)(self, path, *arguments)

    return act


if told := os.environ.get("TEST_DISK_FAILS"):
    _which, _number, _trigger = told.split(":", 2)
    for _operation in OPERATIONS:
        setattr(FailingDisk, _operation, _failing(_operation, _which, int(_number), Path(_trigger)))
    FILES.disk = FailingDisk()
