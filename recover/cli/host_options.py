"""Command-line options for several hosts and for restarts of lost replicas, named as in torchrun where it has them."""

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
OPTIONS: dict[str, Any] = {
    "nnodes": Annotated[
        str | None, _option("Number of hosts; 3:4 starts with three of at most four.", "N[:M]")
    ],
    "nproc_per_node": Annotated[
        str | None, _option("Ranks on this host: a number, gpu or auto.  [default: 1]", "K")
    ],
    "rdzv_endpoint": Annotated[
        str | None,
        _option(
            "Address of an etcd, or of the one or three hosts that start one.",
            "HOST:PORT[,HOST:PORT,HOST:PORT]",
        ),
    ],
    "rdzv_id": Annotated[str | None, _option("Name of the job, the same on every host.", "JOB")],
    "rdzv_backend": Annotated[
        str | None, _option("For torchrun's command lines; hosts always use etcd.", "etcd")
    ],
    "rdzv_patience": Annotated[
        float, _option("Seconds without an answer from etcd after which ranks that need it exit.", "SECONDS")
    ],
    "join_timeout": Annotated[float, _option("Seconds to wait for all hosts at the start.", "SECONDS")],
    "lease": Annotated[float, _option("Seconds without a sign of life until a host is lost.", "SECONDS")],
    "interface": Annotated[
        str | None,
        _option(
            "Network interface or address for data.  [default: the one that routes to the endpoint]", "NAME"
        ),
    ],
    "host_name": Annotated[
        str | None, _option("Name of this host in the job.  [default: its host name]", "NAME")
    ],
    "token_file": Annotated[
        Path | None,
        _option(
            "File with a secret, the same on every host; required with several hosts unless etcd exists already.",
            "FILE",
        ),
    ],
    "etcd_dir": Annotated[
        Path | None, _option("Data directory of an etcd that is started.  [default: in memory]", "DIR")
    ],
    "etcd_prefix": Annotated[str, _option("Prefix of all keys, for an etcd that is shared.", "PREFIX")],
    "etcd_user": Annotated[str | None, _option("User name at an existing etcd.", "NAME")],
    "etcd_password_file": Annotated[Path | None, _option("File with the password of --etcd-user.", "FILE")],
    "etcd_ca": Annotated[Path | None, _option("CA certificate of etcd; turns TLS on.", "FILE")],
    "etcd_cert": Annotated[Path | None, _option("Client certificate for etcd.", "FILE")],
    "etcd_key": Annotated[Path | None, _option("Key of the client certificate.", "FILE")],
    "returns": Annotated[
        bool,
        typer.Option("--return", help="Restart lost replicas, and let hosts join later; uses etcd."),
    ],
    "return_delay": Annotated[
        float,
        _option("Seconds before the slot of a lost rank is used again, from its second loss on.", "SECONDS"),
    ],
    "forgive": Annotated[
        float,
        _option(
            "A slot in which ranks died twice is not used again, unless a rank has run there for this long.",
            "SECONDS",
        ),
    ],
    "ready": Annotated[
        bool,
        typer.Option(
            "--ready/--no-ready",
            help="With --return: keep processes that have imported torch already, for faster restarts.",
        ),
    ],
    "standby": Annotated[
        int, _option("Number of replicas that are started and wait for a loss; implies --return.", "K")
    ],
    "warm_up": Annotated[
        float, _option("Seconds after which a restarted rank that is not ready is killed.", "SECONDS")
    ],
    "on_term": Annotated[
        str,
        _option(
            "On SIGTERM to this host: leave, so that the others go on, or stop the whole job.", "leave|stop"
        ),
    ],
    "grace": Annotated[
        float,
        _option("Seconds after which a host that was asked to leave does not wait for its step.", "SECONDS"),
    ],
}


def with_host_options(*names: str) -> Callable[[Command], Command]:
    """Decorator that adds these host options, or all of them, to a command, which receives them as `several`."""
    defaults = {field.name: field.default for field in fields(HostOptions)}
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=OPTIONS[name]
        )
        for name in names or OPTIONS
    ]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            several = HostOptions(**{option.name: given.pop(option.name) for option in options})
            command(**given, several=several)

        signature = inspect.Signature([*(each for each in own if each.name != "several"), *options])
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        return wrapped

    return decorate
