"""`recover bench hosts`: agreements and steps on several hosts, and the loss of a rank, a host or a link."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from recover.runs.records.kinds import Event
from recover.world.fabrics.etcd.server import EtcdServer
from recover_lab.bench.measure import PROGRAMS, begin, machine_line, paired_ratio, summary, write
from recover_lab.bench.peers import judge
from recover_lab.lab.hosts import unavailable
from recover_lab.peers.ended import BenchmarkError, check
from recover_lab.peers.host_stage import HostPool, open_pool
from recover_lab.peers.kills import PARTS_OF_A_KILL, kill_sample
from recover_lab.peers.metrics import failures, restarts, step_seconds
from recover_lab.peers.runs import scratch
from recover_lab.peers.scene import Scene
from recover_lab.peers.stage_runs import (
    Strike,
    processes_on,
    run_ours_parted,
    run_ours_struck,
    run_restart_struck,
    run_torchft_struck,
    start_ours,
)
from recover_lab.peers.torchft_runs import TorchftUnavailable, install_torchft, torchft_home
from recover_lab.publish.figure import Figure, Results, Rows, milliseconds, show

WORK = 0.3  # seconds between two agreements, at most: replicas do not arrive all at once
PARTS = ("agreement", "step", "kill", "links", "peers")
BETWEEN = 3  # steps from one fault to the next
FIRST = 4  # the first step with a fault


@dataclass(frozen=True)
class HostsOptions:
    """The cases to measure. `replicas`: numbers that agree; `hosts`: numbers for a step; `struck`: hosts of a kill."""

    parts: Sequence[str]
    replicas: Sequence[int]
    agreements: int
    hosts: Sequence[int]
    model: str
    turns: int
    struck: int
    per_host: int
    rounds: int
    pace: float
    lease: float
    link_timeout: float
    timeout: float  # seconds after which stock torch and torchft count a peer as lost

    @property
    def scene(self) -> Scene:
        """The job of kills and power cuts."""
        return Scene(replicas=self.struck * self.per_host, accum=1, pace=self.pace, seq_len=32)


def bench_hosts(options: HostsOptions, environment: Path | None, output: Path | None) -> dict[str, Any]:
    console = begin(output)
    results: dict[str, Any] = {}
    if "agreement" in options.parts:
        results |= _agreements(options, console)
    if "step" in options.parts:
        results["step"] = {str(hosts): _step(options, hosts, console) for hosts in options.hosts}
    if "kill" in options.parts:
        results["kill"] = _kills(options, console)
    if "links" in options.parts and unavailable() is None:
        results["links"] = _links(options, console)
    if "peers" in options.parts:
        results["power_cut"] = _peers(options, environment, console)
    results["hosts"] = {
        "emulated": (why := unavailable()) is None,
        "why_not": why or "",
        "struck": options.struck,
        "per_host": options.per_host,
        "lease": options.lease,
        "link_timeout": options.link_timeout,
        "pace": options.pace,
        "timeout": options.timeout,
    }
    write(output, {"hosts": results})
    show(console, "several hosts", FIGURE.rows(results))
    console.print(machine_line())
    return results


def _agreements(options: HostsOptions, console: Console) -> dict[str, Any]:
    """Time from the last vote until the last replica holds the result, by number of replicas; one etcd in memory."""
    latencies, own = {}, {}
    for count in options.replicas:
        console.print(f"{count} replicas agree ...", style="dim")
        rounds = [zip(*round, strict=True) for round in zip(*_times(count, options.agreements), strict=True)]
        waits = [(max(held) - max(came), held[came.index(max(came))] - max(came)) for came, held in rounds]
        latencies[str(count)], own[str(count)] = (
            summary([1e3 * wait for wait in kind]) for kind in zip(*waits, strict=True)
        )
    return {"agreement_ms": latencies, "agreement_own_ms": own}


def _step(options: HostsOptions, hosts: int, console: Console) -> dict[str, Any]:
    """Time of a step without failures: turn by turn in the same processes and over the same links, one rank on each
    host."""
    console.print(f"a step on {hosts} hosts, ours and stock DDP ...", style="dim")
    with (
        scratch() as directory,
        open_pool(hosts, directory) as pool,
        processes_on(pool, directory / "run") as processes,
    ):
        words = [options.model, "128", "2", str(options.turns), "fast"]
        agents = start_ours(processes, 1, options.lease, PROGRAMS / "overhead.py", words)
        processes.wait(lambda: all(agent.poll() is not None for agent in agents.values()))
        ranks = [json.loads(path.read_text()) for path in processes.place.glob("overhead-*.json")]
        if len(ranks) != hosts:
            processes.wait(lambda: False, lambda: True)  # raises with the logs
    seconds = {
        name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in ("stock", "ours")
    }
    ratio, low, high = paired_ratio(seconds["stock"], seconds["ours"])
    return {
        "parameters": ranks[0]["parameters"],
        "milliseconds": {name: summary([1e3 * each for each in took]) for name, took in seconds.items()},
        "ratio": {"value": ratio, "low": low, "high": high, "turns": options.turns},
    }


def _kills(options: HostsOptions, console: Console) -> dict[str, Any]:
    """Time from a fault inside a reduction to the commit of that step by all survivors, by kind of fault."""
    samples: dict[str, list[dict[str, float]]] = {}
    steps: list[float] = []
    for number in range(options.rounds):
        console.print(
            f"a rank, a host and a link are lost, run {number + 1} of {options.rounds} ...", style="dim"
        )
        with scratch() as directory, open_pool(options.struck, directory) as pool:
            strikes = strikes_on(pool, options.per_host)
            scene = options.scene.but(steps=strikes[-1].step + 2)
            events = run_ours_struck(pool, scene, options.per_host, options.lease, strikes, directory / "run")
        for strike, sample in zip(strikes, kill_samples(events, scene.global_batch), strict=True):
            samples.setdefault(strike.what, []).append(sample)
        steps += list(step_seconds(events).values())[1:]
    return {
        what: {name: summary([1e3 * sample[name] for sample in found]) for name in found[0]}
        for what, found in samples.items()
    } | {"step": summary([1e3 * took for took in steps])}


def _links(options: HostsOptions, console: Console) -> dict[str, Any]:
    """Two of the hosts lose their link to each other, and reach all others, etcd included."""
    samples = []
    for number in range(options.rounds):
        console.print(f"two hosts lose their link, run {number + 1} of {options.rounds} ...", style="dim")
        scene = options.scene.but(steps=FIRST + 2 * BETWEEN)
        with scratch() as directory, open_pool(options.struck, directory) as pool:
            settings = options.per_host, options.lease, options.link_timeout, FIRST
            events = run_ours_parted(pool, scene, *settings, directory / "run")
        samples.append(link_sample(events, scene.global_batch))
    return {name: summary([1e3 * sample[name] for sample in samples]) for name in samples[0]}


def link_sample(events: Sequence[Event], batch: int) -> dict[str, float]:
    """`after`: seconds from the detection of a broken link to the commit of the step by all survivors.

    Raises BenchmarkError if that step was not committed on the whole batch.
    """
    (cut,) = failures(events)
    ended = [event for event in events if event["what"] == "step-end" and event["at"] > cut["at"]]
    struck = [event | {"committed": event["at"]} for event in ended if event["incidents"]]
    if not struck or {event["microbatches"] for event in ended} != {batch}:
        raise BenchmarkError(
            f"the broken link cost no replica, or a step was not committed on {batch} microbatches"
        )
    sample = kill_sample(cut["at"], struck)
    return sample | {"after": sample["whole"] - sample["notice"]}


def strikes_on(pool: HostPool, per_host: int) -> list[Strike]:
    """The faults of a run: a rank of every host, from the last; then the power of the last host; then the link of the
    host before it."""
    names, last = pool.names, len(pool.names) - 1
    struck = [("rank", number, per_host - 1) for number in range(last, -1, -1)]
    struck += [("host", last, 0)] + [("link", last - 1, 0)] * pool.emulated
    return [
        Strike(what, FIRST + BETWEEN * count, number * per_host + slot, names[number])
        for count, (what, number, slot) in enumerate(struck)
    ]


def kill_samples(events: Sequence[Event], batch: int) -> list[dict[str, float]]:
    """A sample of each fault. Raises BenchmarkError if its step was not committed on the whole batch."""
    found = []
    for failure in failures(events):
        ended = [
            event for event in events if event["what"] == "step-end" and event["step"] == failure["step"]
        ]
        struck = [event for event in ended if event["incidents"] and event["at"] > failure["at"]]
        if not struck or {event["microbatches"] for event in struck} != {batch}:
            raise BenchmarkError(
                f"step {failure['step']} was not committed on {batch} microbatches by the survivors"
            )
        survivors = [event | {"committed": event["at"]} for event in struck]
        found.append(kill_sample(failure["at"], survivors))
    return found


def _peers(options: HostsOptions, environment: Path | None, console: Console) -> dict[str, Any]:
    """The same power cut, of the last host in the reduction of one step: ours, torchrun's restart, torchft."""
    kill = FIRST + BETWEEN
    scene = options.scene.but(steps=kill + 3, kills=((kill, options.scene.replicas - options.per_host),))
    per_host, found = options.per_host, dict[str, Any]()
    for name in ("ours", "torchrun", "torchft"):
        console.print(f"a host loses its power: {name} ...", style="dim")
        with ExitStack() as kept:
            directory = kept.enter_context(scratch())
            pool = kept.enter_context(open_pool(options.struck, directory))
            run = directory / "run"
            try:
                if name == "ours":
                    strike = Strike("host", kill, scene.kills[0][1], pool.names[-1])
                    found[name] = judge(run_ours_struck(pool, scene, per_host, options.lease, [strike], run))
                elif name == "torchrun":
                    events = run_restart_struck(pool, scene.but(save_every=2), per_host, options.timeout, run)
                    (restart,) = restarts(events)
                    facts = {"seconds": round(restart.H - restart.C, 3), "stall": round(restart.stall, 3)}
                    found[name] = facts | {"inside_restart": restart.inside_restart()}
                else:
                    python = install_torchft(environment or torchft_home(), console)
                    events = run_torchft_struck(pool, scene, per_host, python, "Manager.allreduce", run)
                    found[name] = judge(without_the_lost(events, scene.replicas))
            except (TorchftUnavailable, BenchmarkError) as reason:
                console.print(f"{name}: {reason}", markup=False)
                found[name] = {"seconds": f"not measured: {str(reason).splitlines()[0]}"}
    return {"scene": scene.to_json(), "systems": found}


