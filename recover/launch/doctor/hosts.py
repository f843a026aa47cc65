"""`recover doctor --hosts`: checks whether jobs run on these hosts together. Run it on each of
them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from recover.job.host_options import HostOptions
from recover.launch.doctor.checks import Finding, show
from recover.launch.doctor.hosts_probe import RESULT
from recover.launch.hosts.agent import launch_host
from recover.launch.request import LaunchRequest

_APART = 0.5  # seconds between two clocks, from which on logs and incidents are in the wrong order
_SLOW = 0.5  # of the bandwidth of the fastest link; a slower link delays all ranks
_PROBE = Path(__file__).with_name("hosts_probe.py")


def examine_hosts(options: HostOptions) -> int:
    """Print the table; 0 if jobs will run on these hosts, 1 if not, 2 if there was no
    rendezvous."""
    with tempfile.TemporaryDirectory() as directory:
        options = replace(options, nproc_per_node="1")
        code = launch_host(options, LaunchRequest(_PROBE, run_dir=Path(directory), timeout=120, faults=()))
        path = Path(directory, RESULT)
        if code or not path.exists():
            return code or 1
        found = json.loads(path.read_text())
    return show(findings_between(found["hosts"], found["pairs"]), "jobs here survive the loss of hosts")


def findings_between(hosts: dict[str, Any], pairs: dict[str, Any]) -> Iterator[Finding]:
    """The findings about hosts and their links. `hosts` are named by their numbers, `pairs` as `0-1`."""
    for facts in hosts.values():
        yield from _of_one(facts)
    for pair, found in sorted(pairs.items()):
        server, client = (hosts[number]["host"] for number in pair.split("-"))
        yield from _between(f"{client} to {server}", found, hosts[pair.partition("-")[0]])
    rates = {pair: found["mbit"] for pair, found in pairs.items() if "mbit" in found}
    for pair, rate in sorted(rates.items()):
        if rate < _SLOW * max(rates.values()):
            names = " and ".join(hosts[number]["host"] for number in pair.split("-"))
            yield Finding(
                "bandwidth",
                "warn",
                f"{rate:,.0f} Mbit/s between {names}, {max(rates.values()):,.0f} elsewhere",
                "the slowest way holds up all: check its cable, its switch port, or what else uses it",
            )


def _of_one(facts: dict[str, Any]) -> Iterator[Finding]:
    machine = facts["machine"]
    seen = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "recover", "cores"))
    yield Finding(facts["host"], "ok", f"{facts['address']} ({facts['interface']}), {seen}")
    wrong = [address for address in facts["resolves"] if address.startswith("127.")]
    if wrong:
        yield Finding(
            f"name of {facts['host']}",
            "warn",
            f"{facts['name']} is {wrong[0]} on the host itself",
            "no harm to jobs of `--nnodes`; for Open MPI give it its real address in /etc/hosts",
        )


def _between(way: str, found: dict[str, Any], server: dict[str, Any]) -> Iterator[Finding]:
    if error := found.get("error"):
        remedy = (
            "let TCP through between these hosts, on all ports (firewall, security group, network policy)"
        )
        yield Finding(way, "FAIL", error, remedy)
        return
    yield Finding(way, "ok", f"{found['mbit']:,.0f} Mbit/s, answer in {2e3 * found['unsure']:.2f} ms")
    if abs(found["ahead"]) - found["unsure"] > _APART:
        remedy = "synchronise the clocks (chrony, NTP): times in logs and incidents cannot be compared"
        yield Finding(f"clocks, {way}", "warn", f"{abs(found['ahead']):.1f} s apart", remedy)
    if server["address"] not in found["resolves"]:
        seen = (
            f"{server['name']} is {', '.join(found['resolves']) or 'nothing'} there, not {server['address']}"
        )
        yield Finding(f"names, {way}", "warn", seen, "no harm if --rdzv-endpoint names addresses")
    if server["mtu"] and found["mtu"] != server["mtu"]:
        seen = f"packets of {server['mtu']} bytes do not come through; {found['mtu'] or 'none'} do"
        remedy = "set the same MTU on hosts and switches: large messages hang where small ones pass"
        yield Finding(f"MTU, {way}", "FAIL" if found["mtu"] is None else "warn", seen, remedy)
