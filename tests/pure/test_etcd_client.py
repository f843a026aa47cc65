"""The etcd client uses the JSON gateway, leaves an endpoint that does not answer for the next, and names the error."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recover.world.fabrics.base import WorldLostError
from recover.world.fabrics.etcd import client as etcd
from recover.world.fabrics.etcd.agreement import (
    Decision,
    Vote,
    VoteCount,
    VoteSnapshot,
    decided,
    key_of,
    replica_ranks,
    whole,
)
from recover.world.fabrics.etcd.client import Answer, EtcdClient, EtcdError, KeyValue, UnansweredError
from recover.world.fabrics.etcd.errors import CODES, Kind, classify, read_error
from recover.world.fabrics.etcd.server import SAFE, warn_if_unsafe

Reply = Callable[[str, dict[str, Any], dict[str, str]], tuple[int, Any]]
DONE = {"header": {"revision": "7"}, "succeeded": True}


class FakeGateway:
    """A gateway that answers as the test says, and keeps the requests."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                gateway.asked.append((self.path, body))
                status, answer = reply(self.path, body, dict(self.headers))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def gateways() -> Iterator[Callable[[Reply], FakeGateway]]:
    made: list[FakeGateway] = []

    def make(reply: Reply) -> FakeGateway:
        made.append(FakeGateway(reply))
        return made[-1]

    yield make
    for gateway in made:
        gateway.close()


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_etcd_transaction_matches_the_gateway_format(gateways: Any) -> None:
    found = {"key": b64("/job/vote/3"), "value": b64("7:1"), "version": "7", "mod_revision": "41"}
    answer = DONE | {
        "responses": [
            {"response_put": {}},
            {"response_range": {"kvs": [found], "count": "3"}},
            {"response_range": {}},
        ]
    }
    gateway = gateways(lambda *_: (200, answer))
    client = EtcdClient(gateway.endpoint, prefix="/job/")
    told = client.txn(
        [etcd.absent("dead/3"), etcd.version_is("vote/3", 6), etcd.unchanged_since("dead/", 40)],
        [etcd.put("vote/3", b"7:1"), etcd.get_all("vote/"), etcd.get("decision")],
        [etcd.either([etcd.present("host/a")], [etcd.delete_all("mail/")])],
    )
    assert told == Answer(True, 7, ((KeyValue("vote/3", b"7:1", 7, 41),), ()), (3, 0))
    ((path, body),) = gateway.asked
    assert path == "/v3/kv/txn"
    assert body["compare"] == [
        {"key": b64("/job/dead/3"), "target": "CREATE", "result": "EQUAL", "create_revision": 0},
        {"key": b64("/job/vote/3"), "target": "VERSION", "result": "EQUAL", "version": 6},
        {
            "key": b64("/job/dead/"),
            "range_end": b64("/job/dead0"),
            "target": "MOD",
            "result": "LESS",
            "mod_revision": 41,
        },
    ]
    assert body["success"][0] == {"request_put": {"key": b64("/job/vote/3"), "value": b64("7:1"), "lease": 0}}
    inner = body["failure"][0]["request_txn"]
    assert inner["compare"][0]["key"] == b64("/job/host/a")
    assert inner["success"] == [
        {"request_delete_range": {"key": b64("/job/mail/"), "range_end": b64("/job/mail0")}}
    ]


def test_etcd_read_of_several_keys_is_no_read_only_transaction(gateways: Any) -> None:
    """Etcd before 3.5.7 may crash over a read-only transaction whose client has gone meanwhile."""
    gateway = gateways(lambda *_: (200, {"header": {"revision": "7"}, "responses": []}))
    EtcdClient(gateway.endpoint).read(etcd.get("a"), etcd.get("b"))
    ((_, body),) = gateway.asked
    assert body["compare"] == [{"key": b64("/"), "target": "VERSION", "result": "EQUAL", "version": -1}]
    assert "request_put" in body["success"][0]
    assert [list(one) for one in body["failure"]] == [["request_range"]] * 2


