"""Names of ranks in the list of processes of a host."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recover.job.process import rank_of

CALL_ITSELF = """
from recover.job.process import set_process_name
set_process_name({rank})
print(flush=True)
input()
"""


@pytest.mark.parametrize("rank", [0, 10, 100, 9_999_999])
def test_rank_process_name_survives_many_restarts(rank: int) -> None:
    command = [sys.executable, "-c", CALL_ITSELF.format(rank=rank)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert rank_of(process.pid) == rank
        process.communicate("\n")
    assert rank_of(process.pid) is None
