"""Entries that a process without the job's token writes, or copies to another key, are ignored."""

from __future__ import annotations

import ast
import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover.job.authentication import MAC_BYTES, Authenticator, make_token_file
from recover.job.grid import Grid
from recover.job.host_options import HostOptions
from recover.job.spec import EtcdAccess
from recover.launch.hosts import own_etcd
from recover.launch.hosts.options import one_host, read_options
from recover.launch.preflight import Refusal
from recover.step.joining import state_handover
from recover.world.carriers import choose
from recover.world.carriers.gloo import GlooCarrier
from recover.world.carriers.worker import Worker
from recover.world.fabrics.etcd import client as etcd
from recover.world.fabrics.etcd.agreement import (
    CLAIM,
    DEAD,
    DECISION,
    OPERATIONS,
    VOTE,
    VOTE_COUNT,
    VOTE_SNAPSHOT,
    Decision,
    Vote,
    VoteSnapshot,
    cast,
    key_of,
    unanimous,
)
from recover.world.fabrics.etcd.client import Answer, EtcdClient, KeyValue
from recover.world.fabrics.etcd.membership_cache import MembershipCache
from recover.world.fabrics.etcd.messages import mail_key, told_key
from recover.world.fabrics.etcd.replica_peers import Channel
from recover.world.fabrics.etcd.watch import EtcdWatch

ROOT = Path(__file__).parents[2]


