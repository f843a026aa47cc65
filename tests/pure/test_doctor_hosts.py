"""`recover doctor` on several hosts: its messages for each finding, and that every pair of hosts is tried."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from recover.launch.doctor.hosts import findings_between
from recover.launch.doctor.hosts_probe import rounds


@pytest.mark.guarantee("Several hosts", "The doctor tries every pair of hosts and names the remedy.")
@pytest.mark.parametrize("size", range(1, 10))
def test_doctor_tries_every_pair_of_hosts_once_without_overlap(size: int) -> None:
    found = rounds(size)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(size), 2))
    assert all(len(set(sum(pairs, ()))) == 2 * len(pairs) for pairs in found)


def host(number: int, **more: Any) -> dict[str, Any]:
    machine = {"python": "3.11.7", "torch": "2.9", "recover": "0.1.0", "cores": 8}
    facts = {"host": f"h{number}", "name": f"h{number}", "address": f"10.0.0.{number}", "interface": "eth0"}
    return facts | {"mtu": 1500, "resolves": [facts["address"]], "machine": machine} | more


GOOD = {"mbit": 1000.0, "ahead": 0.01, "unsure": 0.001, "mtu": 1500}


@pytest.mark.guarantee("Several hosts", "The doctor tries every pair of hosts and names the remedy.")
@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({}, "ok", ""),
        ({"error": "ConnectionRefusedError: refused"}, "FAIL", "let TCP through between these hosts"),
        ({"ahead": -3.0}, "warn", "3.0 s apart"),
        ({"ahead": -3.0, "unsure": 2.9}, "ok", ""),
        ({"mtu": 1400}, "warn", "packets of 1500 bytes do not come through; 1400 do"),
        ({"mtu": None}, "FAIL", "set the same MTU"),
        ({"resolves": ["127.0.1.1"]}, "warn", "h1 is 127.0.1.1 there, not 10.0.0.1"),
        ({"mbit": 400.0}, "warn", "400 Mbit/s between h1 and h2, 1,000 elsewhere"),
    ],
)
def test_doctor_reports_problems_between_hosts_with_the_remedy(
    change: dict[str, Any], status: str, words: str
) -> None:
    hosts = {str(number): host(number + 1) for number in range(3)}
    pairs = {pair: GOOD | {"resolves": [hosts[pair[0]]["address"]]} for pair in ("0-1", "0-2", "1-2")}
    pairs["0-1"] = pairs["0-1"] | change
    found = list(findings_between(hosts, pairs))
    wrong = [finding for finding in found if finding.status != "ok"]
    assert {finding.status for finding in wrong} == ({status} - {"ok"})
    assert not words or any(words in f"{finding.seen} {finding.remedy}" for finding in wrong)
    assert all(finding.remedy for finding in wrong)