def without_the_lost(events: Sequence[Event], replicas: int) -> list[Event]:
    """The events without steps that all replicas committed although a replica was lost in them.

    torchft commits a step as soon as the sum is complete, and the victim has contributed before it waits.
    """
    struck = failures(events)[0]["at"]
    return [
        event
        for event in events
        if event["what"] != "step-end" or event["at"] < struck or event["microbatches"] < replicas
    ]


def _times(replicas: int, agreements: int) -> list[list[list[float]]]:
    """The time of the vote and the time of the result, by rank and agreement."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        warnings.simplefilter("ignore")  # about the version of etcd, which does not change its speed
        with EtcdServer() as server:
            arguments = [
                server.endpoint,
                f"/recover/bench-{replicas}/",
                str(replicas),
                str(agreements),
                str(WORK),
            ]
            command = [sys.executable, str(PROGRAMS / "agreements.py"), *arguments, directory]
            code = subprocess.run(command, timeout=60 + agreements * (WORK + 1)).returncode
        check(code, f"{replicas} replicas that agree in etcd ended with code {code}")
        return [json.loads(Path(directory, f"times-{rank}.json").read_text()) for rank in range(replicas)]


def _values(results: Results) -> dict[str, Any]:
    values: dict[str, Any] = {
        f"{kind}-{replicas}": f"{facts['median']:.1f} ms"
        for kind, name in (("all", "agreement_ms"), ("own", "agreement_own_ms"))
        for replicas, facts in results.get(name, {}).items()
    }
    for hosts, facts in results.get("step", {}).items():
        values[f"step-{hosts}"] = f"{facts['ratio']['value']:.2f}x"
    for what, facts in results.get("kill", {}).items():
        if "less_redone" in facts:
            values[f"kill-{what}"] = f"{facts['less_redone']['median']:.0f} ms"
    if "links" in results:
        values["links"] = f"{results['links']['after']['median'] / 1e3:.1f} s"
    for name, facts in results.get("power_cut", {"systems": {}})["systems"].items():
        seconds = facts["seconds"]
        values[f"power-cut-{name}"] = f"{seconds:.1f} s" if isinstance(seconds, float) else seconds
    return values


def _rows(results: Results) -> Rows:
    rows: Rows = [["", "measured", "parts, or for comparison"]]
    for replicas, facts in results.get("agreement_ms", {}).items():
        own = milliseconds(results["agreement_own_ms"][replicas])
        name = f"an agreement of {replicas} replicas, last vote to last result"
        rows.append([name, milliseconds(facts), f"the last voter's own {own}"])
    for hosts, facts in results.get("step", {}).items():
        ratio, took = facts["ratio"], facts["milliseconds"]
        both = f"ours {took['ours']['median']:.0f} ms, stock DDP on gloo {took['stock']['median']:.0f} ms"
        name = f"a step on {hosts} hosts, {facts['parameters'] / 1e6:.1f}M parameters, against stock DDP"
        rows.append([name, f"{ratio['value']:.3f}x ({ratio['low']:.3f} to {ratio['high']:.3f})", both])
    names = {"rank": "SIGKILL of a rank", "host": "a host loses its power", "link": "a host is cut off"}
    for what, facts in results.get("kill", {}).items():
        if what in names:
            parts = ", ".join(f"{part} {facts[part]['median']:.0f}" for part in PARTS_OF_A_KILL)
            name = f"{names[what]}: to the commit, less what is computed again"
            rows.append([name, milliseconds(facts["less_redone"]), f"{parts}; n = {facts['whole']['n']}"])
    if facts := results.get("links"):
        name = "two hosts lose their link, and reach all others: from the detection to the commit"
        notice = f"detected after {facts['notice']['median'] / 1e3:.1f} s; n = {facts['whole']['n']}"
        rows.append([name, milliseconds(facts["after"]), notice])
    for name, facts in results.get("power_cut", {"systems": {}})["systems"].items():
        seconds = facts["seconds"]
        value = f"{seconds:.2f} s" if isinstance(seconds, float) else seconds
        batch = f"on {facts['microbatches']} microbatches" if "microbatches" in facts else ""
        rows.append([f"power cut to the next committed step, {name}", value, batch])
    if "hosts" in results and not results["hosts"]["emulated"]:
        rows.append(["hosts are processes of this machine", "", results["hosts"]["why_not"]])
    return rows


FIGURE = Figure(
    name="hosts",
    text="Several hosts, emulated by namespaces of one machine where that is possible. An agreement: from the last "
    "vote to the last replica that holds the result, one etcd in memory; replicas arrive at uneven times. A step "
    "against stock DDP on gloo, turn by turn over the same links. A rank, a host and a link are lost inside a "
    "reduction; two hosts lose their link to each other alone. The same power cut on torchrun and torchft.",
    values=_values,
    rows=_rows,
)
