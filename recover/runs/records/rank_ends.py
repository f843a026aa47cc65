"""How the ranks of a launch ended, in words: from the lines that the launcher wrote about their exits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from recover.runs.records.kinds import Line

_SHOWN = 3  # different ends that are listed


def went_well(exit: Line) -> bool:
    """Whether a rank has ended as it should."""
    return not left_on_notice(exit) and bool(
        exit.get("words", {}).get("end") == "done" or exit.get("code") == 0
    )


def left_on_notice(exit: Line) -> bool:
    """Whether a rank has ended because its host was asked to leave."""
    return bool(exit.get("words", {}).get("end") == "left")


def raised_outside_step(exits: Iterable[Line]) -> str:
    """`rank 1 raised KeyError: 'x', at script.py:20`; "" if no rank raised outside of any step."""
    groups: dict[str, list[int]] = {}
    for line in exits:
        words = line.get("words", {})
        if words.get("end") == "raised" and words.get("ordinary") is False:  # older versions do not tell
            # The details of our own exceptions go on with a remedy, after a semicolon.
            what = str(words.get("detail") or words.get("kind") or "an exception").partition(";")[0]
            groups.setdefault(f"raised {what}, at {words.get('place') or 'the end'}", []).append(line["rank"])
    return _in_words(groups)


def losses(exits: Sequence[Line]) -> str:
    """`ranks 0-2 raised: ValueError: ..., at script.py:20`. Orphans, which only followed another rank of their
    replica, are left out unless all are orphans."""
    causes = [line for line in exits if line.get("words", {}).get("end") != "orphan"]
    groups: dict[str, list[int]] = {}
    for line in causes or exits:
        groups.setdefault(_how(line), []).append(line["rank"])
    return _in_words(groups)


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if sum(map(len, runs)) == 1 else 's'} {text}"


def _how(line: Line) -> str:
    if words := line.get("words"):
        detail = f": {words['detail']}" if words.get("detail") else ""
        return f"{words.get('end')}{detail}" + (f", at {words['place']}" if words.get("place") else "")
    if line.get("crash"):
        return "crashed"
    if signal := line.get("signal"):
        return f"killed by {signal}"
    return f"left with exit code {line['code']}" if line.get("code") else "ended without a marker"


def _in_words(groups: Mapping[str, Sequence[int]]) -> str:
    told = [f"{name_ranks(ranks)} {how}" for how, ranks in groups.items()]
    more = [f"{len(told) - _SHOWN} more in the logs"] if len(told) > _SHOWN else []
    return "; ".join([*told[:_SHOWN], *more])
