"""What commands are told about hosts, and about replicas that come back, with torchrun's words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from recover.job.host_options import HostOptions


def _option(help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, metavar=metavar)
    return option


Command = Callable[..., None]
WORDS: dict[str, Any] = {
    "nnodes": Annotated[str | None, _option("How many hosts; 3:4 begins with three of four.", "N[:M]")],
    "nproc_per_node": Annotated[
        str | None, _option("Ranks on this host: a number, gpu or auto.  [default: 1]", "K")
    ],
    "rdzv_endpoint": Annotated[
        str | None,
        _option("Where etcd is, or is to be started: one host, or three.", "HOST:PORT[,HOST:PORT,HOST:PORT]"),
    ],
    "rdzv_id": Annotated[str | None, _option("The name of the job, the same on every host.", "JOB")],
    "rdzv_backend": Annotated[str | None, _option("For lines of torchrun's: hosts meet in etcd.", "etcd")],
    "rdzv_patience": Annotated[
        float, _option("Seconds that etcd may be silent; then ranks that need it end.", "SECONDS")
    ],
    "join_timeout": Annotated[float, _option("Seconds that the hosts have to come.", "SECONDS")],
    "lease": Annotated[float, _option("Seconds without a sign after which a host is lost.", "SECONDS")],
    "interface": Annotated[
        str | None,
        _option("Interface or address for data.  [default: the one that leads to the endpoint]", "NAME"),
    ],
    "host_name": Annotated[
        str | None, _option("What this host is called in the job.  [default: its name]", "NAME")
    ],
    "token_file": Annotated[
        Path | None,
        _option(
            "A secret that every host has a copy of; with several hosts needed unless etcd is there already.",
            "FILE",
        ),
    ],
    "etcd_dir": Annotated[
        Path | None, _option("Where an etcd that is started keeps its data.  [default: in memory]", "DIR")
    ],
    "etcd_prefix": Annotated[str, _option("Of all keys, in an etcd that others use, too.", "PREFIX")],
    "etcd_user": Annotated[str | None, _option("Who we are to an existing etcd.", "NAME")],
    "etcd_password_file": Annotated[Path | None, _option("Its password.", "FILE")],
    "etcd_ca": Annotated[Path | None, _option("Who signed etcd's certificate; TLS is used.", "FILE")],
    "etcd_cert": Annotated[Path | None, _option("What we show of ourselves.", "FILE")],
    "etcd_key": Annotated[Path | None, _option("Its key.", "FILE")],
    "returns": Annotated[
        bool,
        typer.Option(
            "--return", help="Start lost replicas again, and let hosts come later: the job stands on etcd."
        ),
    ],
    "return_delay": Annotated[float, _option("How long the place of a lost rank rests before.", "SECONDS")],
    "forgive": Annotated[
        float,
        _option(
            "A place where ranks die twice is not tried again, unless one has worked there for so long.",
            "SECONDS",
        ),
    ],
    "ready": Annotated[
        bool,
        typer.Option(
            "--ready/--no-ready",
            help="With --return: keep processes that have imported torch, so that a lost replica is back sooner.",
        ),
    ],
    "standby": Annotated[
        int, _option("Replicas that are ready, and wait for a loss; implies --return.", "K")
    ],
    "warm_up": Annotated[
        float, _option("One that is started again is ended if it is not ready after so long.", "SECONDS")
    ],
}


def about_hosts(*names: str) -> Callable[[Command], Command]:
    """A command with these options, or all of them; it gets them together, as `several`."""
    defaults = {field.name: field.default for field in fields(HostOptions)}
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=WORDS[name]
        )
        for name in names or WORDS
    ]

    def widen(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def told(**given: Any) -> None:
            several = HostOptions(**{option.name: given.pop(option.name) for option in options})
            command(**given, several=several)

        signature = inspect.Signature([*(each for each in own if each.name != "several"), *options])
        told.__signature__ = signature  # type: ignore[attr-defined]
        return told

    return widen
