"""One vote per replica on etcd: its lowest rank speaks for all of it, and is no more of a risk than any other."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client

import pytest
from etcd_fabrics import Fabrics, agree, at_once
from patience import PATIENCE, wait_until

from recover.job.authentication import Authenticator
from recover.world.fabrics.etcd import replica_peers
from recover.world.fabrics.etcd.agreement import declare, key_of
from recover.world.fabrics.etcd.fabric import DeclaredDeadError
from recover.world.fabrics.etcd.replica_peers import ReplicaFollower

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.mark.guarantee("On etcd", "A replica casts one vote, which none of its ranks contradicts.")
def test_replica_casts_one_vote_that_no_rank_of_it_contradicts(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(6, replica_size=3)
    early = threading.Thread(
        target=agree, args=[[*ranks[:2], *ranks[3:]], 0b0111, 0b1011, 0b1111, 0b1111, 0b1111], daemon=True
    )
    early.start()
    assert wait_until(lambda: key_of("vote/", 3) in fabrics.store())
    # Rank 0 has its own word, and that of one peer, or will have it soon.
    assert not wait_until(lambda: key_of("vote/", 0) in fabrics.store(), 0.2), (
        "a replica has voted although one of it has not"
    )
    assert agree(ranks[2:3], 0b1110) == [0b0010]
    early.join()
    assert {rank.agreed.value for rank in ranks} == {ranks[0].agreed.value}
    for number in range(50):
        assert agree(ranks, number) == [number] * 6


@pytest.mark.guarantee(
    "On etcd",
    "A peer that dies after its word was counted ends its replica, and a rank that lost its replica's "
    "speaker decides nothing.",
)
def test_peer_that_dies_after_its_word_was_counted_ends_its_replica(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(6, replica_size=2)
    assert agree(ranks, 1) == [1] * 6
    voting = threading.Thread(target=lambda: ends.extend(agree(ranks[2:4], 1)), daemon=True)
    ends: list[object] = []
    voting.start()
    assert wait_until(lambda: key_of("vote/", 2) in fabrics.store())
    declare(fabrics.etcd, 3, "by decree, after its replica has voted")
    assert agree([*ranks[:2], *ranks[4:]], 1) == [None] * 4
    assert ranks[0].agreed.dead == {2, 3}
    voting.join(PATIENCE)
    assert [type(end) for end in ends] == [DeclaredDeadError] * 2, "its peer must not go on"
    living = [*ranks[:2], *ranks[4:]]
    assert [rank.failed() for rank in living] == [{2, 3}] * 4, "all know, also those who hear it from a peer"
    for rank in living:
        rank.acknowledge()
    assert agree(living, 1) == [1] * 4
    assert living[0].participants == {0, 1, 4, 5}


@pytest.mark.guarantee(
    "On etcd",
    "A peer that dies after its word was counted ends its replica, and a rank that lost its replica's "
    "speaker decides nothing.",
)
def test_rank_that_lost_its_replica_speaker_ends_and_decides_nothing(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2, replica_size=2)
    assert agree(ranks, 1) == [1] * 2
    ranks[0].close()
    declare(fabrics.etcd, 0, "by decree")
    ends = agree(ranks, 1)
    assert [type(end) for end in ends] == [DeclaredDeadError] * 2
    assert fabrics.store()["seen/decision"].version == 1


@pytest.mark.guarantee(
    "On etcd",
    "A lost connection between replica peers costs nothing, and a process without the token is ignored.",
)
def test_lost_connection_between_replica_peers_costs_nothing(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(4, replica_size=2)
    for number in range(20):
        speaker, watch = ranks[0]._leader, ranks[3]._watch
        assert speaker is not None
        assert isinstance(watch, ReplicaFollower)

        def cut(
            number: int = number,
            watch: ReplicaFollower = watch,
            speaker: replica_peers.ReplicaLeader = speaker,
        ) -> None:
            time.sleep(number * 0.0005)
            watch._interrupt()
            with speaker._lock:
                speaker._disconnect(1)

        def vote(number: int = number) -> list[object]:
            return agree(ranks, number)

        assert at_once(vote, cut)[0] == [number] * 4


@pytest.mark.guarantee(
    "On etcd",
    "A lost connection between replica peers costs nothing, and a process without the token is ignored.",
)
def test_replica_peers_ignore_a_process_without_the_token(fabrics: Fabrics) -> None:
    (alone,), _ = fabrics.make(1, token="secret")
    assert alone._leader is None, "one without peers listens to nobody"
    fabrics.etcd.delete_all()
    ranks, _ = fabrics.make(2, replica_size=2, token="secret")
    assert agree(ranks, 1) == [1] * 2
    claim = json.loads(fabrics.store()[key_of("claim/", 0)].value)
    host, port = claim["address"].split(":")
    assert host == "127.0.0.1"
    # A stranger that guesses the token, and says that it is rank 1.
    heard = b""
    with suppress(OSError, EOFError), Client((host, int(port))) as stranger:
        nonce = stranger.recv_bytes().decode()
        guess = Authenticator("a guess", "replica-peers").sign(f"{nonce} peer 0", b'[1, "mine"]')
        stranger.send_bytes(guess)
        heard = stranger.recv_bytes()
    assert heard == b"", "a stranger was taken for a peer"
    assert agree(ranks, 7) == [7] * 2
    with socket.create_connection((host, int(port))) as silent:
        assert agree(ranks, 1) == [1] * 2, "one who says nothing is in nobody's way"
        silent.settimeout(30)
        silent.recv(1000)
        while silent.recv(1000):
            pass  # until the rank closes the connection
    assert b"secret" not in b"".join(found.value for found in fabrics.store().values())
