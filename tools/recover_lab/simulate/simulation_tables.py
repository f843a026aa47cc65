"""Tables of a simulated cluster, for the screen and for the page."""

from __future__ import annotations

from collections.abc import Sequence

from recover_lab.simulate.account import PARTS
from recover_lab.simulate.break_even import FEW_SEEDS, signs
from recover_lab.simulate.number_words import quantity
from recover_lab.simulate.published import Compared
from recover_lab.simulate.replay import ReplayComparison
from recover_lab.simulate.scenario import flat_scenario, keys_of_scenario
from recover_lab.simulate.study import Question, Study, name_of, span

Rows = list[list[str]]
CHANGES = f"What a change is worth (shorter runs, at most {FEW_SEEDS} seeds)"


_NEVER_CROSSED = {
    1: "is ahead or even at every rate tried, against",
    0: "is even at every rate tried with",
    -1: "is behind or even at every rate tried, against",
}


def system_rows(study: Study) -> Rows:
    batch = study.question.scenario.global_batch
    rows: Rows = [
        [
            "system",
            "goodput",
            "tokens a day",
            "days to the budget",
            f"batch (B = {batch:,})",
            "restarts",
            "rejoins",
        ]
    ]
    for name, result in study.results.items():
        good, days = result.goodput, result.days_to_budget
        held = f"{result.batch:,.0f}"
        if result.smallest_batch and result.smallest_batch < result.batch:
            held = f"{result.batch:,.1f}, least {result.smallest_batch:,}"
        rows.append(
            [
                name_of(name),
                f"{good.mean:.1%} ({good.low:.1%} to {good.high:.1%})",
                quantity(result.tokens_per_day.mean, " "),
                f"{days.mean:,.1f}" if days.mean < 1e5 else "never",
                held,
                f"{result.restarts:,.0f}",
                f"{result.joined:,.0f}",
            ]
        )
    return rows


def lost_rows(study: Study) -> Rows:
    """The three largest parts of what each system loses."""
    rows: Rows = [["system", "where the rest goes"]]
    for name, result in study.results.items():
        parts = sorted(
            (
                (share, part)
                for part, share in result.parts.items()
                if part != "productive" and share > 0.0005
            ),
            reverse=True,
        )
        told = ", ".join(f"{PARTS[part]} {share:.1%}" for share, part in parts[:4])
        rows.append([name_of(name), told or "nothing"])
    return rows


def crossing_rows(study: Study) -> Rows:
    if study.rates is None:
        return []
    scenario = study.question.scenario
    rows: Rows = [["", "failures per node and day", "one every"]]
    for one, other, rate in study.crossed:
        between = scenario.between_failures * scenario.failures.per_node_day / rate
        rows.append([f"{name_of(one)} and {name_of(other)} are even", f"{rate:.2g}", span(between)])
    for one in (one for one in ("recover-return", "recover") if one in study.results):
        groups: dict[str, list[str]] = {}
        for other in study.results:
            if other in ("recover-return", "recover"):
                continue
            found = set(signs(study.rates, one, other)) - {0}
            if (one, other) not in {place[:2] for place in study.crossed}:
                groups.setdefault(_NEVER_CROSSED[max(found, default=0)], []).append(name_of(other))
        rows += [[f"{name_of(one)} {told}", "; ".join(others), ""] for told, others in groups.items()]
    return rows if len(rows) > 1 else []


def rate_rows(study: Study) -> Rows:
    if study.rates is None:
        return []
    rows: Rows = [["failures per node and day", *(f"{value:.2g}" for value in study.rates.values)]]
    rows.append(["one every", *(span(seconds) for seconds in study.rates.between)])
    rows += [
        [name_of(name), *(f"{value:.1%}" for value in values)] for name, values in study.rates.goodput.items()
    ]
    return rows


def value_rows(study: Study) -> Rows:
    if not study.changes:
        return []
    whats = list(dict.fromkeys(change.what for change in study.changes))
    rows: Rows = [["tokens a day", *whats]]
    for name in study.results:
        gains = {change.what: change.gain for change in study.changes if change.system == name}
        rows.append([name_of(name), *(f"{gains[what]:+.1%}" for what in whats)])
    return rows


def parameter_rows(question: Question) -> Rows:
    values, rows = flat_scenario(question.scenario), [["key", "value", "from", "meaning"]]
    for key, _, meaning in keys_of_scenario():
        value = values[key]
        told = "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        rows.append([key, told, question.origins.get(key, "default"), meaning])
    return rows


def published_rows(compared: Sequence[Compared]) -> Rows:
    rows: Rows = [["what", "published", "simulated", "difference", "kind", "because"]]
    rows += [[c.what, c.published, c.simulated, c.difference, c.kind, c.because] for c in compared]
    return rows


def held_rows(held: ReplayComparison) -> Rows:
    rows: Rows = [["step", "recorded", "played", "difference"]]
    rows.append(["all but the first", f"{held.seconds:.1f} s", "", f"{held.total:+.1%}"])
    for step, (took, said, apart) in held.incidents.items():
        rows.append([f"incident in step {step}", f"{took:.2f} s", f"{said:.2f} s", f"{apart:+.1%}"])
    return rows