def unavailable(*_: object) -> tuple[int, Any]:
    return 503, {"error": "etcdserver: no leader", "code": 14, "message": "etcdserver: no leader"}


@pytest.mark.guarantee(
    "On etcd",
    "The etcd client skips endpoints that do not answer, and its refusals name endpoint, cause and remedy.",
)
def test_etcd_client_skips_endpoints_that_do_not_answer(gateways: Any) -> None:
    """The endpoints: no listener, a silent one, one without a leader, one that closes the connection."""
    with socket.socket() as silent, socket.socket() as refusing:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        refusing.bind(("127.0.0.1", 0))
        good = gateways(lambda *_: (200, DONE))
        bad = [
            f"127.0.0.1:{silent.getsockname()[1]}",
            f"127.0.0.1:{refusing.getsockname()[1]}",
            gateways(unavailable).endpoint,
            gateways(lambda *_: (200, b"not JSON"[:0])).endpoint,
        ]
        client = EtcdClient(",".join([*bad[:3], good.endpoint]), timeout=1.0)
        assert client.txn([], []).succeeded
        assert client.unanswered == 3
        assert client.txn([], []).succeeded
        assert client.unanswered == 3, "it stays with the one that answers"
        nobody = EtcdClient(bad[:3], timeout=0.05, patience=0.2)
        before = time.monotonic()
        with pytest.raises(UnansweredError, match=r"did not answer|cannot answer") as told:
            nobody.txn([], [])
        assert time.monotonic() - before >= 0.2
        assert all(endpoint in str(told.value) for endpoint in bad[:3])
        with pytest.raises(EtcdError, match=f"etcd at {bad[3]} refuses"):
            EtcdClient(bad[3]).txn([], [])


def test_etcd_client_uses_one_connection_per_thread(gateways: Any) -> None:
    connections: dict[int, set[str]] = {}

    class Client(EtcdClient):
        def _open(self, timeout: float) -> Any:
            connection = super()._open(timeout)
            connections.setdefault(threading.get_ident(), set()).add(connection._socket.getsockname()[1])
            return connection

    client, meet = Client(gateways(lambda *_: (200, DONE)).endpoint), threading.Barrier(3)

    def ask() -> None:
        for _ in range(5):
            meet.wait(10)
            client.txn([], [])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [len(ports) for ports in connections.values()] == [1, 1, 1]
    assert len(set.union(*connections.values())) == 3


