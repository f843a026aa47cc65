"""Strangers that connect to a group while it is made, and an impostor in a member's place without the token.

A process of its own connects to a rank's listener before any peer can. Gloo tells peers by small numbers, so a stranger
that guesses one takes a peer's place. `ROUNDS` lists the visitor of each round; no rank may be lost by it, and no sum
may be wrong.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import recover
from recover.job import process
from recover.world.carriers import gloo

HARMLESS = "silent short store nonsense"
ROUNDS = ("impostor", HARMLESS, f"{HARMLESS} peer", "loud-peer")
STRANGER = """
import os, socket, struct, sys
kept = []
for line in sys.stdin:
    port, *kinds = line.split()
    for kind in kinds:
        for number in range(16):
            kept.append(socket.create_connection(("127.0.0.1", int(port))))
            kept[-1].sendall({
                "silent": b"",
                "short": b"\\0" * 3,
                "store": struct.pack("<BI", 9, 0x3C85F7CE) + b"\\0\\3\\0\\0\\0\\0\\0\\0\\0key",
                "nonsense": os.urandom(4096),
                "peer": struct.pack("<Q", number),
                "loud-peer": struct.pack("<Q", number) + b"let me in" * 500,
            }[kind])
    print("done", flush=True)
"""
stranger = subprocess.Popen(
    [sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
rank = process.rank()
assert rank is not None
results: list[str] = []  # of each round
offer_of, connect_of = gloo.GlooCarrier.offer, gloo.GlooCarrier.connect


def offer(carrier: Any) -> bytes:
    """The strangers of this round have come when the peers hear of this listener."""
    mine = offer_of(carrier)
    visit = ROUNDS[len(results)] if len(results) < len(ROUNDS) else ""
    if visit == "impostor":
        if rank == 1:  # it does not know the token
            carrier._authenticator = type(carrier._authenticator)("a guess", "gloo")
    elif visit:
        print(carrier._listener, visit, file=stranger.stdin, flush=True)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "done\n"
    results.append("made")
    return mine


def connect(carrier: Any, *arguments: Any) -> None:
    try:
        connect_of(carrier, *arguments)
    except gloo.CarrierError as error:
        results[-1] = "is not that rank" if "is not that rank" in str(error) else "given up"
        raise


def listening() -> set[str]:
    """The addresses at which this process can be reached."""
    mine = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def check() -> None:
    numbers = np.full(1000, world.rank + 1, np.float32)
    assert world.cross.all_reduce(numbers).wait()
    assert (numbers == sum(member + 1 for member in world.members)).all()
    assert world.agree(1) == 1


gloo.GlooCarrier.offer = offer  # type: ignore[method-assign]
gloo.GlooCarrier.connect = connect  # type: ignore[method-assign]
gloo.PATIENCE = 1.5
world = recover.init(carrier="gloo")
assert listening() == {f"{struct.unpack('=I', bytes([127, 0, 0, 1]))[0]:08X}"}, listening()
check()
if world.rank == 2:
    stranger.kill()
    os.kill(os.getpid(), signal.SIGKILL)
assert world.agree(1) is None
world.repair()
check()
print("members", world.members, results, flush=True)
stranger.kill()