class Store(EtcdClient):
    """A client whose keys lie in memory, as etcd would hold them: a test may change `raw` as an attacker would."""

    raw: dict[str, bytes]

    def __init__(self, token: str | None, raw: dict[str, bytes], prefix: str = "/recover/j/run/") -> None:
        super().__init__("127.0.0.1:1", prefix, token=token)
        self.raw, self.deleted = raw, list[str]()

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        header = {"header": {"revision": "9"}}
        if path == "/v3/kv/range":
            return header | {"kvs": self._found(body)}
        for one in body["success"]:
            if put := one.get("request_put"):
                self.raw[_text(put["key"])] = base64.b64decode(put["value"])
            if gone := one.get("request_delete_range"):
                self.deleted.append(_text(gone["key"]))
        reads = [one["request_range"] for one in body["failure"] if "request_range" in one]
        found = [{"response_range": {"kvs": (kvs := self._found(read)), "count": len(kvs)}} for read in reads]
        return header | {"responses": found}

    def read(self, *reads: etcd.Operation) -> Answer:
        return self.txn([], [], reads)

    def _found(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        first, end = _text(asked["key"]), _text(asked.get("range_end", ""))
        keys = [key for key in sorted(self.raw) if (first <= key < end if end else key == first)]
        return [
            {"key": _b64(key.encode()), "value": _b64(self.raw[key]), "version": 1, "mod_revision": 5}
            for key in keys
        ]


def _text(data: str) -> str:
    return base64.b64decode(data).decode()


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.guarantee(
    "Strangers",
    "A value sealed for another key, run, rank, agreement or token, or truncated, is ignored and named in "
    "the log.",
)
@given(st.text(max_size=20), st.binary(max_size=40), st.text(max_size=20), st.binary(max_size=40))
def test_message_is_authentic_only_for_its_key_and_bytes(
    place: str, data: bytes, other_place: str, other_data: bytes
) -> None:
    ours = Authenticator("token", "purpose")
    signed = ours.sign(place, data)
    assert ours.opened(place, signed) == data
    assert Authenticator("another token", "purpose").opened(place, signed) is None
    assert Authenticator("token", "another purpose").opened(place, signed) is None
    assert Authenticator("", "purpose").opened(place, signed) is None
    if other_place != place:
        assert ours.opened(other_place, signed) is None
    if other_data != data:
        assert ours.opened(place, signed[:MAC_BYTES] + other_data) is None
    for length in (0, 1, MAC_BYTES - 1, MAC_BYTES, len(signed) - 1):
        if length < len(signed):
            assert ours.opened(place, signed[:length]) is None


@given(st.text(max_size=20), st.binary(min_size=8, max_size=200), st.text(max_size=20))
def test_sealed_data_is_unreadable_and_deterministic(place: str, data: bytes, other_place: str) -> None:
    ours = Authenticator("token", "purpose")
    sealed = ours.seal(place, data)
    assert sealed == Authenticator("token", "purpose").seal(place, data)
    assert len(sealed) == MAC_BYTES + len(data)
    assert sealed[MAC_BYTES:] != data
    assert ours.unsealed(place, sealed) == data
    assert Authenticator("another", "purpose").unsealed(place, sealed) is None
    assert ours.unsealed(place, ours.sign(place, data)) is None
    for length in range(len(sealed)):
        assert ours.unsealed(place, sealed[:length]) is None
    if other_place != place:
        assert ours.unsealed(other_place, sealed) is None
        assert ours.seal(other_place, data) != sealed
    changed = bytearray(sealed)
    changed[-1] ^= 1
    assert ours.unsealed(place, bytes(changed)) is None


def test_sealed_key_and_data_cannot_be_split_differently() -> None:
    ours = Authenticator("token", "purpose")
    assert ours.mac("ab", b"c") != ours.mac("a", b"bc")


CLAIMED = json.dumps({"process": "a", "address": ""}).encode()
WRITTEN = {
    key_of(CLAIM, 1): CLAIMED,
    key_of("seen/asking/", 1): CLAIMED,
    key_of(VOTE, 1): Vote(7, frozenset(), number=4).to_bytes(),
    key_of(DEAD, 1): b"it hung",
    mail_key(3, 0, 9, 1): b"row of a census",
    told_key(3, 9, 1): b"table",
    "order": b"{}",
    "ends/1": b"{}",
}
ELSEWHERE = {
    "another rank": lambda key: key[:-1] + "2",
    "another run": lambda key: key,
    "another epoch": lambda key: key.replace("/3/", "/4/"),
    "another kind": lambda key: f"elsewhere/{key}",
}


# Where a key has no number of an agreement, its value has one, or the key is written once in a run.
COPIES = [(key, place) for key in WRITTEN for place in ELSEWHERE if place != "another epoch" or "/3/" in key]


@pytest.mark.guarantee(
    "Strangers",
    "A value sealed for another key, run, rank, agreement or token, or truncated, is ignored and named in "
    "the log.",
)
@pytest.mark.parametrize(("key", "place"), COPIES)
def test_member_value_copied_to_another_key_is_ignored(key: str, place: str) -> None:
    raw: dict[str, bytes] = {}
    Store("token", raw).put(key, WRITTEN[key])
    (signed,) = raw.values()
    run, copied = "other" if place == "another run" else "run", ELSEWHERE[place](key)
    reader = Store("token", {f"/recover/j/{run}/{copied}": signed}, f"/recover/j/{run}/")
    assert reader.get(copied) is None
    assert Store("token", raw).get(key) == KeyValue(key, WRITTEN[key], 1, 5)


@pytest.mark.guarantee(
    "Strangers",
    "A value sealed for another key, run, rank, agreement or token, or truncated, is ignored and named in "
    "the log.",
)
@pytest.mark.parametrize("key", WRITTEN)
def test_forged_values_are_ignored_by_every_read_and_named_once(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw: dict[str, bytes] = {}
    Store("token", raw).put("good", b"1")
    for forger in (Store(None, raw), Store("a guess", raw), Store("", raw)):
        forger.put(key, WRITTEN[key])
        reader = Store("token", raw)
        answer = reader.read(etcd.get(key), etcd.get_all("good"))
        assert reader.get(key) is None
        assert [found.key for found in reader.get_all()[0]] == ["good"]
        assert [[found.value for found in read] for read in answer.found] == [[], [b"1"]]
        assert [found.key for found in answer.forged] == [key]
        said = capsys.readouterr().err
        assert said.count(f"ignored /recover/j/run/{key} in etcd: it was not written with") == 1


def test_watch_reports_deletions_and_values_of_members_only() -> None:
    raw: dict[str, bytes] = {}
    member, told = Store("token", raw), list[KeyValue]()
    member.put("seen/ended", b"over")
    Store(None, raw).put("seen/dead/0000000001", b"because I say so")
    watch = EtcdWatch(member, "seen/", told.extend)
    watch._read_all()
    assert [found.key for found in told] == ["seen/ended"]
    key = _b64(b"/recover/j/run/seen/dead/0000000001")
    event = {"key": key, "mod_revision": "8"}
    assert [found.version for found in member.authentic([event])] == [0]
    assert member.authentic([event | {"value": _b64(b"because I say so"), "version": "1"}]) == ()


def test_guards_compare_sealed_values() -> None:
    raw: dict[str, bytes] = {}
    client = Store("token", raw)
    client.put("claim", b"mine")
    body = client._encoded([etcd.value_is("claim", b"mine"), etcd.value_is("other", b"mine")])
    assert base64.b64decode(body[0]["value"]) == raw["/recover/j/run/claim"]
    assert body[0]["value"] != body[1]["value"]


@pytest.mark.guarantee(
    "Strangers",
    "A value sealed for another key, run, rank, agreement or token, or truncated, is ignored and named in "
    "the log.",
)
def test_votes_and_decisions_of_another_agreement_do_not_count() -> None:
    """Their keys are the same in every agreement, so an attacker could put old values back."""
    raw: dict[str, bytes] = {}
    client = Store("token", raw)
    decision = {"number": 1, "word": 7, "dead": [], "joined": [], "participants": "0-1", "by": 0}
    client.put(DECISION, json.dumps(decision).encode())
    client.put(key_of(VOTE, 0), Vote(7, frozenset(), number=1).to_bytes())
    client.put(key_of(VOTE, 1), Vote(7, frozenset(), number=2).to_bytes())
    look = VoteSnapshot.of(client.read(*VOTE_SNAPSHOT))
    assert (look.count.decided, look.votes.keys()) == (1, {1})
    (found,) = client.read(*VOTE_COUNT).found[0]
    assert Decision.in_place(found) is not None
    put_back = KeyValue(found.key, found.value, 2, 9)
    assert Decision.in_place(put_back) is None
    news = MembershipCache(0, Decision.before_all(2), takes_part=True)
    news.apply([put_back])
    assert news.decision.number == 0


@pytest.mark.parametrize("replicas", [1, 2, 9, 10, 120, 200])
@pytest.mark.parametrize("size", [1, 8, 30, 60, 110])
def test_vote_compares_no_more_keys_than_etcd_allows_in_a_transaction(replicas: int, size: int) -> None:
    """The limit is 128 operations: those of a transaction and of the one inside of it together."""
    (written,) = cast(0, Vote(7, frozenset()), frozenset(range(replicas * size)), size)
    inner = written.get("request_txn", {"compare": []})
    guards = 2 + size + size  # two of its own, and at most one for each rank and for each host
    if inner["compare"]:
        assert guards + len(inner["compare"]) <= 128
        assert len(inner["compare"]) == replicas, "all others, and that nobody is dead"
    else:
        assert replicas > 9 or size > 30
    last = unanimous(0, Vote(7, frozenset()), frozenset(range(replicas * size)), size, OPERATIONS)
    assert (last is None) == (replicas > OPERATIONS + 1)
    assert last is None or 2 + len(last[0]) <= 128


def test_carrier_proof_needs_the_token_and_the_epoch() -> None:
    grid, worker = Grid(1, 1), Worker()

    def proof(token: str, epoch: str, sender: int = 0, receiver: int = 1) -> bytes:
        carriers = choose("gloo", SimpleNamespace(rank=0), grid, worker, False, "127.0.0.1", token=token)  # type: ignore[arg-type]
        carrier = carriers.make((0,))
        assert isinstance(carrier, GlooCarrier)
        return bytes(carrier._proof(epoch, sender, receiver))

    mine = proof("token", "nonces")
    assert mine == proof("token", "nonces")
    assert mine not in [proof("", "nonces"), proof("token", "others"), proof("token", "nonces", 1, 0)]


class End:
    """One end of a connection whose messages lie in lists, where a test may change them."""

    def __init__(self, sent: list[bytes], received: list[bytes]) -> None:
        self._sent, self._received = sent, received

    def send_bytes(self, data: bytes) -> None:
        self._sent.append(data)

    def recv_bytes(self, most: int | None = None) -> bytes:
        return self._received.pop(0)


def peers(of_speaker: str = "token", of_peer: str = "token") -> tuple[Channel, Channel, list[bytes]]:
    """Both ends after their first messages, and the list of messages on the wire to the speaker."""
    up, down = list[bytes](), list[bytes]()
    nonce = "ab" * 16
    ends = [End(down, up), End(up, down)]
    peer = Channel(ends[1], Authenticator(of_peer, "replica-peers"), False, nonce)  # type: ignore[arg-type]
    speaker = Channel(ends[0], Authenticator(of_speaker, "replica-peers"), True, nonce)  # type: ignore[arg-type]
    return speaker, peer, up


def test_peer_messages_are_accepted_once_in_order_and_from_their_signer() -> None:
    speaker, peer, up = peers()
    peer.send(b"one")
    peer.send(b"two")
    kept = list(up)
    assert [speaker.receive(), speaker.receive()] == [b"one", b"two"]
    for wrong in (
        [kept[0]],  # a message that was received already
        [kept[0][:-1]],
        [speaker._authenticator.sign("another session peer 2", b"three")],
        [speaker._authenticator.sign(f"{speaker.session} speaker 2", b"three")],  # its own message
        [Authenticator("a guess", "replica-peers").sign(f"{speaker.session} peer 2", b"three")],
        [b""],
    ):
        speaker._received = 2
        up[:] = wrong
        with pytest.raises(AuthenticationError, match="not signed with the job's token"):
            speaker.receive()
    speaker, peer, up = peers()
    peer.send(b"one")
    peer.send(b"two")
    up.reverse()
    with pytest.raises(AuthenticationError):
        speaker.receive()


def test_peers_without_the_same_token_do_not_connect() -> None:
    for theirs, met in (("token", True), ("a guess", False)):
        here, there = Pipe()
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(Channel.of_follower, there, Authenticator(theirs, "replica-peers"), 3)
            if not met:
                with pytest.raises(AuthenticationError):
                    Channel.of_leader(here, Authenticator("token", "replica-peers"))
                here.close()
                assert isinstance(told.exception(), EOFError | OSError)
                continue
            channel, rank = Channel.of_leader(here, Authenticator("token", "replica-peers"))
            channel.send(b"[]")
            assert (rank, told.result().session) == (3, channel.session)
        here.close()
        there.close()


class Wire:
    """The link between a giver and a taker, on which a test may replace the header."""

    def __init__(self) -> None:
        self.head: bytes | None = None

    def send_head(self, head: bytes) -> bool:
        self.head = head
        return True

    def receive_head(self) -> bytes | None:
        return self.head

    def give(self, parts: object) -> bool:
        return True

    take = give


class FakeParcel:
    opened: ClassVar[list[bytes]] = []
    position: ClassVar[dict[str, Any]] = {"votes": 1, "step": {"index": 1}}

    def __init__(self, *_: object, held: object) -> None: ...

    def pack(self, position: object) -> tuple[bytes, list[Any]]:
        return b"head", []

    def open(self, head: bytes) -> list[Any]:
        self.opened.append(head)
        return []

    def install(self) -> dict[str, Any]:
        return {"generators": None, "joining": {"why_pause": "", "joined": (0, ())}}


@pytest.mark.guarantee(
    "Strangers",
    "State is accepted only from its sender in its epoch, and network data is never unpickled unchecked.",
)
def test_state_is_accepted_only_from_its_sender_in_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content without this signature is not opened."""
    monkeypatch.setattr(state_handover, "Parcel", FakeParcel)
    monkeypatch.setattr(state_handover, "set_generators", lambda *_: None)
    wire = Wire()

    def end(token: str, epoch: int, peers: tuple[int, ...] = (0, 1, 2)) -> state_handover.StateHandover:
        board = SimpleNamespace(votes=lambda rank: 1, catch_up=lambda *_: None)
        world = SimpleNamespace(
            token=token, epoch=epoch, cross=SimpleNamespace(peers=peers), board=board, rank=2, worker=None
        )
        transaction: Any = SimpleNamespace(adopt_step=lambda index: None)
        position: Any = SimpleNamespace(give=dict, take=lambda state: None, index=1)
        joinable = SimpleNamespace(obstacle=lambda: None)
        state = torch.nn.Linear(1, 1), None, None, {}
        given: Any = world, transaction, position, state, lambda: None, joinable, None
        made = state_handover.StateHandover(*given)
        monkeypatch.setattr(made, "_stripes", lambda *_: wire)
        return made

    def taken(token: str, epoch: int, givers: tuple[int, ...] = (0, 1)) -> bool:
        FakeParcel.opened.clear()
        done = end(token, epoch)._take(givers, (2,)) is not None
        assert FakeParcel.opened == [b"head"] * done
        return done

    assert end("token", 5)._give((0, 1), (2,)) == 0
    sent = wire.head
    assert taken("token", 5)
    assert not taken("token", 6)
    assert not taken("token", 5, givers=(1,))
    assert not taken("another", 5)
    for other in (b"", b"head", sent[:-1] if sent else b"", b"x" * MAC_BYTES + b"head"):
        wire.head = other
        assert not taken("token", 5)


@pytest.mark.guarantee(
    "Strangers",
    "Etcd on one host listens on a private socket; several hosts on an etcd started by an agent need "
    "`--token-file`.",
)
def test_several_hosts_on_an_own_etcd_need_a_token_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a token file the token would lie in that etcd. The site protects an etcd that was running before."""
    monkeypatch.setattr(own_etcd, "resolved", lambda name: ("10.0.0.1",))
    monkeypatch.setattr(own_etcd, "is_of_this_host", lambda address: True)
    listens = [False]
    monkeypatch.setattr(own_etcd, "_listens", lambda address, port: listens[0])
    open_etcd = EtcdAccess(("h1:2379",), "/recover/j/")
    with pytest.raises(Refusal) as refusal:
        own_etcd.check_token(open_etcd, alone=False)
    assert "(umask 077; head -c 32 /dev/urandom | base64 > token)" in str(refusal.value)
    assert "--token-file is not given, and no process listens at h1:2379" in str(refusal.value)
    own_etcd.check_token(open_etcd, alone=True)
    own_etcd.check_token(EtcdAccess(("h1:2379",), "/recover/j/", "token"), alone=False)
    own_etcd.check_token(EtcdAccess(("h1:2379",), "/recover/j/", user="us"), alone=False)
    listens[0] = True
    own_etcd.check_token(open_etcd, alone=False)
    made = make_token_file(tmp_path / "token")
    assert made.stat().st_mode & 0o077 == 0
    assert len(made.read_text().strip()) == 64
    assert make_token_file(made).read_text() == made.read_text()


@pytest.mark.guarantee(
    "Strangers",
    "Etcd on one host listens on a private socket; several hosts on an etcd started by an agent need "
    "`--token-file`.",
)
def test_single_host_job_has_its_own_token_and_socket() -> None:
    tokens = {read_options(one_host(2, 1, HostOptions(returns=True)), {}).token for _ in range(3)}
    assert len(tokens) == 3
    assert min(map(len, tokens)) >= 32
    options = one_host(2, 1, HostOptions(returns=True))
    assert read_options(options, {}).endpoints == ("unix:",)
    with pytest.raises(Refusal, match="a socket of this host, which no other host reaches"):
        read_options(HostOptions(nnodes="2", rdzv_endpoint="unix:", rdzv_id="j"), {})


@pytest.mark.guarantee("Strangers", "Ranks join only jobs started with `--return` or `--nnodes MIN:MAX`.")
@pytest.mark.parametrize(
    ("options", "admits"),
    [
        ({"nnodes": "2"}, False),
        ({"nnodes": "2:3"}, True),
        ({"nnodes": "2", "returns": True}, True),
        ({"nnodes": "2", "standby": 1}, True),
    ],
)
def test_ranks_join_only_jobs_started_with_joins(options: dict[str, Any], admits: bool) -> None:
    assert read_options(HostOptions(rdzv_endpoint="h", rdzv_id="j", **options), {}).admits is admits


OWN_PIPES = {"recover/data/readers.py"}  # this module unpickles only data of its own child processes


@pytest.mark.guarantee(
    "Strangers",
    "State is accepted only from its sender in its epoch, and network data is never unpickled unchecked.",
)
def test_network_data_is_never_unpickled() -> None:
    """The package neither imports pickle modules, nor calls torch's collectives of objects, nor `recv()` of a
    `multiprocessing` connection."""
    found = set()
    for path in sorted((ROOT / "recover").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = node.names if isinstance(node, ast.Import) else []
            called = (
                node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            )
            received = called == "recv" and isinstance(node, ast.Call) and not node.args
            if (
                {one.name for one in imported} & {"pickle", "marshal", "dill", "cloudpickle"}
                or called.endswith(("gather_object", "_object_list"))
                or received
            ):
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= OWN_PIPES


def test_seals_are_stable_across_messages_and_versions() -> None:
    """Ranks compare each other's sealed values, and a newer agent reads values that an older one has sealed."""
    key, hiding = (
        hmac.digest(b"secret", f"recover etcd {use}".encode(), "sha256")
        for use in ("authentication", "encryption")
    )
    authenticator = Authenticator("secret", "etcd")
    for place, data in [("/a", b"value"), ("/b", b""), ("/a", b"value")]:
        mac = hmac.digest(key, len(place).to_bytes(8, "little") + place.encode() + data, "sha256")
        stream = hashlib.shake_256(hiding + mac).digest(len(data))
        sealed = mac + bytes(a ^ b for a, b in zip(data, stream, strict=True))
        assert authenticator.seal(place, data) == sealed
        assert authenticator.unsealed(place, sealed) == data
