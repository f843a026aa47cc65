"""Many ranks on etcd in one process: their fabrics, and agreements of them."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patience import PATIENCE

from recover.world.fabrics.etcd.client import EtcdClient, KeyValue
from recover.world.fabrics.etcd.entry import place
from recover.world.fabrics.etcd.fabric import EtcdFabric
from recover.world.fabrics.etcd.server import EtcdServer, free_port
from recover.world.liveness.board import Board

TOKEN = "the token of these tests"


class EtcdCluster:
    """Three members on this machine, each on an address of its own."""

    def __init__(self, directory: Path) -> None:
        addresses = ["127.0.0.11", "127.0.0.12", "127.0.0.13"]
        self.endpoints = [f"{address}:{_port(address)}" for address in addresses]
        self.members = [
            EtcdServer(directory / endpoint, *_split(endpoint), members=self.endpoints)
            for endpoint in self.endpoints
        ]

    def __enter__(self) -> EtcdCluster:
        for member in self.members:
            member.begin()
        for member in self.members:
            member.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stop()

    def leader(self) -> EtcdServer:
        for member in self.members:
            status = EtcdClient(member.endpoint).ask("/v3/maintenance/status", {})
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise AssertionError("there is no leader")


def add_user(root: EtcdClient, name: str, password: str, prefix: str) -> None:
    """Add a user that may read and write under this prefix alone; later requests without a user are refused. The user
    `root`, with the password root, may do everything."""
    first, last = prefix.encode(), prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
    key, range_end = (base64.b64encode(each).decode() for each in (first, last))
    for path, body in (
        ("user/add", {"name": "root", "password": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "job"}),
        (
            "role/grant",
            {"name": "job", "perm": {"permType": "READWRITE", "key": key, "range_end": range_end}},
        ),
        ("user/add", {"name": name, "password": password}),
        ("user/grant", {"user": name, "role": "job"}),
        ("enable", {}),
    ):
        root.call(f"/v3/auth/{path}", body)


def _split(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.partition(":")
    return address, int(port)


def _port(address: str) -> int:
    """A port that is free on this address, as is the next one."""
    while True:
        port = free_port(address)
        try:
            with socket.socket() as probe:
                probe.bind((address, port + 1))
            return port
        except OSError:
            pass


class Fabrics:
    """Many ranks in one process, each with a fabric and, in an agreement, a thread of its own."""

    def __init__(self, server: EtcdServer, prefix: str, directory: Path) -> None:
        self.server, self.prefix, self.directory = server, prefix, directory
        self.made: list[EtcdFabric] = []
        self.etcd = EtcdClient(server.endpoint, prefix=prefix, token=TOKEN)

    def make(
        self, size: int, client: type[EtcdClient] = EtcdClient, **options: Any
    ) -> tuple[list[EtcdFabric], list[Any]]:
        board = Board(self.directory / "board", size)
        clients = [client(self.server.endpoint, prefix=self.prefix, token=TOKEN) for _ in range(size)]
        options = {"token": TOKEN, "admits": True} | options
        made = [EtcdFabric(each, rank, size, board, **options) for rank, each in enumerate(clients)]
        self.made += made
        return made, clients

    def join(self, size: int, rank: int, client: type[EtcdClient] = EtcdClient, **options: Any) -> EtcdFabric:
        """Add a rank; from `size` on it is a joining rank."""
        made = client(self.server.endpoint, prefix=self.prefix, token=TOKEN)
        options = {"token": TOKEN, "admits": True} | options
        fabric = EtcdFabric(made, rank, size, Board(self.directory / f"board-{rank}", rank + 1), **options)
        self.made.append(fabric)
        return fabric

    def replica(self, size: int, replica_size: int) -> list[EtcdFabric]:
        """Add all ranks of a joining replica."""
        return [self.join(size, rank, replica_size=replica_size) for rank in place(self.etcd)]

    def joiner(self, size: int) -> EtcdFabric:
        return self.replica(size, 1)[0]

    def close(self) -> None:
        for fabric in self.made:
            fabric.close()

    def store(self) -> dict[str, KeyValue]:
        return {found.key: found for found in self.etcd.get_all()[0]}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in parallel. Returns the result of each, or the exception that it raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=[index], daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "an agreement hangs"
    return results


def agree(fabrics: Sequence[EtcdFabric], *words: int) -> list[Any]:
    def vote(fabric: EtcdFabric, word: int) -> Callable[[], Any]:
        return lambda: fabric.agree(word)

    words = words if len(words) == len(fabrics) else words * len(fabrics)
    return at_once(*map(vote, fabrics, words))
