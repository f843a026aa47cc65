"""What became of a job, read from the markers that its ranks left."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from recover.world.ending import End


class Verdict:
    """Who is done and who was lost, and how. A rank without a marker crashed in native code or was killed,
    unless it is one of those that the launcher gave no time to end (`unfinished`)."""

    def __init__(self, run_dir: Path, ranks: int, unfinished: Collection[int] = ()) -> None:
        self.directory = run_dir / "ranks"
        ends = {rank: self._read(rank) for rank in range(ranks)}
        self.done = [rank for rank, end in ends.items() if end == End.DONE]
        self.silent = [rank for rank, end in ends.items() if end is None]
        self.crashed = [r for r in self.silent if "Fatal Python error" in self.stack(r)]
        words = dict.fromkeys(self.silent, "killed")
        words |= dict.fromkeys(unfinished, "unfinished") | dict.fromkeys(self.crashed, "crashed")
        self.lost = {rank: end or words[rank] for rank, end in ends.items() if end != End.DONE}

    def losses(self) -> str:
        """`ranks 1-3 killed; rank 5 raised: ValueError: ...`"""
        groups: dict[str, list[int]] = {}
        for rank, how in self.lost.items():
            groups.setdefault(how, []).append(rank)
        return "; ".join(f"{name_ranks(ranks)} {how}" for how, ranks in groups.items())

    def has_started(self, rank: int) -> bool:
        """The first thing that a rank does is to make the file for its stack."""
        return (self.directory / f"{rank}.stack").exists()

    def stack(self, rank: int) -> str:
        """What the rank's threads were doing when it was asked, or when native code crashed under it."""
        path = self.directory / f"{rank}.stack"
        return path.read_text(errors="replace") if path.exists() else ""

    def _read(self, rank: int) -> str | None:
        try:
            marker = json.loads((self.directory / f"{rank}.end").read_text())
        except FileNotFoundError:
            return None
        return f"{marker['end']}: {marker['detail']}" if marker["detail"] else str(marker["end"])


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if sum(map(len, runs)) == 1 else 's'} {text}"
