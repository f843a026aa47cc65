"""A client of etcd whose writes are those of one agent: they are carried out only while it is its host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from recover.world.fabrics.etcd.client import Answer, EtcdClient, Operation


class GuardedClient(EtcdClient):
    """`guards`: what must hold for anything to be written, beside what the writer asks for.

    An agent that wakes after its host was given up, beside a successor of the same name, changes nothing of what the
    successor has written, and declares none of its ranks dead: whatever it was about to say, and however late.
    """

    guards: Callable[[], Sequence[Operation]] = staticmethod(lambda: ())

    def txn(
        self, compare: Iterable[Operation], then: Iterable[Operation], otherwise: Iterable[Operation] = ()
    ) -> Answer:
        return super().txn([*compare, *self.guards()], then, otherwise)
