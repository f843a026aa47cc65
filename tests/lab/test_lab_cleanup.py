"""However a lab ends, also if it could not be made at all: nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE, LeavesNothing, wait_until
from recover_lab.lab.hosts import Lab, unavailable

pytestmark = pytest.mark.usefixtures("a_lab_can_be_made_here")

# A lab in a process of its own, which prints what the lab is made of and then ends in one way or another.
OWNER = """
import json, os, signal, sys, time
from recover_lab.lab.hosts import Lab
with Lab(hosts=2) as lab:
    lab["h1"].shape(delay_ms=5)
    lab["h2"].start(["sh", "-c", "setsid sleep 1000 & trap '' TERM; sleep 1000"])
    lab["h1"].power_cut()
    lab["h1"].power_on()
    while len(lab["h2"].processes()) < 3:
        time.sleep(0.01)
    own = [*(host.init for host in lab), *lab["h2"].processes(), lab._switch.pid]
    kinds = ("net", "mnt", "pid", "uts", "ipc")
    rooms = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in own for kind in kinds}
    print(json.dumps(sorted(rooms - {os.readlink(f"/proc/self/ns/{kind}") for kind in kinds})), flush=True)
    sys.stdin.readline()
    if sys.argv[1] == "raise": raise ValueError("an ordinary mishap")
    if sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "exit": os._exit(0)
"""
ENDS = {"leave": 0, "raise": 1, "kill": -signal.SIGKILL, "exit": 0}


def inhabited() -> dict[str, set[int]]:
    """All namespaces that processes are in, each with their pids."""
    found: dict[str, set[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            for kind in ("net", "mnt", "pid", "uts", "ipc"):  # a zombie has no network any more
                found.setdefault(os.readlink(f"/proc/{name}/ns/{kind}"), set()).add(int(name))
        except OSError:
            pass  # gone meanwhile
    return found


def machine() -> tuple[object, ...]:
    """Possible leftovers of a lab: interfaces, mounts, names of networks."""
    interfaces = sorted(name for _, name in socket.if_nameindex())
    return (
        interfaces,
        Path("/proc/self/mountinfo").read_text(),
        os.path.exists("/run/netns") and os.listdir("/run/netns"),
    )


@pytest.mark.guarantee(
    "Emulated hosts",
    "Labs are isolated, have no name on the machine and leave nothing behind, also after `kill -9` of their "
    "owner.",
)
def test_labs_leave_nothing_behind_however_their_owners_end() -> None:
    before = machine()
    owners = {
        end: subprocess.Popen(
            [sys.executable, "-c", OWNER, end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for end in ENDS
    }
    rooms = {end: set(json.loads(owner.stdout.readline())) for end, owner in owners.items() if owner.stdout}
    for end, those in rooms.items():
        assert len(those) == 11, "five kinds for each of two hosts, and the switch's network"
        assert those <= inhabited().keys()
        assert not any(those & others for other, others in rooms.items() if other != end), (
            "labs share nothing"
        )
    left = set.union(*rooms.values())
    try:
        assert machine() == before, "nothing of a lab has a name on the machine"
        for end, owner in owners.items():
            assert owner.stdin
            owner.stdin.close()
            assert owner.wait(PATIENCE) == ENDS[end]
            if end in ("leave", "raise"):
                assert not rooms[end] & inhabited().keys(), "`with` has ended before they were gone"
        assert wait_until(lambda: not left & inhabited().keys())
        assert machine() == before
    finally:  # a lab that is broken is to leave nothing behind, either
        for owner in owners.values():
            owner.kill()
            owner.wait()
            assert owner.stdout
            owner.stdout.close()
        for pid in {pid for room, pids in inhabited().items() if room in left for pid in pids}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone with its init


@pytest.mark.guarantee(
    "Emulated hosts",
    "Labs are isolated, have no name on the machine and leave nothing behind, also after `kill -9` of their "
    "owner.",
)
def test_lab_that_cannot_be_made_is_refused_and_cleaned_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for hosts in (0, 255):
        with pytest.raises(ValueError, match="1 to 254 hosts"):
            Lab(hosts=hosts)
    with LeavesNothing():
        refused = Lab(hosts=2)
        refused["h2"].address = "not-an-address"
        with pytest.raises(RuntimeError, match="not-an-address"):
            refused.__enter__()
        assert not any(host.up for host in refused)
    monkeypatch.setenv("PATH", "/nowhere")
    assert unavailable() == "hosts need the program `ip` (package iproute2)"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable() == "hosts are made of namespaces, which needs root"
