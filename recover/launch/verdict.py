"""How the ranks of a job ended, read from the markers that they left."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recover.job.record_files import FILES
from recover.runs.records.rank_ends import name_ranks
from recover.world.rank_exit import End, session_marker

RAISED = 4  # exit code: a rank raised outside of any step, and no other rank makes good what it left undone


class EndOfRank(NamedTuple):
    """The files of a rank in the run directory."""

    end: str | None  # its marker as text; None without a marker
    raised: str  # exception and place, if it raised outside of any step; else ""
    crashed: bool  # in native code


class Verdict:
    """The ranks that finished, those that left on notice, and those that were lost, and how. A rank
    without a marker crashed in native code or was killed, unless it is `unfinished`: then the launcher
    ended it. Ranks in `known` are not read again.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: int | Iterable[int],
        unfinished: Collection[int] = (),
        known: Mapping[int, EndOfRank] | None = None,
    ) -> None:
        self.directory = run_dir / "ranks"
        everyone = range(ranks) if isinstance(ranks, int) else sorted(ranks)
        self.left = {rank: (known or {}).get(rank) or self._read(rank) for rank in everyone}
        ends = {rank: left.end for rank, left in self.left.items()}
        self.raised = {rank: left.raised for rank, left in self.left.items() if left.raised}
        self.done = [rank for rank, end in ends.items() if end == End.DONE]
        self.silent = [rank for rank, end in ends.items() if end is None]
        self.crashed = [rank for rank in self.silent if self.left[rank].crashed]
        self.left_on_notice = [rank for rank, end in ends.items() if end and end.startswith(f"{End.LEFT}:")]
        words = dict.fromkeys(self.silent, "killed")
        words |= dict.fromkeys(unfinished, "unfinished") | dict.fromkeys(self.crashed, "crashed")
        well = {*self.done, *self.left_on_notice}
        self.lost = {rank: end or words[rank] for rank, end in ends.items() if rank not in well}

    def losses(self) -> str:
        """The losses in words: `ranks 1-3 killed; rank 5 raised: ValueError: ...`"""
        groups: dict[str, list[int]] = {}
        for rank, how in self.lost.items():
            groups.setdefault(how, []).append(rank)
        return "; ".join(f"{name_ranks(ranks)} {how}" for how, ranks in groups.items())

    def repeated(self, replica_size: int) -> str:
        """A sentence about the exception that two replicas raised at the same place outside of any
        step; or ""."""
        replicas: dict[str, set[int]] = {}
        for rank, what in self.raised.items():
            replicas.setdefault(what, set()).add(rank // replica_size)
        for what, who in replicas.items():
            if len(who) > 1:
                names = ", ".join(map(str, sorted(who)))
                return (
                    f"replicas {names} raised the same outside of any step, and the next would, too: {what}"
                )
        return ""

    def raised_outside_step(self) -> str:
        """`rank 0 raised outside of any step: OSError at script.py:12, in save`; "" if no rank
        did."""
        groups: dict[str, list[int]] = {}
        for rank, what in self.raised.items():
            groups.setdefault(what, []).append(rank)
        return "; ".join(
            f"{name_ranks(ranks)} raised outside of any step: {what}" for what, ranks in groups.items()
        )

    def has_started(self, rank: int) -> bool:
        """Whether a rank has made the file for its stack, which it does first."""
        return (self.directory / f"{rank}.stack").exists()

    def started_for(self, rank: int) -> float:
        """Seconds since the rank has started; 0 if it has not."""
        try:
            return max(0.0, time.time() - (self.directory / f"{rank}.stack").stat().st_mtime)
        except OSError:
            return 0.0

    def stack(self, rank: int) -> str:
        """The stacks of the rank's threads, when the launcher asked for them, or when native code
        crashed."""
        return (FILES.read(self.directory / f"{rank}.stack") or b"").decode(errors="replace")

    def _read(self, rank: int) -> EndOfRank:
        marker = as_marker(FILES.read(self.directory / f"{rank}.end"))
        if marker is None:
            return EndOfRank(None, "", "Fatal Python error" in self.stack(rank))
        outside = marker["end"] == End.RAISED and not marker.get("ordinary")
        raised = (
            f"{marker.get('kind', 'an exception')} at {marker.get('place') or 'the end'}" if outside else ""
        )
        return EndOfRank(_in_words(marker), raised, False)


def as_marker(data: bytes | str | None) -> dict[str, Any] | None:
    """The content of a marker; None if there is none, or it is no marker."""
    try:
        marker = json.loads(data) if data else None
    except ValueError:
        return None
    return marker if isinstance(marker, dict) and {"end", "detail"} <= marker.keys() else None


def marker_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "ranks" / f"{rank}.end"


def write_marker(run_dir: Path, rank: int, marker: Mapping[str, Any]) -> None:
    """Write the marker of a rank that cannot write it, or that has written it on another host.
    Never raises."""
    FILES.replace(marker_file(run_dir, rank), json.dumps(marker).encode() + b"\n")


def find_marker(run_dir: Path, session: Path, rank: int) -> str:
    """The marker of a rank from the run directory. If the disk did not take it, it is read from the
    session, and written to the run directory. "" if there is none."""
    path = marker_file(run_dir, rank)
    data = FILES.read(path)
    if as_marker(data) is None:
        data = FILES.read(session_marker(session, rank))
        if as_marker(data) is None:
            return ""
        assert data is not None
        FILES.replace(path, data)
    assert data is not None
    return data.decode()


def _in_words(marker: dict[str, Any]) -> str:
    return f"{marker['end']}: {marker['detail']}" if marker["detail"] else str(marker["end"])
