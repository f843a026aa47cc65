"""Pairs of ranks, each a gloo group that ends when half of a message from one rank to the other has arrived.

The sender dies, breaks off, or is left by the receiver, which prints how its wait ended.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from recover.job.grid import Grid
from recover.world.carriers.gloo import GlooCarrier
from recover.world.carriers.host_memory import StagingByDevice
from recover.world.carriers.worker import Worker

NUMBERS = 4 << 20  # of 8 bytes: more than two sockets hold
TRIES = 20  # until it is caught halfway
ENDS = ("dies", "breaks off", "is left")
OPERATIONS: dict[str, Callable[[GlooCarrier, Any, Any], object]] = {
    "broadcast": lambda carrier, source, out: carrier.broadcast(source if carrier.index else out, 1),
    "all_reduce": lambda carrier, source, out: carrier.all_reduce(source, out),
    "all_gather": lambda carrier, source, out: carrier.all_gather(source, out),
    "exchange": lambda carrier, source, out: carrier.exchange(
        {0: source} if carrier.index else {}, {} if carrier.index else {1: out}
    ),
}


def meet(rank: int, line: socket.socket, worker: Worker) -> GlooCarrier:
    def swapped(word: bytes) -> bytes:
        line.sendall(len(word).to_bytes(4, "big") + word)
        size = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "big")
        return line.recv(size, socket.MSG_WAITALL)

    carrier = GlooCarrier(rank, Grid(2, 1), worker, (0, 1), StagingByDevice(), "127.0.0.1")
    offer = carrier.offer()
    carrier.build({rank: offer, 1 - rank: swapped(offer)}, lambda ok: ok, lambda: False)
    swapped(b"ready")
    return carrier


def send(line: socket.socket, operation: str, source: Any, out: Any) -> NoReturn:
    worker = Worker()
    carrier = meet(1, line, worker)
    worker.post(lambda: OPERATIONS[operation](carrier, source, out))
    line.recv(1)
    carrier.free()
    while True:
        signal.pause()


def caught_halfway(operation: str, how: str) -> bool:
    """Runs in a process of its own, whose end is tested, too: it must not wait for another rank, either."""
    source = np.arange(1, NUMBERS + 1)
    out = np.zeros((2, NUMBERS) if operation == "all_gather" else NUMBERS, source.dtype)
    mine, theirs = socket.socketpair()
    sender = os.fork()
    if sender == 0:
        send(theirs, operation, source, out)
    worker = Worker()
    carrier = meet(0, mine, worker)
    work = worker.post(lambda: OPERATIONS[operation](carrier, source, out))
    coming, before = out[:: 1 << 14], source[:: 1 << 14] if operation == "all_reduce" else 0
    if operation == "all_gather":  # shows nothing before its end
        time.sleep(0.002)
    while operation != "all_gather" and not work.done and (coming == before).all():
        time.sleep(0.0005)
    os.kill(sender, signal.SIGSTOP)
    time.sleep(0.2)  # what has been sent comes in
    halfway = not work.done
    if how == "is left":
        carrier.free()
    elif how == "breaks off":
        mine.sendall(b".")
        os.kill(sender, signal.SIGCONT)
    else:
        os.kill(sender, signal.SIGKILL)
    work.wait(30)
    assert not worker.busy  # forgets operations that have ended; a failed one keeps the group
    worker.take_failed()
    if halfway:
        end = "freed" if work.done and work.error else "through" if work.done else "forgotten"
        print(f"{operation}, a sender that {how}: {end}", flush=True)
    os.kill(sender, signal.SIGKILL)
    os.waitpid(sender, 0)
    return halfway


def in_a_process(operation: str, how: str) -> int:
    if child := os.fork():
        return child
    halfway = caught_halfway(operation, how)
    gc.collect()  # frees the group, if nothing keeps it
    raise SystemExit(0 if halfway else 3)


todo = {(operation, how) for operation in OPERATIONS for how in ENDS}
for _ in range(TRIES):
    started = {case: in_a_process(*case) for case in todo}
    todo = {case for case, pid in started.items() if os.waitpid(pid, 0)[1]}
