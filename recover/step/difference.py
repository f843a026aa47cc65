"""Finds the entry of the state in which replicas differ, so that an eviction has a reason.

The members compare state entry by entry only after a vote has found a difference. Each round of
questions is one more repair, in whose census every member answers: first with a digest for each
kind of entry, then for parts of the first kind that differs, until one entry is left. An answer
has a few hundred bytes, whatever the size of the model; a death in between is an ordinary death.
The questions follow from the census alone, so all members, including those about to be evicted,
find the same reasons.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PARTS = 64  # digests in an answer
ASKED = 4  # different questions in one round; others wait for the next round
WIDTH = 8  # hexadecimal digits of a digest in an answer
SHOWN = 80  # characters of a name or a value
UNKNOWN = "its state differs from the majority"


class StateKind(StrEnum):
    """Kinds of entries, in the order in which differences are looked for: causes before effects."""

    SETTING = "setting"
    SCHEDULER = "scheduler"
    TRAINED = "trained"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    EXTRA = "extra"


@dataclass(frozen=True)
class Digest:
    """An entry: the hash of a tensor's bits, or a plain value as text."""

    kind: StateKind
    name: str
    value: str
    is_tensor: bool = False


@dataclass(frozen=True, order=True)
class DigestQuestion:
    """Asks for entries `start` to `stop` of one kind; without a kind, for all."""

    kind: str = ""
    start: int = 0
    stop: int = 0

    def parts(self) -> list[DigestQuestion]:
        size = -(-(self.stop - self.start) // PARTS)
        starts = range(self.start, self.stop, size) if size else ()
        return [DigestQuestion(self.kind, at, min(at + size, self.stop)) for at in starts]


WHOLE = DigestQuestion()


@dataclass(frozen=True)
class Difference:
    """The first entry in which a replica differs; name and values are empty where they are not
    known."""

    kind: str = ""
    name: str = ""
    here: str | None = None  # values of entries that are not tensors
    there: str | None = None

    def reason(self) -> str:
        """The reason for an eviction."""
        first = f", first in {self.name}" if self.name else ""
        values = f"{self.name} {self.here}, the others have {self.there}"
        match self.kind:
            case StateKind.SETTING if self.name:
                return values
            case StateKind.SETTING:
                return "its optimizer has other parameter groups or settings than the majority"
            case StateKind.SCHEDULER:
                told = f": {values}" if self.here is not None else first
                return f"its scheduler differs from the majority{told}"
            case StateKind.TRAINED:
                return f"it trains other parameters than the majority{first}"
            case StateKind.PARAMETER:
                return f"its parameters differ from the majority{first}"
            case StateKind.BUFFER:
                return f"its buffers differ from the majority{first}"
            case StateKind.OPTIMIZER:
                return f"its optimizer state differs from the majority{first}"
            case StateKind.EXTRA:
                told = f": {values}" if self.here is not None else first
                return f"its extra state differs from the majority{told}"
        return UNKNOWN

    def between(self, here: str, there: str) -> str:
        """The difference of two groups of replicas, where there is no majority."""
        if self.here is not None:
            return f"{self.name} is {self.here} on {here}, and {self.there} on {there}"
        what = f"the first difference is in {self.name} ({self.kind})" if self.name else ""
        return what or (f"they differ in entries of the kind {self.kind!r}" if self.kind else "")


class Inquiry:
    """The rounds of questions after one vote. `entries` returns this rank's digests; it is
    called in the first round."""

    def __init__(self, entries: Callable[[], Sequence[Digest]]) -> None:
        self._make_entries = entries
        self.forget()

    def forget(self) -> None:
        """Drop questions and answers: all are answered, or the state has changed."""
        self._entries: Mapping[str, list[Digest]] | None = None
        self._asked: tuple[DigestQuestion, ...] = ()
        self._paths: dict[int, DigestQuestion] = {}
        self.found: dict[int, Difference] = {}

    def answer(self) -> bytes:
        """This rank's answer for the census of the round; empty without a question."""
        if not self._asked:
            return b""
        if self._entries is None:
            made = self._make_entries()
            self._entries = {kind: [entry for entry in made if entry.kind == kind] for kind in StateKind}
        return json.dumps([self._answer_to(question) for question in self._asked]).encode()

    def goes_on(self, compared: Mapping[int, tuple[bytes, bytes]]) -> bool:
        """Whether another round is needed. `compared`: for each replica that differs, its own
        answer and the answer of a rank with the other state, of the shard in which they differ."""
        if not self._asked:
            self._paths = dict.fromkeys(sorted(compared), WHOLE)
        else:
            for replica, question in list(self._paths.items()):
                if replica not in compared:
                    del self._paths[replica]  # it has died
                elif question in self._asked:
                    at = self._asked.index(question)
                    here, there = (json.loads(answer)[at] if answer else None for answer in compared[replica])
                    self._follow(replica, question, here, there)
        self._asked = tuple(sorted(set(self._paths.values()))[:ASKED])
        return bool(self._asked)

    def _follow(self, replica: int, question: DigestQuestion, here: Any, there: Any) -> None:
        """Narrow the search of one replica, or note the entry that was found."""
        del self._paths[replica]
        if here is None or there is None or here == there:
            self.found.setdefault(replica, Difference(question.kind))
        elif question == WHOLE:
            kind = next(kind for kind in StateKind if here[kind] != there[kind])
            (count, _), (others, _) = here[kind], there[kind]
            self.found[replica] = Difference(kind)
            if count == others and count:
                self._paths[replica] = DigestQuestion(kind, 0, count)
        elif question.stop - question.start > 1:
            at = next(
                (n for n in range(0, len(here), WIDTH) if here[n : n + WIDTH] != there[n : n + WIDTH]), 0
            )
            self._paths[replica] = question.parts()[at // WIDTH]
        else:
            name, mine, is_tensor = here
            if name == there[0]:
                values = (None, None) if is_tensor else (mine, there[1])
                self.found[replica] = Difference(question.kind, name, *values)

    def _answer_to(self, question: DigestQuestion) -> Any:
        assert self._entries is not None
        if question == WHOLE:
            return {kind: (len(entries), _hash(entries)) for kind, entries in self._entries.items()}
        entries = self._entries[question.kind]
        if question.stop - question.start > 1:
            return "".join(_hash(entries[part.start : part.stop]) for part in question.parts())
        if question.start >= len(entries):
            return None
        entry = entries[question.start]
        return entry.name[:SHOWN], entry.value[:SHOWN], entry.is_tensor


def _hash(entries: Sequence[Digest]) -> str:
    digest = hashlib.blake2b(digest_size=WIDTH // 2)
    for entry in entries:
        digest.update(f"{entry.name}={entry.value};".encode(errors="replace"))
    return digest.hexdigest()
