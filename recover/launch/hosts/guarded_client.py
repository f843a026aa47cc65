"""A client of etcd whose writes are carried out only while its agent holds the lease of its
host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from recover.world.fabrics.etcd.client import Answer, EtcdClient, Operation


class GuardedClient(EtcdClient):
    """A client that adds `guards`, conditions, to every transaction.

    An agent may be stopped for longer than its lease: its host is declared dead, and an agent of
    the same name may take its place. When the stopped agent wakes, its pending writes change
    nothing that the successor has written, and declare none of the successor's ranks dead, however
    late they arrive.
    """

    guards: Callable[[], Sequence[Operation]] = staticmethod(lambda: ())

    def txn(
        self, compare: Iterable[Operation], then: Iterable[Operation], otherwise: Iterable[Operation] = ()
    ) -> Answer:
        return super().txn([*compare, *self.guards()], then, otherwise)
