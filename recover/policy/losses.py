"""Losses as a person writes them: `1`, `minor`, `major,major-spare`, `major@extra1`; and joins:
`2`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from recover.policy.census import Holding
from recover.policy.roles import Role

_MOMENT = re.compile(r"extra([1-9][0-9]*)")


@dataclass(frozen=True)
class Loss:
    """Replicas that die at the same moment. A number takes majors first, then in the order of
    `Role`."""

    text: str
    victims: tuple[int | Role, ...]
    extra_round: int  # 0: in a step of its own; n: in the n-th extra round of the loss before it

    @classmethod
    def parse(cls, text: str) -> Loss:
        victims: list[int | Role] = []
        rounds: set[int] = set()
        for part in text.split(","):
            who, at, moment = (piece.strip() for piece in part.partition("@"))
            victims.append(_victim(text, who))
            if at:
                found = _MOMENT.fullmatch(moment)
                if not found:
                    raise ValueError(
                        f"loss {text!r}: {moment!r} is no moment; write extra1 for the first extra round"
                    )
                rounds.add(int(found[1]))
        if len(rounds) > 1:
            raise ValueError(f"loss {text!r} names two moments; give the second one a --lose of its own")
        return cls(text, tuple(victims), max(rounds, default=0))

    def choose(self, census: tuple[Holding, ...]) -> tuple[Holding, ...]:
        """The replicas that die. Among several of a role, the replica with the most finished slots
        dies; among equals, the last."""
        number = sum(victim if isinstance(victim, int) else 1 for victim in self.victims)
        if number >= len(census):
            raise ValueError(
                f"loss {self.text!r} takes {number} of {len(census)} living replicas; "
                f"leave at least one alive (lose {len(census) - 1} at most)"
            )
        alive = {role: _most_in_hand_last(census, role) for role in Role}
        dead: list[Holding] = []
        for victim in self.victims:
            for _ in range(victim if isinstance(victim, int) else 1):
                role = next(role for role in Role if alive[role]) if isinstance(victim, int) else victim
                if not alive[role]:
                    left = ", ".join(f"{len(those)} {role}" for role, those in alive.items() if those)
                    raise ValueError(f"loss {self.text!r}: no {role} is left alive; there are {left}")
                dead.append(alive[role].pop())
        return tuple(dead)


@dataclass(frozen=True)
class Join:
    """`count` replicas join between two steps."""

    count: int

    @classmethod
    def parse(cls, text: str) -> Join:
        if not text.strip().isdecimal() or int(text) < 1:
            raise ValueError(f"join {text!r} is no number of replicas; write one from 1 on")
        return cls(int(text))


def _victim(text: str, who: str) -> int | Role:
    if who.isdecimal() and int(who) > 0:
        return int(who)
    try:
        return Role(who)
    except ValueError:
        raise ValueError(
            f"loss {text!r}: {who!r} is neither a role nor a number of replicas; "
            f"write {', '.join(Role)} or a number from 1 on"
        ) from None


def _most_in_hand_last(census: tuple[Holding, ...], role: Role) -> list[Holding]:
    return sorted((h for h in census if h.role is role), key=lambda h: (len(h.slots), h.replica))
