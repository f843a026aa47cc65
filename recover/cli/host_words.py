"""What `recover run` and `recover train` are told about several hosts, with torchrun's words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _option(help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, metavar=metavar)
    return option


Nnodes = Annotated[str | None, _option("How many hosts; 3:4 begins with three of four.", "N[:M]")]
NprocPerNode = Annotated[str | None, _option("Ranks on this host: a number, gpu or auto.  [default: 1]", "K")]
RdzvEndpoint = Annotated[
    str | None,
    _option("Where etcd is, or is to be started: one host, or three.", "HOST:PORT[,HOST:PORT,HOST:PORT]"),
]
RdzvId = Annotated[str | None, _option("The name of the job, the same on every host.", "JOB")]
RdzvBackend = Annotated[str | None, _option("For lines of torchrun's: hosts meet in etcd.", "etcd")]
RdzvPatience = Annotated[
    float, _option("Seconds that etcd may be silent; then ranks that need it end.", "SECONDS")
]
JoinTimeout = Annotated[float, _option("Seconds that the hosts have to come.", "SECONDS")]
Lease = Annotated[float, _option("Seconds without a sign after which a host is lost.", "SECONDS")]
Interface = Annotated[
    str | None,
    _option("Interface or address for data.  [default: the one that leads to the endpoint]", "NAME"),
]
HostName = Annotated[str | None, _option("What this host is called in the job.  [default: its name]", "NAME")]
TokenFile = Annotated[
    Path | None,
    _option("A secret that every host has a copy of.  [default: made anew, and kept in etcd]", "FILE"),
]
EtcdDir = Annotated[
    Path | None, _option("Where an etcd that is started keeps its data.  [default: in memory]", "DIR")
]
EtcdPrefix = Annotated[str, _option("Of all keys, in an etcd that others use, too.", "PREFIX")]
EtcdUser = Annotated[str | None, _option("Who we are to an existing etcd.", "NAME")]
EtcdPasswordFile = Annotated[Path | None, _option("Its password.", "FILE")]
EtcdCa = Annotated[Path | None, _option("Who signed etcd's certificate; TLS is used.", "FILE")]
EtcdCert = Annotated[Path | None, _option("What we show of ourselves.", "FILE")]
EtcdKey = Annotated[Path | None, _option("Its key.", "FILE")]
Return = Annotated[
    bool,
    typer.Option(
        "--return", help="Start lost replicas again, and let hosts come later: the job stands on etcd."
    ),
]
ReturnDelay = Annotated[float, _option("How long the place of a lost rank rests before.", "SECONDS")]
Forgive = Annotated[
    float,
    _option(
        "A place where ranks die twice is not tried again, unless one has worked there for so long.",
        "SECONDS",
    ),
]
Standby = Annotated[int, _option("Replicas that are ready, and wait for a loss; implies --return.", "K")]
