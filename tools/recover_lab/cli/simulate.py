"""`recover simulate`: the cost of failures on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recover.cli.errors import refusals
from recover.cli.keyed_command import KeyedCommand


class SimulateCommand(KeyedCommand):
    """A command whose help ends with all keys, which are imported only for the help."""

    def keys(self) -> set[str]:
        from recover_lab.simulate.question_words import WORDS
        from recover_lab.simulate.scenario import keys_of_scenario

        return {*WORDS, *(key for key, _, _ in keys_of_scenario())}

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from recover_lab.simulate.presets import PRESETS
        from recover_lab.simulate.question_words import WORDS
        from recover_lab.simulate.scenario import keys_of_scenario

        with formatter.section("Words for the most asked question, as word=value"):
            formatter.write_dl(list(WORDS.items()))
        with formatter.section("Presets"):
            formatter.write_dl([(name, found.about) for name, found in PRESETS.items()])
        rows = [
            (key, f"{meaning}  [default: {'null' if default is None else default}]")
            for key, default, meaning in keys_of_scenario()
        ]
        with formatter.section("Keys, in CONFIG.yaml or as key=value"):
            formatter.write_dl(rows)


def simulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...",
            help="Cluster and job, such as gpus=1024 mtbf_hours=72 mtbf_of=job; the keys are listed below.",
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A cluster from a publication.")] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="RUN | BENCH.json", help="Take measured values from there; may be repeated."
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=LOW:HIGH[:POINTS]",
            help="Goodput of all systems against one key, such as nodes=8:80000.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Write a page with pictures, and JSON, there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    brief: Annotated[
        bool,
        typer.Option("--brief", help="Only the comparison: no other rates, no spare node, no break-even."),
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Compare published figures with simulated ones instead.")
    ] = False,
) -> None:
    """Cost of failures on a cluster, in virtual time: the answer in a sentence, then tables of all systems."""
    import json

    from recover_lab.simulate.answer import NO_ANSWER
    from recover_lab.simulate.study import ask, parse_sweep, study

    if published:
        return _published(as_json)
    with refusals("recover simulate"):
        question = ask(words or [], preset, source or [])
        if sweep:
            parse_sweep(sweep)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        found = study(question, sweep, more=not brief)
    if output is not None:
        from recover_lab.simulate.simulation_page import build_simulation

        typer.echo(f"page: {build_simulation(found, output)}", err=True)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    from recover_lab.simulate import simulation_tables as tables

    headline, *reasons = found.answer.sentences() if found.answer else [NO_ANSWER]
    typer.echo("\n".join(filter(None, [headline, question.assumed_model])) + "\n")
    reasons += [found.verification.sentence()] if found.verification else []
    for sentence in (*reasons, *question.understood):
        typer.echo(f"- {sentence}")
    typer.echo("")
    show = _screen()
    show(question.title, tables.system_rows(found))
    for note in question.notes:
        typer.echo(note)
    show("Where the rest goes", tables.lost_rows(found))
    show("Goodput at other rates", tables.rate_rows(found))
    show("Where they cross", tables.crossing_rows(found))
    show(tables.CHANGES, tables.value_rows(found))


def _published(as_json: bool) -> None:
    import json

    from recover_lab.simulate.published import compare_all
    from recover_lab.simulate.simulation_tables import published_rows

    compared = compare_all()
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in compared]))
        return
    _screen()("Published and simulated", published_rows(compared))
    typer.echo("Sources:\n" + "\n".join(dict.fromkeys(row.source for row in compared if row.source)))


def _screen() -> Any:
    import sys

    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)

    def show(title: str, rows: list[list[str]]) -> None:
        if not rows:
            return
        table = Table(title=title, title_justify="left")
        for place, column in enumerate(rows[0]):
            table.add_column(column, justify="right" if place else "left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)

    return show


def add_simulate(app: typer.Typer) -> None:
    app.command(cls=SimulateCommand)(simulate)
