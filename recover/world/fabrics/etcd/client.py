"""A small client of etcd's JSON gateway, on the standard library alone.

Timeouts are short: the client fails over to the next member of the cluster, and the timeout is how
long a job pauses when a member is lost. They grow while no member answers in time, and shrink
again: a network may be slow. A request without an answer may have been carried out all the same. So
every write is a transaction that does no harm when it is carried out twice, or late, and it is
repeated until there is an answer.

A client that has the job's token seals every value that it writes or compares, for its key, and
checks every value that it reads: a value that was not written with the token, for this very key, is
left out and named in the log. Guards on values still work, since the same value under the same key
is sealed to the same bytes.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recover.job.authentication import Authenticator
from recover.job.output import say
from recover.world.fabrics.base import WorldLostError
from recover.world.fabrics.etcd.errors import PERMISSION_DENIED, Kind, classify, read_error
from recover.world.fabrics.etcd.http_connection import HttpConnection

TIMEOUT = 0.5  # seconds for one request at one endpoint
SLOWEST = 8  # times TIMEOUT at the most, where the network is slow
PATIENCE = 30.0  # seconds that a request is repeated while no endpoint answers
BREATH = 0.02  # seconds between two attempts
UNIX = "unix:"  # before the path of a Unix socket
MOST_NAMED = 1000  # forged values that are remembered, so that each is logged once
LOGIN = "/v3/auth/authenticate"
LOGIN_PAUSE = 0.5  # seconds between two logins for one request: each costs etcd a tenth of a second of a core

Operation = Mapping[str, Any]


class EtcdError(WorldLostError):
    """Etcd has refused a request, and would refuse it again.

    This rank cannot take part in agreements any more.
    """


class LostDataError(EtcdError):
    """Etcd has lost what was agreed on."""


class UnansweredError(EtcdError):
    """No endpoint has answered the request.

    It may have been carried out, or not, or may be carried out later. `remedy`: what helps, if an
    endpoint has given a reason.
    """

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


class LoginError(UnansweredError):
    """The token is not valid any more; the next request logs in again."""


@dataclass(frozen=True)
class KeyValue:
    """A key and its value, or (version 0) its deletion."""

    key: str
    value: bytes
    version: int  # how often it was written since its creation
    modified: int  # the store's revision when it was last written


@dataclass(frozen=True)
class Answer:
    """The result of a transaction: which branch ran, the store's revision, and what each of its
    reads has found."""

    succeeded: bool
    revision: int
    found: tuple[tuple[KeyValue, ...], ...]
    counts: tuple[int, ...] = ()  # the number of keys that each read has found, forged ones included
    forged: tuple[KeyValue, ...] = ()  # the forged values that were left out of `found`


# Guards of a transaction.


def absent(key: str) -> Operation:
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}


def present(key: str) -> Operation:
    return {"key": key, "target": "CREATE", "result": "GREATER", "create_revision": 0}


def version_is(key: str, version: int) -> Operation:
    return {"key": key, "target": "VERSION", "result": "EQUAL", "version": version}


def value_is(key: str, value: bytes) -> Operation:
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": value}


def modified_at(key: str, revision: int) -> Operation:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def none_under(prefix: str) -> Operation:
    return {**absent(prefix), "range_end": after(prefix)}


def unchanged_since(prefix: str, revision: int) -> Operation:
    """No key under `prefix` was written after `revision`.

    (True as well if there is no such key.)
    """
    end = {"range_end": after(prefix)}
    return {"key": prefix, **end, "target": "MOD", "result": "LESS", "mod_revision": revision + 1}


# Operations of a transaction.


def get(key: str) -> Operation:
    return {"request_range": {"key": key}}


def get_all(prefix: str) -> Operation:
    return {"request_range": {"key": prefix, "range_end": after(prefix)}}


def count(prefix: str) -> Operation:
    """The number of keys under a prefix, without their contents."""
    return {"request_range": {"key": prefix, "range_end": after(prefix), "count_only": True}}


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def delete(key: str) -> Operation:
    return {"request_delete_range": {"key": key}}


def delete_all(prefix: str) -> Operation:
    return {"request_delete_range": {"key": prefix, "range_end": after(prefix)}}


def delete_range(key: str, end: str) -> Operation:
    return {"request_delete_range": {"key": key, "range_end": end}}


def either(
    compare: Iterable[Operation], then: Iterable[Operation], otherwise: Iterable[Operation] = ()
) -> Operation:
    """A transaction inside a transaction."""
    return {"request_txn": {"compare": list(compare), "success": list(then), "failure": list(otherwise)}}


def after(prefix: str) -> str:
    """The end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class EtcdClient:
    """A client of one cluster, by one or several endpoints (`host:port`, `unix:/path`).

    Each thread has its own connection.

    All keys are relative to `prefix`. `patience`: seconds that a request is repeated while no
    endpoint answers. `token`: the job's; values are sealed and checked with it. None: they are
    written and read unchanged.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        prefix: str = "/",
        user: str | None = None,
        password: str = "",
        tls: ssl.SSLContext | None = None,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        token: str | None = None,
    ) -> None:
        if not prefix:
            raise ValueError("a client of etcd needs a prefix for its keys; give one, at least /")
        names = endpoints.split(",") if isinstance(endpoints, str) else endpoints
        self.endpoints = [_read_endpoint(name.strip()) for name in names]
        self.prefix, self.timeout, self.patience = prefix, timeout, patience
        self.unanswered = 0  # requests without an answer so far: a silence of etcd says nothing about ranks
        self._user, self._password, self._tls = user, password, tls
        self._token: str | None = None
        self._authenticator = None if token is None else Authenticator(token, "etcd")
        self._named: set[tuple[str, int]] = set()  # forged values that were logged: key and revision
        self._mine = threading.local()
        self._has_given_up = False

    def give_up(self) -> None:
        """End all waits for an answer, now and later."""
        self._has_given_up = True

    def txn(
        self, compare: Iterable[Operation], then: Iterable[Operation], otherwise: Iterable[Operation] = ()
    ) -> Answer:
        """If all of `compare` holds, do `then`, else `otherwise`, atomically.

        (Use `read` for reading.)
        """
        body = {"compare": list(compare), "success": list(then), "failure": list(otherwise)}
        out = self.ask("/v3/kv/txn", self._encoded(body))
        reads = [one["response_range"] for one in out.get("responses", []) if "response_range" in one]
        forged: list[KeyValue] = []
        found = tuple(self.authentic(read.get("kvs", []), forged) for read in reads)
        counts = tuple(int(read.get("count", 0)) for read in reads)
        return Answer(
            bool(out.get("succeeded")), int(out["header"]["revision"]), found, counts, tuple(forged)
        )

    def read(self, *reads: Operation) -> Answer:
        """Several reads at one revision.

        Etcd before 3.5.7 may crash over a transaction that only reads, if its client disconnects
        meanwhile (etcd-io/etcd#14110). So this transaction has a write, behind a guard that never
        holds.
        """
        return self.txn([version_is("", -1)], [put("never", b"")], reads)

    def get(self, key: str) -> KeyValue | None:
        out = self.ask("/v3/kv/range", {"key": to_base64(self.prefix + key)})
        return next(iter(self.authentic(out.get("kvs", []))), None)

    def get_all(self, prefix: str = "", since: int = 0) -> tuple[tuple[KeyValue, ...], int]:
        """All keys under `prefix` that were written at revision `since` or later, and the store's
        revision."""
        keys = {"key": self.prefix + prefix, "range_end": after(self.prefix + prefix)}
        body = {name: to_base64(key) for name, key in keys.items()} | {"min_mod_revision": since}
        out = self.ask("/v3/kv/range", body)
        return self.authentic(out.get("kvs", [])), int(out["header"]["revision"])

    def remove_forged(self, forged: Iterable[KeyValue]) -> None:
        """Delete forged values, unless their keys were written again meanwhile."""
        for found in forged:
            self.txn([modified_at(found.key, found.modified)], [delete(found.key)])

    def put(self, key: str, value: bytes) -> None:
        self.txn([], [put(key, value)])

    def delete_all(self, prefix: str = "") -> None:
        body = {"key": to_base64(self.prefix + prefix), "range_end": to_base64(after(self.prefix + prefix))}
        self.ask("/v3/kv/deleterange", body)

    def grant(self, ttl: float) -> tuple[int, int]:
        """A new lease, and its seconds as granted: etcd counts whole seconds, and grants no very
        short lease."""
        granted = self.ask("/v3/lease/grant", {"TTL": math.ceil(ttl)})
        return int(granted["ID"]), int(granted["TTL"])

    def keep_alive(self, lease: int) -> bool:
        """Restart the lease's time. False if it does not exist any more."""
        return int(self.ask("/v3/lease/keepalive", {"ID": lease})["result"].get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        self.ask("/v3/lease/revoke", {"ID": lease})

    def compact(self, revision: int) -> None:
        """Delete the history before this revision."""
        self.ask("/v3/kv/compaction", {"revision": revision, "physical": True})

    def version(self) -> str:
        return str(self.ask("/v3/maintenance/status", {})["version"])

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask one endpoint after the other until one answers.

        Raises UnansweredError after `patience` seconds.
        """
        deadline, logins = time.monotonic() + self.patience, 0
        while True:
            try:
                return self.call(path, body)
            except UnansweredError as error:
                self.unanswered += 1
                logins += isinstance(error, LoginError)
                if self._has_given_up or time.monotonic() > deadline:
                    raise UnansweredError(f"{error}; {self._silence(error)}", error.remedy) from None
                time.sleep(BREATH if logins < 2 else LOGIN_PAUSE)

    def _silence(self, error: UnansweredError) -> str:
        """The second half of an error: for how long, where, and the remedy."""
        names = ", ".join(map(_name, self.endpoints))
        if error.remedy:
            return f"so for {self.patience:g} s, at {names}: {error.remedy}"
        return f"nobody has answered for {self.patience:g} s: is etcd running at {names}, and does a majority of it?"

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask one endpoint once. If it does not answer, the next call goes to the next endpoint."""
        where, limit, started = _name(self.endpoint()), self._limit, time.monotonic()
        headers = self._headers(path)
        try:
            status, data = self._connection().ask(path, _to_json(body), headers)
        except ssl.SSLCertVerificationError as error:
            raise EtcdError(
                f"the certificate of etcd at {where} is not trusted: {error}; give a context that knows who signed it"
            ) from None
        except OSError as error:
            self.go_on()
            if isinstance(error, ssl.SSLError) and (mend := _refused_by_tls(error)):
                raise EtcdError(f"etcd at {where} and TLS: {error}; {mend}") from None
            cause = repr(error)
            if isinstance(error, TimeoutError):
                cause = f"within {limit:g} s"
                self._mine.limit = min(1.5 * limit, SLOWEST * self.timeout)
            raise UnansweredError(f"etcd at {where} did not answer {path}: {cause}") from None
        self._mine.limit = max(self.timeout, min(limit, 3 * (time.monotonic() - started)))
        try:
            out = json.loads(data)
        except ValueError:
            out = {"error": data[:200].decode(errors="replace")}
        if isinstance(out, dict) and status == 200 and "error" not in out:
            return out
        raise self._refusal(where, path, status, out, headers)

    def _refusal(self, where: str, path: str, status: int, out: Any, headers: Mapping[str, str]) -> EtcdError:
        code, said = read_error(out)
        kind, remedy = classify(code, status, said)
        if kind is Kind.LOGIN and self._user is not None and path != LOGIN:
            self.forget_login(headers)
            may = f"may user {self._user!r} still log in?"
            return LoginError(f"etcd at {where} wants a new login: {said}", may)
        if kind is Kind.RETRY:
            self.go_on()
            return UnansweredError(f"etcd at {where} cannot answer {path} now: {said}", remedy)
        if not remedy and (kind is Kind.LOGIN or code == PERMISSION_DENIED or "auth" in said):
            remedy = (
                f"may user {self._user!r} read and write under {self.prefix}, and is the password right?"
                if self._user
                else "it has users: give a user and a password (--etcd-user, --etcd-password-file)"
            )
        return EtcdError(
            f"etcd at {where} refuses {path}: {said} (status {status})" + (remedy and f"; {remedy}")
        )

    def forget_login(self, headers: Mapping[str, str] | None = None) -> None:
        """Log in again for the next request, unless another thread has logged in since a request
        was sent with `headers`."""
        if headers is None or headers.get("Authorization", "") == self._token:
            self._token = None

    @property
    def _limit(self) -> float:
        """Seconds that this thread waits for an answer at present."""
        return float(getattr(self._mine, "limit", self.timeout))

    def endpoint(self) -> tuple[str, int]:
        """The endpoint that this thread asks next."""
        return self.endpoints[getattr(self._mine, "at", 0) % len(self.endpoints)]

    def go_on(self) -> None:
        """Fail over to the next endpoint, with a new connection."""
        if connection := getattr(self._mine, "connection", None):
            connection.close()
        self._mine.connection = None
        self._mine.at = getattr(self._mine, "at", 0) + 1

    def stream(self, path: str, body: Mapping[str, Any], timeout: float) -> HttpConnection:
        """Send a request on a new connection whose answer is a stream of lines."""
        line = self._open(self._limit)
        try:
            line.limit(timeout)
            line.post(path, _to_json(body), self._headers(path))
            line.begin_stream()
            return line
        except BaseException:
            line.close()
            raise

    def _connection(self) -> HttpConnection:
        """The connection of this thread. A forked child opens its own."""
        if getattr(self._mine, "pid", None) != os.getpid():
            self._mine.pid, self._mine.connection = os.getpid(), None
        if self._mine.connection is None:
            self._mine.connection = self._open(self._limit)
        connection: HttpConnection = self._mine.connection
        connection.limit(self._limit)
        return connection

    def _open(self, timeout: float) -> HttpConnection:
        return HttpConnection(*self.endpoint(), timeout, self._tls)

    def _headers(self, path: str) -> dict[str, str]:
        if self._user is None or path == LOGIN:
            return {}
        token = self._token
        if token is None:
            self._token = token = self._log_in()
        return {"Authorization": token} if token else {}

    def _log_in(self) -> str:
        """A token; "" where authentication is turned off."""
        try:
            return str(self.call(LOGIN, {"name": self._user, "password": self._password})["token"])
        except UnansweredError:
            raise
        except EtcdError as error:
            if "authentication is not enabled" in str(error):
                return ""
            raise

    def _encoded(self, part: Any) -> Any:
        """A request as the gateway takes it: keys under the prefix, values sealed for their keys,
        both in base64."""
        if isinstance(part, list):
            return [self._encoded(one) for one in part]
        encoded = {}
        for name, value in part.items():
            if name in ("key", "range_end"):
                value = _key_to_base64(self.prefix, value)
            elif name == "value":
                value = to_base64(self._sealed(part["key"], value))
            elif isinstance(value, (dict, list)):
                value = self._encoded(value)
            encoded[name] = value
        return encoded

    def _sealed(self, key: str, value: bytes) -> bytes:
        return self._authenticator.seal(self.prefix + key, value) if self._authenticator else value

    def authentic(
        self, found: Iterable[Mapping[str, Any]], forged: list[KeyValue] | None = None
    ) -> tuple[KeyValue, ...]:
        """The values that carry the job's MAC, unsealed, and deletions, which have no value.

        Others go into `forged`.
        """
        kept = []
        for one in map(self._decoded, found):
            if self._authenticator is None or not one.version:
                kept.append(one)
                continue
            value = self._authenticator.unsealed(self.prefix + one.key, one.value)
            if value is not None:
                kept.append(replace(one, value=value))
                continue
            if forged is not None:
                forged.append(one)
            if (one.key, one.modified) not in self._named:
                if len(self._named) >= MOST_NAMED:
                    self._named.clear()
                self._named.add((one.key, one.modified))
                say(f"ignored {self.prefix}{one.key} in etcd: it was not written with this job's token")
        return tuple(kept)

    def _decoded(self, found: Mapping[str, Any]) -> KeyValue:
        return KeyValue(
            base64.b64decode(found["key"]).decode(errors="replace").removeprefix(self.prefix),
            base64.b64decode(found.get("value", "")),
            int(found.get("version", 0)),
            int(found["mod_revision"]),
        )


def _refused_by_tls(error: ssl.SSLError) -> str:
    """The remedy for a handshake that would fail again; "" if it failed for another reason."""
    if "ALERT" in (error.reason or ""):
        return "it refuses what we show of ourselves, or that we show nothing: see --etcd-cert and --etcd-key"
    return "it does not speak TLS: leave out --etcd-ca" if error.reason == "WRONG_VERSION_NUMBER" else ""


def to_base64(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


# Every agreement names the same keys: those of the votes, the deaths and the decision.
@functools.lru_cache(4096)
def _key_to_base64(prefix: str, key: str) -> str:
    return to_base64(prefix + key)


def _to_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _name(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"{UNIX}{host}" if host.startswith("/") else f"{host}:{port}"


def _read_endpoint(name: str) -> tuple[str, int]:
    if name.startswith(f"{UNIX}/"):
        return name.removeprefix(UNIX), 0
    host, _, port = name.removeprefix("http://").removeprefix("https://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{name!r} is no endpoint of etcd; give host:port, several with commas in between")
    return host.strip("[]"), int(port)
