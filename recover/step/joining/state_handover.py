"""State hand-over: members send their state to a joining replica, which installs it and
continues from there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from recover.job.authentication import Authenticator
from recover.step.incident import Incident
from recover.step.joining.admission import admit_replicas, join_members
from recover.step.joining.extra import Extra
from recover.step.joining.joinable import Joinable
from recover.step.joining.packing import NotPackableError
from recover.step.joining.parcel import OtherStateError, Parcel, buffers_like, refusal
from recover.step.joining.stripes import Stripes
from recover.step.position import Position
from recover.step.randomness import generators, set_generators
from recover.step.record import Arrival
from recover.step.transaction import Transaction
from recover.world import rank_exit
from recover.world.liveness.board import age
from recover.world.world import World


class StateHandover:
    """Both sides of a hand-over.

    state:      model, optimizer, scheduler if any, and the extras of the user
    take_over:  runs `step.on_first` calls of dead ranks
    joinable:   whether all state that a joining replica needs is known
    """

    def __init__(
        self,
        world: World,
        transaction: Transaction,
        position: Position,
        state: tuple[torch.nn.Module, Any, Any, Mapping[str, Extra]],
        take_over: Callable[[], object],
        joinable: Joinable,
    ) -> None:
        self._world, self._transaction, self._take_over = world, transaction, take_over
        self._position, self._state, self._joinable = position, state, joinable
        self._device = next(state[0].parameters()).device

    def admit(self) -> list[Incident]:
        """Called by members after a replica has asked to join. Returns the incidents."""
        return admit_replicas(self._transaction, self._give)

    def join(self) -> list[Incident]:
        """Called by the joining replica: ask, be admitted, receive the state. Returns the
        incidents.

        Raises OtherStateError, before it asks, if state would be missing: it runs the script of
        the members, so they cannot send that state either.
        """
        if (why := self._joinable.obstacle()) is not None:
            raise OtherStateError(f"this replica cannot join: {why}")
        return join_members(self._transaction, Arrival(socket.gethostname(), age()), self._take)

    def _give(self, givers: tuple[int, ...], takers: tuple[int, ...]) -> int | None:
        # A joining replica does not know of earlier `on_first` calls, so none may be left when it
        # is a member.
        self._take_over()
        head, parts = self._packed()
        head = self._authenticator.sign(self._place(givers), head)
        stripes = self._stripes(givers, takers, parts)
        return _size(parts) if stripes.send_head(head) and stripes.give(parts) else None

    def _packed(self) -> tuple[bytes, list[torch.Tensor]]:
        """Head and parts of the state; or a refusal, which ends the joining replica while the
        members go on."""
        if (why := self._joinable.obstacle()) is not None:
            return refusal(why), []
        board, rank = self._world.board, self._world.rank
        more = {"votes": board.votes(rank), "generators": generators(self._device)}
        try:
            return Parcel(*self._state).pack(self._position.give() | more)
        except NotPackableError as error:
            return refusal(str(error)), []

    def _take(self, givers: tuple[int, ...], takers: tuple[int, ...]) -> int | None:
        parcel = Parcel(*self._state)
        signed = self._stripes(givers, takers, []).receive_head()
        if signed is None:
            return None
        head = self._authenticator.opened(self._place(givers), signed)
        if head is None:  # checked before anything of it is parsed
            rank_exit.log("the state that was offered was not signed with this job's token, and is not taken")
            return None
        parts = parcel.open(head)
        # From now on it takes part in the votes of the others: if it hangs, the watchdog must treat
        # it as a member.
        self._world.board.catch_up(
            self._world.rank, parcel.position["votes"], parcel.position["step"]["index"] + 1
        )
        if not self._stripes(givers, takers, parts).take(parts):
            return None
        position = parcel.install()
        self._position.take(position)
        set_generators(position["generators"], self._device)
        self._transaction.adopt_step(self._position.index + 1)
        return _size(parts)

    @cached_property
    def _authenticator(self) -> Authenticator:
        return Authenticator(self._world.token, "state")

    def _place(self, givers: tuple[int, ...]) -> str:
        """Context of the signature: a head that was sent by another rank or in another epoch is
        not accepted."""
        giver = next(rank for rank in givers if rank in self._world.cross.peers)
        return f"epoch {self._world.epoch} from rank {giver}"

    def _stripes(
        self, givers: tuple[int, ...], takers: tuple[int, ...], parts: list[torch.Tensor]
    ) -> Stripes:
        if not parts:
            return Stripes(self._world.cross, givers, takers)
        return Stripes(
            self._world.cross,
            givers,
            takers,
            buffers_like(parts),
            lambda words: words.view(torch.uint8),
            lambda work: self._world.hooks.under_way("repair", work, "in-state"),
        )


def _size(parts: list[torch.Tensor]) -> int:
    return sum(map(len, parts))
