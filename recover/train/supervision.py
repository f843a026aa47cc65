"""The launcher's side of `recover train`: prepares the run, starts the ranks, shows progress, reports the result."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from recover.checkpoint import directory
from recover.checkpoint.object_storage import ObjectStorage, is_url, owner_of
from recover.checkpoint.way_on import way_on_of_train
from recover.job.config_keys import flatten
from recover.job.host_options import ROOM, HostOptions
from recover.job.record_files import FILES
from recover.job.spec import JobSpec, Monitors
from recover.launch.hosts.agent import launch_host
from recover.launch.hosts.options import HostPart, one_host, read_options
from recover.launch.hosts.run_directory import may_be_running
from recover.launch.launcher import launch
from recover.launch.preflight import Refusal
from recover.launch.request import LaunchRequest
from recover.launch.signals import JobSignals
from recover.launch.verdict import RAISED
from recover.runs.records.json_lines import read
from recover.train.preparation import PreparedRun, prepare_run
from recover.train.progress import Screen

LOOK = 0.2  # seconds between looks at the run's files
TOO_FEW = 3  # exit code: fewer than min_replicas are left


def train(
    words: Sequence[str],
    run_dir: Path | None = None,
    kills: Sequence[str] = (),
    resume: Path | str | None = None,
    dry_run: bool = False,
    monitors: Monitors = nullcontext,
    hosts: HostOptions | None = None,
    returns: HostOptions | None = None,
) -> int:
    """Prepare and run a training job, or the part of it on this host. The arguments are those of `recover train`.

    Returns the exit code: 0 (done, or stopped on request with a checkpoint), 1 (failed), 2 (bad input), 3 (too few
    replicas), 4 (a rank raised outside of any step), 130 (stopped by Ctrl-C, with a checkpoint), 128 + n (ended at once
    by signal n). `hosts`: this is one of several hosts, all of which call this.
    `returns`: lost replicas are restarted with these options, also on a single host."""
    try:
        slots, joins = None, False
        if hosts is not None:
            part = read_options(hosts)
            slots = part.most * part.slots
            place = resume if resume and not is_url(resume) else Path("runs", part.job)
            run_dir = run_dir or Path(place)
            joins = part.returns and may_be_running(run_dir, part.job)
        later = ROOM if (returns or hosts or HostOptions()).restarts else 0
        prepared = prepare_run(
            words, run_dir, kills, resume, elsewhere=dry_run, slots=slots, joins=joins, later=later
        )
        if hosts is None and returns is not None and not dry_run:
            config = prepared.config
            hosts = one_host(config.replicas * config.replica_size, config.replica_size, returns)
    except (ValueError, OSError, Refusal) as error:
        _say(str(error))
        return 2
    if dry_run:
        from recover.train.dry_run import tell

        print("\n".join(tell(prepared)))
        return 0
    return run(prepared, monitors, hosts)


def run(prepared: PreparedRun, monitors: Monitors = nullcontext, hosts: HostOptions | None = None) -> int:
    """Run a prepared job; returns its exit code. The launcher has its own thread; signals reach this one."""
    stop = prepared.run_dir / "stop"
    if not prepared.joins:
        FILES.remove(stop)
        FILES.remove(prepared.run_dir / "summary.json")
    code: list[int] = []
    start = _launch if hosts is None else functools.partial(_launch_host, hosts)
    signals = JobSignals()
    request = _request(prepared, monitors, signals)
    ranks = threading.Thread(target=lambda: code.append(start(prepared, request)), daemon=True)
    first = prepared.resume.step + 1 if prepared.resume else 1
    print(_announcement(prepared, first), flush=True)
    try:
        with signals, Screen(prepared.config, prepared.run_dir, first) as screen:
            ranks.start()
            while ranks.is_alive():
                ranks.join(LOOK)
                screen.update()
    except (BrokenPipeError, SystemExit):  # rich raises the latter
        signals.handle(signal.SIGPIPE)  # the job ends with the reader of its output
        ranks.join()
    FILES.remove(stop)
    if signals.caught and code not in ([0], [RAISED]):  # otherwise the job had ended before the signal
        return 1 if signal.SIGPIPE in signals.caught else signals.code(0)
    if code == [2] or signals.left:
        return code[0]
    finished = code in ([0], [RAISED]) or (bool(signals.asked) and code == [signals.code(0)])
    verdict = _verdict(prepared, finished, several=hosts is not None)
    if code == [RAISED]:
        return RAISED
    # A job that stops as its scheduler asked (SIGTERM, SIGUSR1) has succeeded: no exit code of the signal.
    return signals.code(verdict) if signals.asked == signal.SIGINT else verdict


def _launch(prepared: PreparedRun, request: LaunchRequest) -> int:
    config = prepared.config
    check = functools.partial(_take_object_storage, prepared)
    return launch(config.replicas * config.replica_size, request, check=check)


def _launch_host(hosts: HostOptions, prepared: PreparedRun, request: LaunchRequest) -> int:
    """Launch this host's ranks. `facts` are compared between the hosts, which must all train the same."""
    config = flatten(prepared.config.model_dump())
    facts = {f"the key {key}": str(value) for key, value in config}
    if not prepared.replicas_asked:
        cause = "from --nnodes and --nproc-per-node; give it to all hosts if they bring different numbers of ranks"
        facts[f"the key replicas ({cause})"] = facts.pop("the key replicas")
    facts["the data"] = prepared.stream.fingerprint()
    facts["the checkpoint to go on from"] = prepared.resume.identity() if prepared.resume else "none"
    return launch_host(
        hosts,
        request,
        facts=facts,
        check=functools.partial(_check_hosts, prepared, read_options(hosts)),
    )


