"""The program of `recover doctor --hosts`, one process on each host: every pair of hosts tests its
link.

The results are stored in etcd, so that every host can show all of them, and at the end in
`hosts_probe.json` in the run directory. It uses neither torch nor a world: a host may fail the test
before these would work.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from recover.job import process
from recover.job.machine import machine
from recover.job.spec import JobSpec, current_job
from recover.launch.hosts.addresses import resolved
from recover.world.fabrics.etcd.access import client_of
from recover.world.fabrics.etcd.client import EtcdClient

RESULT = "hosts_probe.json"
FACTS, ROUNDS, PAIRS = "probe/facts/", "probe/round/", "probe/pair/"
PATIENCE, AGAIN = 60.0, 0.02  # seconds
TRIES = 8  # to compare clocks: the quickest answer is the most accurate
SECONDS, PIECE = 0.5, 1 << 18  # duration of the bandwidth test, and bytes per message
IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2  # of <linux/in.h>: never fragment a packet
HEADERS = 28  # bytes, of IP and UDP
MOST = 100  # bytes of a message; nothing that is received is unpickled


def main() -> None:
    rank, job = process.rank(), current_job()
    assert rank is not None
    assert job is not None
    assert job.etcd is not None
    assert job.run_dir is not None
    assert job.address is not None
    etcd, size = client_of(job.etcd), job.ranks
    with Listener((job.address, 0), authkey=job.token.encode()) as door:
        threading.Thread(target=_answer, args=[door], daemon=True).start()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as box:
            box.bind((job.address, 0))
            threading.Thread(target=_echo, args=[box], daemon=True).start()
            etcd.put(f"{FACTS}{rank}", json.dumps(_facts(job, door, box)).encode())
            facts = _gathered(etcd, FACTS, size)
            for number, pairs in enumerate(rounds(size)):
                for one, other in pairs:
                    if other == rank:
                        found = _try(facts[str(rank)], facts[str(one)], job)
                        etcd.put(f"{PAIRS}{one}-{other}", json.dumps(found).encode())
                etcd.put(f"{ROUNDS}{number}/{rank}", b"1")
                _gathered(etcd, f"{ROUNDS}{number}/", size)  # one pair at a time on each host
            pairs_found = _gathered(etcd, PAIRS, size * (size - 1) // 2)
    Path(job.run_dir, RESULT).write_text(json.dumps({"hosts": facts, "pairs": pairs_found}))


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which no host is in two pairs (the circle method)."""
    players = [*range(size), *([-1] if size % 2 else [])]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return found if size > 1 else []


def _facts(job: JobSpec, door: Listener, box: socket.socket) -> dict[str, Any]:
    mtu = Path("/sys/class/net", job.interface or "", "mtu")
    return {
        "host": job.host,
        "address": job.address,
        "name": socket.gethostname(),
        "resolves": resolved(socket.gethostname()),
        "interface": job.interface,
        "mtu": int(mtu.read_text()) if job.interface and mtu.exists() else None,
        "door": door.address,
        "box": box.getsockname(),
        "machine": machine(),
    }


def _gathered(etcd: EtcdClient, prefix: str, number: int) -> dict[str, Any]:
    """Wait for `number` values under a prefix, and return them by key."""
    deadline = time.monotonic() + PATIENCE
    while len(found := etcd.get_all(prefix)[0]) < number:
        if time.monotonic() > deadline:
            there = ", ".join(one.key.removeprefix(prefix) for one in found)
            raise TimeoutError(f"only {len(found)} of {number} have answered after {PATIENCE:g} s: {there}")
        time.sleep(AGAIN)
    return {one.key.removeprefix(prefix): json.loads(one.value) for one in found}


def _try(mine: dict[str, Any], theirs: dict[str, Any], job: JobSpec) -> dict[str, Any]:
    """Measure the link from this host to another one. `error`: why it cannot be used."""
    found: dict[str, Any] = {"resolves": resolved(theirs["name"])}
    try:
        socket.create_connection(tuple(theirs["door"]), timeout=5.0).close()
        with Client(tuple(theirs["door"]), authkey=job.token.encode()) as line:
            found |= _clocks(line)
            line.send_bytes(b"bytes")
            piece, deadline, sent = bytes(PIECE), time.monotonic() + SECONDS, 0
            while time.monotonic() < deadline:
                line.send_bytes(piece)
                sent += PIECE
            line.send_bytes(b"")
            found["mbit"] = sent * 8 / 1e6 / float(line.recv_bytes(MOST))
    except (OSError, EOFError, AuthenticationError) as error:
        return found | {"error": f"{type(error).__name__}: {error}"}
    sizes = [size for size in (mine["mtu"], theirs["mtu"]) if size]
    found["mtu"] = _largest(tuple(theirs["box"]), min(sizes)) if sizes else None
    return found


def _clocks(line: Connection) -> dict[str, float]:
    """How far the other clock is ahead, and how uncertain that is: half of the time of the
    answer."""
    best = (float("inf"), 0.0)
    for _ in range(TRIES):
        before = time.time()
        line.send_bytes(b"time")
        theirs, after = float(line.recv_bytes(MOST)), time.time()
        best = min(best, ((after - before) / 2, theirs - (before + after) / 2))
    return {"ahead": best[1], "unsure": best[0]}


def _largest(box: tuple[str, int], mtu: int) -> int | None:
    """The size of the largest packet that is echoed: the MTU of the interfaces, or a smaller common
    one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        probe.settimeout(0.3)
        for size in [mtu, *(common for common in (8900, 1500, 1450, 1400, 1280, 576) if common < mtu)]:
            for _ in range(3):
                try:
                    probe.sendto(bytes(size - HEADERS), tuple(box))
                    if len(probe.recv(1 << 16)) == size - HEADERS:
                        return size
                except OSError:
                    continue  # too large for a hop, or lost
    return None


def _answer(door: Listener) -> None:
    while True:
        try:
            line = door.accept()
        except (OSError, EOFError, AuthenticationError):
            continue  # a process without the token, or a test of the port
        threading.Thread(target=_serve, args=[line], daemon=True).start()


def _serve(line: Connection) -> None:
    try:
        while (word := line.recv_bytes(MOST)) == b"time":
            line.send_bytes(repr(time.time()).encode())
        assert word == b"bytes"
        began = time.monotonic()
        while line.recv_bytes():
            pass
        line.send_bytes(repr(time.monotonic() - began).encode())
    except (OSError, EOFError):
        pass


def _echo(box: socket.socket) -> None:
    while True:
        try:
            data, sender = box.recvfrom(1 << 16)
            box.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
            box.sendto(data, sender)
        except OSError:
            if box.fileno() < 0:
                return


if __name__ == "__main__":
    main()
