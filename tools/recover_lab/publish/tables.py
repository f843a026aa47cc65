"""The figures of every part as rows of a table, the first of them its head."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from recover_lab.peers.kills import PARTS_OF_A_KILL
from recover_lab.publish.headlines import SHARE, told

Rows = list[list[Any]]


def rows_of(part: str, results: dict[str, Any]) -> Rows:
    tellers = {
        "trajectory": _trajectory,
        "breakdown": _breakdown,
        "multi": _multi,
        "sweep": _sweep,
        "peers": _peers,
        "gpu": _gpu,
        "simulate": _simulate,
        "return": _return,
        "returning": _returning,
        "hosts": _hosts,
    }
    return tellers.get(part, _flat)(results)


def show(console: Console, title: str, rows: Rows) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(str(column), justify="right")
    for row in rows[1:]:
        table.add_row(*map(str, row))
    console.print(table)


def _trajectory(results: dict[str, Any]) -> Rows:
    rows: Rows = [
        [
            "",
            "microbatches a step",
            "tokens/s per living rank",
            "per rank at the start",
            "final loss",
            "loss apart, most",
        ]
    ]
    for name, run in results["runs"].items():
        batches = sorted({step["microbatches"] for step in run["steps"]})
        apart = f"{run['largest_distance']:.2g}" if "largest_distance" in run else ""
        figures = (f"{run[key]:.1f}" for key in ("effective_throughput", "per_provisioned_rank"))
        final = f"{run['steps'][-1]['loss']:.4f}"
        span = " to ".join(map(str, dict.fromkeys((batches[0], batches[-1]))))
        rows.append([name, span, *figures, final, apart])
    return rows


def _breakdown(results: dict[str, Any]) -> Rows:
    rows: Rows = [["N", "", "until the step is complete", "pieces, in seconds"]]
    for row in results["rows"]:
        for side, name in (("baseline", "restart"), ("ours", "ours")):
            pieces = ", ".join(f"{key} {value:.2f}" for key, value in row[side]["pieces"].items())
            rows.append([row["N"], name, f"{row[f'{side}_cost']:.2f} s", pieces])
    return rows


def _multi(results: dict[str, Any]) -> Rows:
    intervals = results["ours"]["intervals"]
    rows: Rows = [["", *(f"{each['alive']} ranks alive" for each in intervals), "tokens at equal rank-hours"]]
    for name, key in (
        ("ours", "effective_throughput"),
        ("ours, per rank at the start", "per_provisioned_rank"),
    ):
        rows.append([name, *(f"{each[key]:.1f}" for each in intervals), ""])
    for theirs in results["baselines"]:
        speeds = (f"{each['effective_throughput']:.1f}" for each in theirs["intervals"])
        more = f"ours {theirs['advantage']['more']:+.1%}"
        rows.append([f"restart, saving every {theirs['save_every']} steps", *speeds, more])
        rows.append(["ours against it", *(f"{ratio:.2f} times" for ratio in theirs["ratios"]), ""])
    return rows


def _sweep(results: dict[str, Any]) -> Rows:
    rows: Rows = [
        [
            "alive",
            "better per living rank while a stall is more than",
            "better per hour while it is more than",
        ]
    ]
    for curve in results["curves"]:
        shares = (curve["crossing_effective"], curve["crossing_wall"])
        rows.append([curve["alive"], *(told(share, "always", after=f" of {SHARE}") for share in shares)])
    for point in results["measured"]:
        figures = f"{point['measured']:.2f} times measured, {point['predicted']:.2f} by arithmetic"
        rows.append([point["alive"], f"at {point['share']:.0%}", figures])
    return rows


def _peers(results: dict[str, Any]) -> Rows:
    rows: Rows = [["", "seconds from SIGKILL to the next committed step", "its microbatches", "discarded"]]
    for name, peer in results["systems"].items():
        rows.append([name, *(peer.get(key, "") for key in ("seconds", "microbatches", "discarded"))])
    return rows


def _gpu(results: dict[str, Any]) -> Rows:
    rows: Rows = [["", "carrier", "ours", "beside it, in the same run"]]
    for model, carriers in results["step"].items():
        for carrier, facts in carriers.items():
            name = f"step without failures, {model} ({facts['parameters'] / 1e6:,.0f}M parameters)"
            others = [way for way in facts["milliseconds"] if way != "ours"]
            rows.append([name, carrier, _took(facts, "ours"), "; ".join(_took(facts, way) for way in others)])
    for carrier, facts in results["kill"].items():
        took, left = facts["kill_to_commit_ms"], facts["less_redone_ms"]
        name = f"SIGKILL inside a reduction to the commit, {facts['model']}, {facts['replicas']} replicas"
        whole = f"{took['median']:.0f} ms, {left['median']:.0f} less the microbatches run again"
        parts = ", ".join(f"{part} {ms['median']:.0f}" for part, ms in facts["parts_ms"].items())
        kept = f"{facts['deaths']} deaths, every step on {facts['microbatches']} microbatches"
        if facts["broken"]:
            kept += f"; {len(facts['broken'])} of {facts['launches']} launches were lost"
        rows.append(
            [name, carrier, whole, f"{parts}; {kept}; a step takes {facts['step_ms']['median']:.0f} ms"]
        )
    for carrier, facts in results["reduce"].items():
        for size, ways in facts["gigabytes_per_second"].items():
            speeds = {way: f"{each['median']:.2f} GB/s" for way, each in ways.items()}
            others = [f"{way} {speed}" for way, speed in speeds.items() if way != "ours"]
            rows.append([f"sum of {size} MB", carrier, speeds["ours"], "; ".join(others)])
    return rows


def _return(results: dict[str, Any]) -> Rows:
    head = ["state", "", "next step after", "full strength after", "the others wait", "allowed", "what for"]
    rows: Rows = [head]
    for size in results["sizes"]:
        for name in ("ours", "cold", "restart", "torchft"):
            facts = size[name]
            if "not_measured" in facts:
                rows.append([f"{size['bytes'] / 1e6:.0f} MB", name, facts["not_measured"], "", "", "", ""])
                continue
            middle = {key: each["median"] if isinstance(each, dict) else each for key, each in facts.items()}
            parts = allowed = ""
            if name in ("ours", "cold"):
                allowed = f"{size['bound'] * 1e3:.0f} ms"
                pieces = {key: middle[key] for key in ("repair", "transfer", "rest")}
                parts = ", ".join(f"{key} {seconds * 1e3:.0f} ms" for key, seconds in pieces.items())
            wait = middle.get("stall", middle["wait"])
            rows.append(
                [
                    f"{size['bytes'] / 1e6:.0f} MB",
                    {"cold": "ours, a process from nothing"}.get(name, name),
                    *(f"{middle[key]:.2f} s" for key in ("again", "whole")),
                    f"{wait * 1e3:.0f} ms",
                    allowed,
                    parts,
                ]
            )
    return rows


def _returning(results: dict[str, Any]) -> Rows:
    rows: Rows = [
        ["stall of a restart", "ours, an hour", "checkpoint-restart", "ours against it", "came back after"]
    ]
    for duel in results["duels"]:
        rows.append(
            [
                f"{duel['share']:.0%} of {SHARE} (a failure every {duel['interval']})",
                *(f"{duel[side]:,.0f}" for side in ("ours", "restart")),
                f"{duel['ratio']:.2f} times",
                ", ".join(f"{seconds:.1f} s" for seconds in duel["away"]) or "not in time",
            ]
        )
    crossing, calm = results["crossing"], f"{results['calm_ratio']:.2f} times without failures"
    never = f"by arithmetic at every rate at least {calm}"
    rows.append(
        [never if crossing is None else f"below {calm} while it is under {crossing:.1%}", "", "", "", ""]
    )
    return rows


def _hosts(results: dict[str, Any]) -> Rows:
    rows: Rows = [["", "measured", "of it, or beside it"]]
    for replicas, facts in results.get("agreement_ms", {}).items():
        own = results["agreement_own_ms"][replicas]
        rows.append(
            [
                f"an agreement of {replicas} replicas, last vote to last one told",
                _ms(facts),
                f"the voter's own {_ms(own)}",
            ]
        )
    for hosts, facts in results.get("step", {}).items():
        ratio, took = facts["ratio"], facts["milliseconds"]
        beside = f"ours {took['ours']['median']:.0f} ms, stock DDP on gloo {took['stock']['median']:.0f} ms"
        name = f"a step on {hosts} hosts, {facts['parameters'] / 1e6:.1f}M parameters, against stock DDP"
        rows.append([name, f"{ratio['value']:.3f}x ({ratio['low']:.3f} to {ratio['high']:.3f})", beside])
    names = {"rank": "SIGKILL of a rank", "host": "a host loses its power", "link": "a host is cut off"}
    for what, facts in results.get("kill", {}).items():
        if what in names:
            parts = ", ".join(f"{part} {facts[part]['median']:.0f}" for part in PARTS_OF_A_KILL)
            name = f"{names[what]}: to the commit, less what is computed again"
            rows.append([name, _ms(facts["less_redone"]), f"{parts}; n = {facts['whole']['n']}"])
    for name, facts in results.get("power_cut", {"systems": {}})["systems"].items():
        seconds = facts["seconds"]
        told = f"{seconds:.2f} s" if isinstance(seconds, float) else seconds
        batch = f"on {facts['microbatches']} microbatches" if "microbatches" in facts else ""
        rows.append([f"power cut to the next committed step, {name}", told, batch])
    if "hosts" in results and not results["hosts"]["emulated"]:
        rows.append(["hosts are processes of this machine", "", results["hosts"]["why_not"]])
    return rows


def _ms(facts: dict[str, float]) -> str:
    return f"{facts['median']:.1f} ms ({facts['low']:.1f} to {facts['high']:.1f})"


def _took(facts: dict[str, Any], way: str) -> str:
    """A step of ours, or one of another with how ours compares."""
    text = f"{facts['milliseconds'][way]['median']:,.0f} ms"
    if way in facts["peak_bytes"]:
        text += f", {facts['peak_bytes'][way] / 2**30:.1f} GiB"
    if way == "ours":
        return text
    ratio = facts["ours_against"][way]
    return f"{way} {text} ({ratio['value']:.2f}x, {ratio['low']:.2f} to {ratio['high']:.2f})"


def _simulate(results: dict[str, Any]) -> Rows:
    rows: Rows = [["GPUs", "checkpoint-restart", "ReCoVer, replicas return", "policy asked", "memory, MiB"]]
    for row in results["rows"]:
        speeds = (f"{row['failures_per_second'][name]:,.0f}" for name in ("restart", "recover-return"))
        rows.append([f"{row['gpus']:,}", *speeds, row["asked"], f"{row['peak_mib']:.0f}"])
    whole = results["whole"]
    told = f"{whole['gpus']:,} GPUs, {whole['days']} days, {whole['seeds']} seeds, {whole['systems']} systems"
    spent = f"{results['whole_cpu_seconds']:.0f} s of computing"
    rows.append([told, f"{results['whole_seconds']:.0f} s, {spent}", "", "", ""])
    return rows


def _flat(results: dict[str, Any], above: str = "") -> Rows:
    """Names and numbers, however deep."""
    rows: Rows = [] if above else [["", ""]]
    for key, value in results.items():
        if key in ("machine", "commit", "sources", "measured_at", "command"):
            continue
        if isinstance(value, dict) and "median" in value:
            rows.append(
                [above + str(key), f"{value['median']:,.2f} ({value['low']:,.2f} to {value['high']:,.2f})"]
            )
        elif isinstance(value, dict):
            rows += _flat(value, f"{above}{key} ")
        else:
            rows.append([above + str(key), f"{value:,.4g}" if isinstance(value, float) else value])
    return rows
