"""Many ranks on etcd in one process: their fabrics, and agreements of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recover.fabrics.etcd import EtcdFabric
from recover.fabrics.etcd_client import EtcdClient, KeyValue
from recover.fabrics.etcd_server import EtcdServer
from recover.liveness.board import Board


class Fabrics:
    """Many ranks in one process, each with a fabric and, in an agreement, a thread of its own."""

    def __init__(self, server: EtcdServer, prefix: str, directory: Path) -> None:
        self.server, self.prefix, self.directory = server, prefix, directory
        self.made: list[EtcdFabric] = []
        self.etcd = EtcdClient(server.endpoint, prefix=prefix)

    def make(
        self, size: int, client: type[EtcdClient] = EtcdClient, **options: Any
    ) -> tuple[list[EtcdFabric], list[Any]]:
        board = Board(self.directory / "board", size)
        clients = [client(self.server.endpoint, prefix=self.prefix) for _ in range(size)]
        made = [EtcdFabric(each, rank, size, board, **options) for rank, each in enumerate(clients)]
        self.made += made
        return made, clients

    def close(self) -> None:
        for fabric in self.made:
            fabric.close()

    def store(self) -> dict[str, KeyValue]:
        return {found.key: found for found in self.etcd.get_all()[0]}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or the exception that it raises."""
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
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "an agreement hangs"
    return results


def agree(fabrics: Sequence[EtcdFabric], *words: int) -> list[Any]:
    def vote(fabric: EtcdFabric, word: int) -> Callable[[], Any]:
        return lambda: fabric.agree(word)

    words = words if len(words) == len(fabrics) else words * len(fabrics)
    return at_once(*map(vote, fabrics, words))