def _check_hosts(prepared: PreparedRun, part: HostPart, spec: JobSpec) -> None:
    """Check the number of replicas and where checkpoints go, after the rendezvous of the hosts. Raises
    Refusal."""
    wanted, found = prepared.config.replicas, spec.ranks // spec.replica_size + part.standby
    if not spec.joining and (found > wanted or (found < wanted and part.least == part.most)):
        raise Refusal(
            f"replicas={wanted}, and the hosts bring ranks for {found} replicas of {spec.replica_size}; choose "
            f"--nproc-per-node so that they fit, or give replicas={found}"
        )
    if prepared.joins and not spec.joining:
        raise Refusal(
            f"{prepared.run_dir} holds a run whose job has ended meanwhile; go on with it by --resume"
        )
    if not spec.joining:
        _take_object_storage(prepared, spec)
    if len(spec.directories) < 2:
        return
    if spec.across and prepared.config.checkpoint.every:
        raise Refusal(
            f"replicas of {spec.replica_size} ranks lie on several hosts, which do not share {prepared.run_dir}: such "
            "a checkpoint would be in pieces; give a --run-dir that all hosts share, or checkpoint.every=0"
        )
    if not spec.across and not spec.joining:
        _say(
            f"the hosts do not share {prepared.run_dir}: each keeps records and checkpoints of its own there, and "
            "to go on from a checkpoint every host needs a copy of the same one"
        )


def _take_object_storage(prepared: PreparedRun, spec: JobSpec) -> None:
    """Make this job the owner of the prefix to which it uploads, before a rank is started. Raises Refusal."""
    if not (url := prepared.config.checkpoint.dir):
        return
    try:
        storage = ObjectStorage(url)
        if before := storage.take(owner_of(spec), not prepared.resume, prepared.run_dir):
            _say(f"{url} belonged to another job ({before}); if that still runs, it goes on without uploads")
        newest = storage.complete()[-1:] if prepared.resume else []
    except ValueError as error:
        raise Refusal(str(error)) from None
    if prepared.resume and newest and newest[0].step > prepared.resume.step:
        # A later resume would go on from that one, and drop the steps that this job takes.
        raise Refusal(
            f"{newest[0].url} was uploaded meanwhile, by the job before this one, and {prepared.resume.place} is "
            "older; start again"
        )


def _request(prepared: PreparedRun, monitors: Monitors, signals: JobSignals) -> LaunchRequest:
    config, resume = prepared.config, prepared.resume
    return LaunchRequest(
        Path(__file__).with_name("rank_script.py"),
        [config.model_dump_json(), str(resume.path.absolute()) if resume else ""],
        config.replica_size,
        prepared.run_dir,
        config.timeout,
        config.hang_limit,
        config.link_timeout,
        config.carrier,
        [str(fault) for fault in prepared.kills],
        monitors=monitors,
        signals=signals,
        stop_file=prepared.run_dir / "stop",
        way_on=functools.partial(way_on_of_train, steps=config.steps),
    )


def _announcement(prepared: PreparedRun, first: int) -> str:
    config, found = prepared.config, prepared.resume
    doubt = (
        f"{found.path} was saved in an emergency: no vote has compared it with what other replicas held\n"
        if found is not None and not found.is_confirmed
        else ""
    )
    inside = f" of {config.replica_size} ranks" if config.replica_size > 1 else ""
    return doubt + (
        f"training {config.model} from step {first} to {config.steps} on {config.replicas} replicas{inside}, "
        f"B = {config.global_batch} microbatches of {config.microbatch_size} x {config.seq_len} tokens\n"
        f"data: {prepared.stream.description}"
    )


def _verdict(prepared: PreparedRun, finished: bool, several: bool) -> int:
    """Say how the run ended. Returns the exit code; `finished`: whether all ranks have finished; `several`: whether the
    job ran on several hosts."""
    config, found = prepared.config, directory.latest(prepared.run_dir)
    way_on = way_on_of_train(prepared.run_dir, config.steps)
    path = prepared.run_dir / "summary.json"
    text = FILES.read(path)
    if finished and several and not path.exists():
        steps = read(prepared.run_dir / "steps.jsonl").whole
        _say(
            "the job has ended; it was written down on other hosts, for no rank that began it was left here, and what "
            f"there is of it in {prepared.run_dir} ends with step {steps[-1]['step'] if steps else 0}"
        )
        return 0
    if finished and text is None:
        _say(f"the ranks have finished, but {path} could not be written; {way_on}")
        return 1
    if not finished or text is None:
        _say(f"the run was lost; {way_on}")
        return 1
    summary = json.loads(text)
    if summary["steps"] < config.steps:
        if (left := summary["replicas_end"]) < config.min_replicas:
            _say(
                f"stopped after step {summary['steps']}: {left} replica{' is' if left == 1 else 's are'} left, and "
                f"min_replicas is {config.min_replicas}; {way_on}"
            )
            return TOO_FEW
        _say(f"stopped after step {summary['steps']} as asked; {way_on}")
        return 0 if found and found.step == summary["steps"] else 1
    print(_done(summary, prepared.run_dir))
    return 0


def _done(summary: dict[str, Any], run_dir: Path) -> str:
    lost = "no replica lost" if not summary["failures"] else f"replicas lost: {summary['failures']}"
    loss = "not a number" if summary["final_loss"] is None else f"{summary['final_loss']:.4f}"
    low, high = summary["microbatches_min"], summary["microbatches_max"]
    return (
        f"done: {summary['steps']} steps of {low if low == high else f'{low} to {high}'} microbatches, {lost}, "
        f"final loss {loss}, {summary['tokens_per_second']:,.0f} tokens/s\n"
        f"run directory: {_short(run_dir)}"
    )


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _say(text: str) -> None:
    print(f"recover: {text}", file=sys.stderr, flush=True)
