"""The narration of `recover plan`: a rehearsal of losses and joins as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recover.job.optional_packages import need
from recover.policy import get_policy
from recover.policy.losses import Join, Loss
from recover.policy.plan import Layout
from recover.policy.rehearsal import Growth, Outcome, Rehearsal, promotions, rehearse
from recover.policy.roles import Role

if TYPE_CHECKING:
    from rich.table import Table


# By word: where it appears in the table, and its meaning; each fits on a line of 80 columns.
_WORDS = {
    "replica": (r"\breplicas\b", "one copy of the model, on one or more GPUs"),
    "microbatch": (r"\bmicrobatches\b", "one forward and backward pass of a replica"),
    "major": (r"\bmajor\b(?!-)", 'runs the full share of a step; "28 major x 9": 28 run 9 each'),
    "minor": (r"(?<!-)\bminor\b(?!-)", "runs a smaller share, so that all shares add up to B"),
    "major-spare": (r"\bmajor-spare\b", "computes as much as a major; not used until it is promoted"),
    "minor-spare": (r"\bminor-spare\b", "computes as much as a minor; not used until it is promoted"),
    "promoted": (r"\bpromoted\b", "the work of a spare replaces that of a lost replica"),
    "run N more": (r"\brun \d+ more\b", "a boundary: spares do not cover the loss, N extra rounds do"),
    "boundary-minor": (r"\bboundary-minors\b", "runs one extra microbatch less than the others"),
    "left out": (r"\bleft out\b", "computed by a spare, and not used in this step"),
    "extra round": (r"\bin extra round\b", "a round that makes up for the loss before this one"),
    "commits": (r"\bcommits\b", "microbatches in the sum that the optimizer is given"),
}


def tell(
    policy: str,
    replicas: int,
    accum: int,
    global_batch: int | None,
    events: list[Loss | Join],
    until: int | None,
    *,
    as_json: bool,
    png: Path | None,
) -> None:
    """Rehearse, print, and draw if a range or a picture was asked for."""
    story = rehearse(
        get_policy(policy, replicas),
        replicas,
        accum,
        events,
        until,
        global_batch,
    )
    if until is not None or png is not None:
        png = png or Path("plan.png")
        save_picture(story, png)
        print(f"picture: {png}", file=sys.stderr)
    if as_json:
        print(json.dumps(to_json(story)))
        return
    from rich.console import Console

    console = Console(highlight=False)
    table = to_table(story)
    console.print(table)
    console.print(totals(story))
    console.print("\nWords:")
    for word, meaning in explained(table):
        console.print(f"  {word:14} {meaning}")


def to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    return {
        "global_batch": rehearsal.global_batch,
        "events": [_event(outcome) for outcome in rehearsal.outcomes],
    }


def _event(outcome: Outcome | Growth) -> dict[str, Any]:
    if isinstance(outcome, Growth):
        return {
            "joined": outcome.count,
            "replicas": len(outcome.next.shares),
            "committed_microbatches": outcome.next.committed,
            "next": _layout(outcome.next),
        }
    decision = outcome.decision
    promoted = promotions(outcome)
    return {
        "lost": [str(role) for role in outcome.lost],
        "survivors": len(decision.shares),
        "boundary": decision.boundary,
        "promoted": {"major": promoted[Role.MAJOR], "minor": promoted[Role.MINOR]},
        "extra": {
            "rounds": decision.rounds,
            "full": decision.full,
            "boundary_minors": len(decision.shares) - decision.full if decision.boundary else 0,
        },
        "discarded_microbatches": decision.discarded,
        "committed_microbatches": decision.committed,
        "next": _layout(outcome.next),
    }


def _layout(layout: Layout) -> dict[str, int]:
    roles = layout.roles()
    return {
        "accum": layout.accum,
        "major": roles[Role.MAJOR],
        "minor": roles[Role.MINOR],
        "remainder": layout.remainder,
        "major_spare": roles[Role.MAJOR_SPARE],
        "minor_spare": roles[Role.MINOR_SPARE],
    }


def to_table(rehearsal: Rehearsal) -> Table:
    from rich import box
    from rich.table import Table

    start = rehearsal.start
    table = Table(
        title=f"{len(start.shares)} replicas, {rehearsal.global_batch} microbatches a step, policy {rehearsal.policy}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("lost, joined" if rehearsal.joined else "lost")
    table.add_column("left", justify="right")
    table.add_column("the step goes on with")
    table.add_column("commits", justify="right")
    table.add_column("from the next step on")
    table.add_row("", str(len(start.shares)), "", str(start.committed), _layout_words(start))
    for outcome in rehearsal.outcomes:
        if isinstance(outcome, Growth):
            there, committed = len(outcome.next.shares), outcome.next.committed
            table.add_row(f"+{outcome.count}", str(there), "", str(committed), _layout_words(outcome.next))
            continue
        decision = outcome.decision
        table.add_row(
            _lost_words(outcome),
            str(len(decision.shares)),
            _response_words(outcome),
            str(decision.committed),
            _layout_words(outcome.next),
        )
    return table


def explained(table: Table) -> list[tuple[str, str]]:
    """The words of this table, each with its meaning."""
    cells = " ".join(
        [str(table.title), *(str(c) for column in table.columns for c in (column.header, *column.cells))]
    )
    return [(word, meaning) for word, (pattern, meaning) in _WORDS.items() if re.search(pattern, cells)]


def totals(rehearsal: Rehearsal) -> str:
    lost = sum(len(outcome.lost) for outcome in rehearsal.losses)
    joined = f"{rehearsal.joined} joined, " if rehearsal.joined else ""
    return (
        f"In total: {_many(lost, 'replica')} lost, {joined}{_many(rehearsal.extra_rounds, 'extra round')}, "
        f"{_many(rehearsal.spare_work, 'microbatch', 'microbatches')} of spare work in the steps with a loss."
    )


def _lost_words(outcome: Outcome) -> str:
    counts = {role: outcome.lost.count(role) for role in outcome.lost}
    words = ", ".join(str(role) if count == 1 else f"{count} {role}" for role, count in counts.items())
    return f"{words} in extra round {outcome.loss.extra_round}" if outcome.loss.extra_round else words


def _response_words(outcome: Outcome) -> str:
    decision = outcome.decision
    words = [f"{count} {role}-spare promoted" for role, count in sorted(promotions(outcome).items())]
    if decision.boundary:
        words.append(f"{decision.full} run {decision.rounds} more")
        if others := len(decision.shares) - decision.full:
            words.append(f"{others} boundary-minors run {decision.rounds - 1}")
    if decision.discarded:
        words.append(f"{_many(decision.discarded, 'spare microbatch', 'spare microbatches')} left out")
    return ", ".join(words) or "what is there"


def _layout_words(layout: Layout) -> str:
    roles = layout.roles()
    words = [f"{roles[Role.MAJOR]} major x {layout.accum}"]
    if roles[Role.MINOR]:
        words.append(f"{roles[Role.MINOR]} minor x {layout.remainder}")
    words += [f"{roles[role]} {role}" for role in (Role.MAJOR_SPARE, Role.MINOR_SPARE) if roles[role]]
    return ", ".join(words)


def _many(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def save_picture(rehearsal: Rehearsal, path: Path) -> None:
    """Committed microbatches, rounds per step and the spares' part of all work, by number of survivors."""
    need("matplotlib", "a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layouts = [rehearsal.start, *(outcome.next for outcome in rehearsal.outcomes)]
    survivors = [len(layout.shares) for layout in layouts]
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    committed, rounds, spare = figure.subplots(3, 1, sharex=True)

    committed.step(survivors, [layout.committed for layout in layouts], where="mid")
    committed.axhline(rehearsal.global_batch, color="0.7", linestyle=":", label="B")
    committed.set_ylim(bottom=0)
    committed.set_ylabel("committed microbatches")
    committed.legend()
    committed.set_title(
        f"{survivors[0]} replicas x {rehearsal.start.accum}, policy {rehearsal.policy}", loc="left"
    )

    rounds.step(survivors, [layout.accum for layout in layouts], where="mid", label="steady step")
    after = zip(rehearsal.outcomes, survivors[1:], strict=True)
    struck = [left for outcome, left in after if isinstance(outcome, Outcome)]
    rounds.plot(struck, _rounds_with_loss(rehearsal), ".", label="step with the loss")
    rounds.set_yscale("log", base=2)
    rounds.yaxis.set_major_formatter("{x:g}")
    rounds.set_ylabel("rounds per step")
    rounds.legend()

    spare.step(survivors, [_spare_percent(layout) for layout in layouts], where="mid")
    spare.set_ylim(bottom=0)
    spare.set_ylabel("spare work, % of all")
    spare.set_xlabel("surviving replicas")
    spare.invert_xaxis()  # time runs to the right
    figure.savefig(path, format="png", dpi=120)


def _spare_percent(layout: Layout) -> float:
    return 100 * layout.spare_work / (layout.spare_work + layout.committed)


def _rounds_with_loss(rehearsal: Rehearsal) -> list[int]:
    rounds: list[int] = []
    for outcome in rehearsal.losses:
        so_far = rounds[-1] if outcome.loss.extra_round else outcome.layout.accum
        rounds.append(so_far + outcome.decision.rounds)
    return rounds
