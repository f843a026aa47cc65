"""Makes the client of a job's etcd from the job's options."""

from __future__ import annotations

import ssl
from typing import TypeVar

from recover.job.spec import EtcdAccess
from recover.world.fabrics.etcd.client import EtcdClient

LOST = "etcd-lost"  # file in the session of a host: its agent has stopped waiting for etcd


Client = TypeVar("Client", bound=EtcdClient)


def client_of(access: EtcdAccess) -> EtcdClient:
    """A client of the job's etcd. Raises OSError if a file that it needs for TLS cannot be read."""
    return client_of_kind(EtcdClient, access)


def client_of_kind(kind: type[Client], access: EtcdAccess) -> Client:
    return kind(
        access.endpoints,
        access.prefix,
        access.user,
        access.password,
        tls_of(access),
        patience=access.patience,
        token=access.token,
    )


def tls_of(access: EtcdAccess) -> ssl.SSLContext | None:
    """The TLS settings of the job's etcd; None if it is used without TLS."""
    if access.ca is None:
        return None
    tls = ssl.create_default_context(cafile=access.ca)
    if access.certificate is not None:
        tls.load_cert_chain(access.certificate, access.key)
    return tls
