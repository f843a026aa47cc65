"""State hand-over: members send their state to a joining replica, which installs it and
continues from there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import torch

from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.optimizers import optimizers_of
from recover.job.authentication import Authenticator
from recover.step.incident import Incident
from recover.step.joining.admission import admit_replicas, begin_join, complete_join
from recover.step.joining.extra import Extra
from recover.step.joining.giver import InstalmentGiver
from recover.step.joining.instalments import TrainedState
from recover.step.joining.joinable import Joinable
from recover.step.joining.joining_rank import REST, STATE, JoiningRank
from recover.step.joining.packing import NotPackableError
from recover.step.joining.parcel import OtherStateError, Parcel, refusal
from recover.step.joining.receiver import StateReceiver
from recover.step.joining.stripes import Stripes
from recover.step.joining.tensor_places import buffers_like
from recover.step.position import Position
from recover.step.randomness import generators, set_generators
from recover.step.record import Arrival
from recover.step.transaction import Transaction
from recover.world import rank_exit
from recover.world.liveness.board import age
from recover.world.world import World

JoinWay = Literal["pause", "instalments"]
# Optimizers of torch that update each element by itself. Others may exchange data between the ranks of a replica
# for each parameter, and these hold different parameters while a replica joins.
ELEMENTWISE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


class StateHandover:
    """Both sides of a hand-over.

    state:      model, optimizer, scheduler if any, and the extras of the user
    take_over:  runs `step.on_first` calls of dead ranks
    joinable:   whether all state that a joining replica needs is known
    trained:    the state that updates change
    way:        of joining: in one pause, or in instalments
    """

    def __init__(
        self,
        world: World,
        transaction: Transaction,
        position: Position,
        state: tuple[torch.nn.Module, Any, Any, Mapping[str, Extra]],
        take_over: Callable[[], object],
        joinable: Joinable,
        trained: TrainedState,
        way: JoinWay = "pause",
    ) -> None:
        self._world, self._transaction, self._take_over = world, transaction, take_over
        self._position, self._state, self._joinable = position, state, joinable
        self._device = next(state[0].parameters()).device
        self._trained, self._way = trained, way
        self._why_pause = ""  # why replicas join in one pause, although instalments were asked for
        # Of the join under way: the pause so far in ms, and the step. Of the last one: the step, and replicas.
        self._admitted: tuple[float, int] = 0.0, 0
        self._joined: tuple[int, tuple[int, ...]] = 0, ()
        instalments = partial(self._stripes, place=("in-instalment",))
        self.giver = InstalmentGiver(world, trained, instalments, lambda: joinable.obstacle())
        self._receiver = StateReceiver(
            world,
            trained,
            instalments,
            lambda givers, held: self._take(givers, world.takers, held),
        )

    def admit(self) -> list[Incident]:
        """Admit replicas that have asked to join. Called by members. Returns the incidents."""
        if self._uses_pause():
            return admit_replicas(self._transaction, self._pass_on_all)
        began = time.perf_counter()
        incidents = begin_join(self._transaction)
        if self._world.arrivals:
            self.giver.begin(self._transaction.index)
        self._admitted = (time.perf_counter() - began) * 1e3, self._transaction.index
        return incidents

    @property
    def progress(self) -> dict[int, int]:
        """For each joining replica, the percentage of the state that it holds, as their coordinator knows it."""
        return {replica: int(100 * self.giver.progress) for replica in self._world.arrivals}

    def complete(self) -> list[Incident]:
        """Give the joining replicas the rest of the state. Called by members, once the joining replicas
        hold all that is handed over in instalments. Returns the incidents."""
        incidents = complete_join(self._transaction, self._pass_on_rest)
        for incident in incidents:
            if incident.joined_replicas:
                incident.stall_ms += self._admitted[0]
                incident.joining_steps = self._joining_steps
                incident.transfer_bytes += self.giver.sent
        self._note_join(incidents, in_instalments=True)
        return incidents

    def committed(self, incidents: list[Incident]) -> None:
        """A step was committed, after these incidents. If a replica that joined in instalments was evicted
        in its first vote, later replicas join in one pause."""
        step, replicas = self._joined
        for incident in incidents:
            if incident.step == step and (found := [r for r in incident.evicted if r in replicas]):
                self._why_pause = (
                    f"replica {found[0]} joined in instalments and was evicted in its first step: "
                    f"{incident.reasons[found[0]]}"
                )
                rank_exit.log(f"replicas join in one pause from now on: {self._why_pause}")

    def join(self) -> list[Incident]:
        """Ask to join, be admitted, and receive the state. Called by the joining replica. Returns the
        incidents.

        Raises OtherStateError, before it asks, if state would be missing: this replica runs the script
        of the members, so they cannot send that state either.
        """
        if (why := self._joinable.obstacle()) is not None:
            raise OtherStateError(f"this replica cannot join: {why}")
        self._world.warm_up()
        arrival = Arrival(socket.gethostname(), age())
        incidents = JoiningRank(self._transaction, arrival, self._receiver).join()
        self._note_join(incidents, in_instalments=self._receiver.took_rest)
        return incidents

    def _note_join(self, incidents: list[Incident], in_instalments: bool) -> None:
        for incident in incidents:
            if incident.joined_replicas and in_instalments:
                self._joined = incident.step, incident.joined_replicas

    def state_dict(self) -> dict[str, Any]:
        """For a joining replica: it must choose the way of the next join as the members do."""
        return {"why_pause": self._why_pause, "joined": list(self._joined)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._why_pause = state["why_pause"]
        step, replicas = state["joined"]
        self._joined = step, tuple(replicas)

    @property
    def _joining_steps(self) -> int:
        """Steps since the replicas that are joining were admitted."""
        return self._transaction.index - self._admitted[1]

    def _uses_pause(self) -> bool:
        """Whether replicas join in one pause: decided from values that are the same on all members."""
        if self._way == "pause" or self._why_pause:
            return True
        why = ""
        for each in optimizers_of(self._state[1]):
            kind = type(each).__name__
            if any(not isinstance(key, torch.Tensor) for key in each.state):
                why = f"{kind} has state that belongs to no parameter"
            elif self._world.grid.replica_size > 1 and kind not in ELEMENTWISE:
                why = f"{kind} may exchange data inside of a replica for each parameter"
        if not isinstance(self._trained.gradients, OwnedGradients):
            why = f"{type(self._trained.gradients).__name__} takes the gradients out of another library's buckets"
        if why:
            rank_exit.log(f"a replica joins in one pause: {why}")
        return bool(why)

    def _pass_on_all(
        self, givers: tuple[int, ...], takers: tuple[int, ...], told: Mapping[str, Any]
    ) -> int | None:
        self._world.tell({"do": STATE, **told})
        return self._give(givers, takers)

    def _pass_on_rest(
        self, givers: tuple[int, ...], takers: tuple[int, ...], told: Mapping[str, Any]
    ) -> int | None:
        told["incidents"][-1]["joining_steps"] = self._joining_steps
        if not self.giver.give_rest({"do": REST, **told}):
            self._take_over()
            return 0  # another rank of this group gives
        return self._give((self._world.rank,), takers, self.giver.held)

    def _give(
        self, givers: tuple[int, ...], takers: tuple[int, ...], held: frozenset[int] = frozenset()
    ) -> int | None:
        # A joining replica does not know of earlier `on_first` calls, so none may be left when it
        # is a member.
        self._take_over()
        head, parts = self._packed(held)
        head = self._authenticator.sign(self._place(givers), head)
        stripes = self._stripes(givers, takers, parts)
        return _size(parts) if stripes.send_head(head) and stripes.give(parts) else None

    def _packed(self, held: frozenset[int] = frozenset()) -> tuple[bytes, list[torch.Tensor]]:
        """Head and parts of the state; or a refusal, which ends the joining replica while the
        members go on."""
        if (why := self._joinable.obstacle()) is not None:
            return refusal(why), []
        board, rank = self._world.board, self._world.rank
        more = {
            "votes": board.votes(rank),
            "generators": generators(self._device),
            "joining": self.state_dict(),
        }
        try:
            return Parcel(*self._state, held=held).pack(self._position.give() | more)
        except NotPackableError as error:
            return refusal(str(error)), []

    def _take(
        self, givers: tuple[int, ...], takers: tuple[int, ...], held: frozenset[int] = frozenset()
    ) -> int | None:
        parcel = Parcel(*self._state, held=held)
        signed = self._stripes(givers, takers, []).receive_head()
        if signed is None:
            return None
        head = self._authenticator.opened(self._place(givers), signed)
        if head is None:  # checked before anything of it is parsed
            rank_exit.log("the state that was offered was not signed with this job's token, and is not taken")
            return None
        parts = parcel.open(head)
        # From now on this rank takes part in the votes of the others: if it hangs, the watchdog must
        # treat it as a member.
        self._world.board.catch_up(
            self._world.rank, parcel.position["votes"], parcel.position["step"]["index"] + 1
        )
        if not self._stripes(givers, takers, parts).take(parts):
            return None
        position = parcel.install()
        self._position.take(position)
        self.load_state_dict(position["joining"])
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
        self,
        givers: tuple[int, ...],
        takers: tuple[int, ...],
        parts: list[torch.Tensor],
        place: tuple[str, ...] = ("repair", "in-state"),
    ) -> Stripes:
        if not parts:
            return Stripes(self._world.cross, givers, takers)
        return Stripes(
            self._world.cross,
            givers,
            takers,
            buffers_like(parts),
            lambda words: words.view(torch.uint8),
            lambda work: self._world.hooks.under_way(place[0], work, *place[1:]),
        )


def _size(parts: list[torch.Tensor]) -> int:
    return sum(map(len, parts))
