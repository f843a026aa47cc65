"""A joining rank, from its admission until it is a member: it executes commands of the members, and
decides nothing.

It listens for commands. In an attempt of the members it posts the reductions with nothing in them,
so that it receives every sum. The members send it whether that step was committed, and with which
update, while they apply it, and again with the next attempt; until then it keeps the sums. It
applies the update once, to the parameters that it holds, which therefore stay equal to those of the
members. If no command arrives any more, it goes to a repair, and its census record tells the members
what it holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from recover.gradients.buckets import Bucket
from recover.step.incident import Incident
from recover.step.record import Arrival
from recover.step.transaction import ATTEMPT, Transaction
from recover.step.vote import word_of_joining_rank
from recover.world.commands import AGREE, OPERATION, Command, take_part
from recover.world.membership import Phase

# Commands to take all of the state, or what was not handed over in instalments, and to apply a committed update.
STATE, REST, UPDATE = "state", "rest", "update"


class NobodyHoldsTheStateError(RuntimeError):
    """All ranks that held the state have died."""


class Receiver(Protocol):
    """Receives the state on a joining rank, and installs it."""

    @property
    def ready(self) -> bool:
        """Whether it holds all that is handed over in instalments."""

    @property
    def holds(self) -> str:
        """Numbers of the entries that it holds, as hexadecimal bits."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def take_instalment(self, command: Command) -> bool:
        """Before an attempt: apply the update of the step before, if the command has one that was not
        applied, and take the entries that come with it. False if they did not arrive."""

    def take_update(self, command: Command) -> bool:
        """Apply the update of the step that was committed. False if it did not arrive."""

    def take_state(self, command: Command) -> int | None:
        """Take all that is missing. Returns the number of bytes, or None if it did not arrive."""


class JoiningRank:
    """One joining rank. `arrival`: its census record when it asks to join."""

    def __init__(self, transaction: Transaction, arrival: Arrival, receiver: Receiver) -> None:
        self._transaction, self._world, self._receiver = transaction, transaction.world, receiver
        self._arrival, self._failures = arrival, 0
        self._complete = False  # it has the sums of the last attempt
        self._in_attempt = False  # the next agreement is the vote of an attempt
        # The host was asked to leave. This rank has voted for a repair, and asks the members to go on
        # without it: they hold all sums, so this costs them no microbatch. Only in the vote of a step: what
        # is lost in other repairs counts as lost.
        self._leaves = False
        self._incidents: list[Incident] | None = None  # of this step, once it has all of the state

    def join(self) -> list[Incident]:
        """Ask, be admitted, and take the state. Returns the incidents of the step that begins."""
        self._world.join(self._record())
        while True:
            if not self._world.members:
                raise NobodyHoldsTheStateError(
                    "all who held the state have died before it was passed on to those who joined; go on from the "
                    "last checkpoint"
                )
            command = self._world.listen()
            if command is None:
                self._repair()
            elif command["do"] == AGREE:
                if self._agree(command):
                    return self._become_member()
            elif command["do"] == OPERATION:
                take_part(self._world.cross, command)
            elif command["do"] == ATTEMPT:
                self._take_part_in_attempt(command)
            elif command["do"] == UPDATE:
                self._take_update(command)
            else:
                self._take_state(command)

    def _agree(self, command: Command) -> bool:
        """Take part in an agreement. Returns whether it has confirmed that this rank holds the state."""
        is_vote = command["phase"] == Phase.VOTE
        self._leaves = self._in_attempt and is_vote and self._transaction.leaves
        self._in_attempt = False
        # In other agreements all bits are the members' own: those of `world.agree` are the user's.
        word = word_of_joining_rank(self._receiver.ready or not is_vote, self._leaves)
        agreed = self._world.agree_as_told(command, word)
        if agreed is None:
            self._repair()
        elif is_vote and self._incidents is not None:
            return agreed == 1
        elif is_vote:
            self._world.board.in_step(self._world.rank, 0)
        return False

    def _repair(self) -> None:
        world = self._world
        mine = world.grid.replica_peers(world.rank) | {world.rank}
        census = world.repair(self._record(), leave=mine if self._leaves else frozenset())
        self._incidents = None
        self._in_attempt = self._leaves = False
        if census.lost:
            self._failures = 0

    def _record(self) -> bytes:
        holds, ready = self._receiver.holds, self._receiver.ready
        now = replace(
            self._arrival, failures=self._failures, complete=self._complete, ready=ready, holds=holds
        )
        return now.to_bytes()

    def _take_part_in_attempt(self, command: Command) -> None:
        world = self._world
        self._complete, self._in_attempt, world.hooks.step = False, True, command["step"]
        # This rank takes part in the votes of the others: if it hangs, the watchdog must treat it as a
        # member.
        world.board.catch_up(world.rank, command["votes"], command["step"])
        world.hooks("instalment")
        if not self._took(self._receiver.take_instalment(command)):
            return
        works = []
        for index, bucket in enumerate(self._receiver.buckets):
            world.hooks("bucket", index)
            bucket.forget()
            works.append(bucket.post(world.cross, world.epoch, contribute=False))
            world.hooks.under_way("in-reduce", works[-1], index)
        world.board.come_to_vote(world.rank)
        works.append(world.cross.all_reduce(np.zeros(command["totals"])))
        world.hooks.under_way("in-totals", works[-1])
        if command["maxima"]:
            lowest = np.full(command["maxima"], np.iinfo(np.int32).min, np.int32)
            works.append(world.cross.all_max(lowest))
        world.cross.drain()
        self._complete = all(work.ok for work in works)
        world.hooks("vote")

    def _take_update(self, command: Command) -> None:
        """Apply a committed update. The members are on their way to the next step, and wait for this rank
        there: if it hangs meanwhile, it is late in that step. Once it listens, it waits for them."""
        board, rank = self._world.board, self._world.rank
        board.in_step(rank, command["committed"]["step"] + 1)
        self._took(self._receiver.take_update(command))
        board.in_step(rank, 0)

    def _take_state(self, command: Command) -> None:
        world = self._world
        world.hooks("repair", "state")
        began = time.perf_counter()
        nbytes = self._receiver.take_state(command)
        if self._took(nbytes is not None):
            self._incidents = [Incident.from_json(each) for each in command["incidents"]]
            joined = self._incidents[-1]
            joined.transfer_bytes += nbytes or 0
            joined.transfer_ms = joined.stall_ms = (time.perf_counter() - began) * 1e3
        world.hooks("repair", "arrived")

    def _took(self, arrived: bool) -> bool:
        self._failures = 0 if arrived else self._failures + 1
        if not arrived:
            # Otherwise this rank would take the rest of this transfer for the next command.
            self._world.cross.abort_operations("a joining rank has not received all of the state")
        return arrived

    def _become_member(self) -> list[Incident]:
        assert self._incidents is not None
        self._world.complete_arrivals()
        joined = tuple(replica for each in self._incidents for replica in each.joined_replicas)
        self._transaction.members_joined(joined, as_joining=True)
        return self._incidents