def test_etcd_client_logs_in_once_and_again_after_expiry(gateways: Any) -> None:
    tokens = iter(["first", "second"])
    valid = ""

    def reply(path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        nonlocal valid
        if path == "/v3/auth/authenticate":
            if body != {"name": "recover", "password": "secret"}:
                return 400, {
                    "error": "etcdserver: authentication failed, invalid user ID or password",
                    "code": 3,
                }
            valid = next(tokens)
            return 200, {"token": valid}
        if headers.get("Authorization") != valid:
            return 401, {"error": "etcdserver: invalid auth token", "code": 16}
        return 200, DONE

    gateway = gateways(reply)
    client = EtcdClient(gateway.endpoint, user="recover", password="secret")
    assert client.txn([], []).succeeded
    assert client.txn([], []).succeeded
    valid = "none"
    assert client.txn([], []).succeeded
    assert [path for path, _ in gateway.asked].count("/v3/auth/authenticate") == 2
    with pytest.raises(EtcdError, match="may user 'somebody' read and write"):
        EtcdClient(gateway.endpoint, user="somebody").txn([], [])
    with pytest.raises(EtcdError, match=r"invalid auth token.*give a user"):
        EtcdClient(gateway.endpoint).txn([], [])


@pytest.mark.guarantee(
    "On etcd",
    "The etcd client skips endpoints that do not answer, and its refusals name endpoint, cause and remedy.",
)
def test_etcd_refusal_names_endpoint_cause_and_remedy(gateways: Any) -> None:
    for status, answer, mend in (
        (500, {"error": "etcdserver: corrupt cluster", "code": 15}, "alarm CORRUPT"),
        (404, b"404 page not found", "JSON gateway"),
        (403, {"error": "etcdserver: permission denied", "code": 7}, "read and write under /job/"),
    ):
        user = "recover" if status == 403 else None
        gateway = gateways(
            lambda path, *_, status=status, answer=answer: (
                (200, {"token": "t"}) if path == "/v3/auth/authenticate" else (status, answer)
            )
        )
        with pytest.raises(EtcdError, match=mend) as told:
            EtcdClient(gateway.endpoint, prefix="/job/", user=user).txn([], [])
        assert gateway.endpoint in str(told.value)
        assert not isinstance(told.value, UnansweredError)


# Errors as etcd 3.5 writes them: text, gRPC code, HTTP status, and what the client must do. Errors with a status were
# observed.
ERRORS = [
    ("etcdserver: invalid auth token", 16, 401, Kind.LOGIN),
    ("auth: revision in header is old", 2, 500, Kind.LOGIN),
    ("etcdserver: revision of auth store is old", 3, 400, Kind.LOGIN),
    ("etcdserver: user name is empty", 3, 400, Kind.LOGIN),
    ("anything else that is UNAUTHENTICATED", 16, 401, Kind.LOGIN),
    ("etcdserver: mvcc: database space exceeded", 8, 429, Kind.RETRY),
    ("etcdserver: too many requests", 8, 429, Kind.RETRY),
    ("etcdserver: no leader", 14, 503, Kind.RETRY),
    ("etcdserver: not leader", 9, 400, Kind.RETRY),
    ("etcdserver: leader changed", 14, 503, Kind.RETRY),
    ("etcdserver: server stopped", 14, 503, Kind.RETRY),
    ("etcdserver: request timed out", 14, 503, Kind.RETRY),
    ("etcdserver: request timed out, possibly due to previous leader failure", 2, 500, Kind.RETRY),
    ("etcdserver: request timed out, possibly due to connection lost", 14, 503, Kind.RETRY),
    ("etcdserver: request timed out, waiting for the applied index took too long", 14, 503, Kind.RETRY),
    ("etcdserver: unhealthy cluster", 14, 503, Kind.RETRY),
    ("etcdserver: rpc not supported for learner", 9, 400, Kind.RETRY),
    ("raft proposal dropped", 2, 500, Kind.RETRY),
    ("context deadline exceeded", 4, 504, Kind.RETRY),
    ("context canceled", 1, 499, Kind.RETRY),
    ("stream terminated by RST_STREAM", 13, 500, Kind.RETRY),
    ("Bad Gateway", 0, 502, Kind.RETRY),
    ("Internal Server Error", 0, 500, Kind.RETRY),
    ("etcdserver: permission denied", 7, 403, Kind.FINAL),
    ("etcdserver: authentication failed, invalid user ID or password", 3, 400, Kind.FINAL),
    ("etcdserver: authentication is not enabled", 9, 400, Kind.FINAL),
    ("etcdserver: requested lease not found", 5, 404, Kind.FINAL),
    ("etcdserver: mvcc: required revision has been compacted", 11, 400, Kind.FINAL),
    ("etcdserver: request is too large", 3, 400, Kind.FINAL),
    ("etcdserver: too many operations in txn request", 3, 400, Kind.FINAL),
    ("etcdserver: corrupt cluster", 15, 500, Kind.FINAL),
    ("404 page not found", 0, 404, Kind.FINAL),
    ("Not Implemented", 12, 501, Kind.FINAL),
]


@pytest.mark.guarantee(
    "On etcd",
    "Every etcd error is retried, answered by a login or final, and a full database is named with alarm and "
    "remedy.",
)
def test_etcd_error_is_retried_answered_by_a_login_or_final() -> None:
    assert {said: classify(code, status, said)[0] for said, code, status, _ in ERRORS} == {
        said: kind for said, _, _, kind in ERRORS
    }
    assert CODES.keys() == set(range(1, 17)), "all of gRPC's codes"
    for said in ("etcdserver: mvcc: database space exceeded", "memberID:1 alarm:NOSPACE "):
        assert all(
            word in classify(8, 429, said)[1] for word in ("NOSPACE", "alarm list", "alarm disarm", "quota")
        )
    flat = {"error": "etcdserver: no leader", "code": 14, "message": "etcdserver: no leader"}
    streamed = {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}}
    assert read_error(flat) == read_error(streamed) == (14, "etcdserver: no leader")


@pytest.mark.guarantee(
    "On etcd", "Users may change, tokens expire and authentication be switched off and on while a job runs."
)
@pytest.mark.parametrize("error", [error[:3] for error in ERRORS if error[3] is Kind.LOGIN])
def test_refused_etcd_token_is_replaced_once_and_the_request_repeated(
    gateways: Any, error: tuple[str, int, int]
) -> None:
    """The same holds where authentication is turned off and on again while the client runs."""
    said, code, status = error
    revision, enabled = 1, True

    def reply(path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        if path == "/v3/auth/authenticate":
            if not enabled:
                return 400, {"error": "etcdserver: authentication is not enabled", "code": 9}
            return 200, {"token": f"revision {revision}"}
        if enabled and headers.get("Authorization") != f"revision {revision}":
            return status, {"error": said, "code": code, "message": said}
        return 200, DONE

    gateway = gateways(reply)
    client = EtcdClient(gateway.endpoint, user="recover", password="secret")

    def asked(request: Callable[[], object]) -> list[str]:
        before = len(gateway.asked)
        request()
        return [path for path, _ in gateway.asked[before:]]

    write = lambda: client.txn([], [etcd.put("a", b"1")])  # noqa: E731
    assert asked(write) == ["/v3/auth/authenticate", "/v3/kv/txn"]
    revision = 2
    assert asked(write) == ["/v3/kv/txn", "/v3/auth/authenticate", "/v3/kv/txn"]
    assert asked(write) == ["/v3/kv/txn"]
    enabled = False
    client.forget_login()
    assert asked(write) == ["/v3/auth/authenticate", "/v3/kv/txn"]
    enabled = True
    assert asked(write) == ["/v3/kv/txn", "/v3/auth/authenticate", "/v3/kv/txn"]


@pytest.mark.guarantee(
    "On etcd",
    "Every etcd error is retried, answered by a login or final, and a full database is named with alarm and "
    "remedy.",
)
def test_full_etcd_is_awaited_and_then_named_with_alarm_and_remedy(gateways: Any) -> None:
    full = True
    gateway = gateways(
        lambda *_: (
            (429, {"error": "etcdserver: mvcc: database space exceeded", "code": 8}) if full else (200, DONE)
        )
    )
    with pytest.raises(UnansweredError, match=r"NOSPACE.*etcdctl alarm disarm") as told:
        EtcdClient(gateway.endpoint, patience=0.1).txn([], [])
    assert "is etcd running" not in str(told.value), "it is: it has said why it refuses"
    assert isinstance(told.value, WorldLostError)

    def disarm() -> None:
        nonlocal full
        while len(gateway.asked) < before + 3:
            time.sleep(0.01)
        full = False

    before = len(gateway.asked)
    admin = threading.Thread(target=disarm)
    admin.start()
    assert EtcdClient(gateway.endpoint).txn([], []).succeeded
    admin.join()
    assert issubclass(EtcdError, WorldLostError), "a rank that etcd refuses for good saves its state"


@pytest.mark.parametrize("wrong", ["", "host", "host:", ":2379", "host:port"])
def test_invalid_etcd_endpoint_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        EtcdClient(wrong)
    assert EtcdClient("https://[::1]:2379, h2:1").endpoints == [("::1", 2379), ("h2", 1)]


ranks = st.frozensets(st.integers(0, 300))


@given(st.integers(0, (1 << 31) - 1), ranks, ranks)
def test_vote_survives_serialization(word: int, acknowledged: frozenset[int], admit: frozenset[int]) -> None:
    vote = Vote(word, acknowledged, admit)
    assert Vote.from_bytes(vote.to_bytes()) == vote


@pytest.mark.guarantee("On etcd", "A replica casts one vote, which none of its ranks contradicts.")
@given(st.lists(st.tuples(st.integers(0, 15), ranks, ranks), min_size=1, max_size=4))
def test_replica_vote_is_the_conjunction_of_its_ranks_words(
    said: list[tuple[int, frozenset[int], frozenset[int]]],
) -> None:
    """A death counts as acknowledged, and a joining rank as admitted, only if every rank of the replica says so."""
    one = Vote.of_all([Vote(*each) for each in said])
    for bit in range(4):
        assert one.word >> bit & 1 == all(word >> bit & 1 for word, _, _ in said)
    for rank in frozenset().union(*(seen | admit for _, seen, admit in said)):
        assert (rank in one.acknowledged) == all(rank in seen for _, seen, _ in said)
        assert (rank in one.admit) == all(rank in admit for _, _, admit in said)


def looked(votes: dict[int, Vote], dead: frozenset[int], asking: frozenset[int]) -> VoteSnapshot:
    return VoteSnapshot(VoteCount(10, 4, dead, len(votes)), votes, asking)


few = st.frozensets(st.integers(0, 23), max_size=6)


@pytest.mark.guarantee("On etcd", "A decision follows from the votes of living ranks only.")
@given(st.data(), st.sampled_from([1, 2, 3]), few, few)
def test_decision_follows_from_the_votes_of_living_ranks_only(
    data: st.DataObject, size: int, dead: frozenset[int], others: frozenset[int]
) -> None:
    participants = frozenset(range(12)) - {peer for rank in others for peer in replica_ranks(rank, size)}
    asking = frozenset(range(12, 24)) - others
    living = frozenset(rank for rank in participants if dead.isdisjoint(replica_ranks(rank, size)))
    assume(living)
    votes = {
        rank: Vote(
            data.draw(st.integers(0, 15)), dead - data.draw(few), frozenset(range(12, 24)) - data.draw(few)
        )
        for rank in sorted(participants)[::size]
    }
    value, cleaned = decided(looked(votes, dead, asking), participants, size, min(living))
    decision = Decision.of(KeyValue("seen/decision", value, 5, 11))
    assert decision.number == 5
    assert decision.dead == participants - living, "a replica that has lost one is lost"
    counted = [votes[rank] for rank in votes.keys() & living]
    if all(participants & dead <= vote.acknowledged for vote in counted):
        word, let_in = 15, asking - dead
        for vote in counted:
            word, let_in = word & vote.word, let_in & vote.admit
        assert decision.word == word
        assert decision.joined == whole(let_in, size), (
            "who asks, lives and is known to all, in whole replicas"
        )
        assert decision.participants == living | decision.joined
    else:
        assert decision.word is None
        assert not decision.joined
        assert decision.participants == participants
    forgotten = json.dumps(cleaned)
    for rank in range(24):
        kept = not decision.participants.isdisjoint(replica_ranks(rank, size))
        key = key_of("claim/", replica_ranks(rank, size)[0])
        assert (f'"key": "{key}"' in forgotten) == (
            not kept and not dead.isdisjoint(replica_ranks(rank, size))
        )


def test_etcd_that_may_lose_commits_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"etcd 3\.5\.1, in which a crash may lose"):
        warn_if_unsafe((3, 5, 1), "this one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unsafe(SAFE, "this one")
