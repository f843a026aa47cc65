"""Launches a job on this host: checks what was asked for, starts the ranks under mpirun, and has
them supervised.

Nothing of a job stays behind, however it ends: see `guardian`.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from recover.job.output import OUTLET, say
from recover.job.record_files import FILES
from recover.job.spec import JobSpec
from recover.job.supervised import SupervisorError
from recover.launch import preflight
from recover.launch.hostfile import DEPRECATED, check_hostfile
from recover.launch.mpirun import MpirunStarter
from recover.launch.preflight import Refusal
from recover.launch.request import LaunchRequest
from recover.launch.session import Session
from recover.launch.signals import JobSignals
from recover.launch.supervisor import Supervisor
from recover.launch.witness import Witness
from recover.runs.records.job_log import ADDRESS


def launch(
    ranks: int,
    request: LaunchRequest,
    *,
    mpirun: str | None = None,
    hostfile: Path | None = None,
    check: Callable[[JobSpec], object] = lambda spec: None,
) -> int:
    """Run a job on `ranks` ranks of this host, or, with a hostfile of Open MPI's, of several.

    `check` is called before a rank is started, and may raise Refusal.

    Returns 0 (the survivors finished), 1 (it failed), 2 (it could not be started as asked), 4 (a
    rank raised outside of any step), or 128 + the signal that ended it.
    """
    return exit_code_of(lambda: _launch(ranks, request, mpirun, hostfile, check))


def exit_code_of(job: Callable[[], int]) -> int:
    """Run a job; a refusal is exit code 2. Returns when all output was passed on."""
    try:
        return job()
    except Refusal as refusal:
        say(str(refusal))
        return 2
    except KeyboardInterrupt:  # before or after the time in which we handle the signal
        return 128 + signal.SIGINT
    finally:
        OUTLET.finish()


def _launch(
    ranks: int,
    request: LaunchRequest,
    mpirun: str | None,
    hostfile: Path | None,
    check: Callable[[JobSpec], object],
) -> int:
    alone = ranks == 1 and hostfile is None
    has_terminal = request.is_user_script and alone and sys.stdin is not None and sys.stdin.isatty()
    spec = _check(ranks, request, hostfile)
    if not alone or mpirun is not None:
        mpirun = preflight.find_mpirun(mpirun)
        preflight.check_mpirun(mpirun)
    preflight.warn_of_untested_torch()
    if hostfile is not None:
        say(DEPRECATED)
    directory, lock = preflight.open_run_dir(request.run_dir, request.script)
    FILES.report = say
    signals = request.signals or JobSignals()
    if has_terminal:  # the rank gets Ctrl-C from it, and a debugger there may use it
        signals.ignored = (signal.SIGINT,)
    failure = ""
    with held(lock):
        with (
            request.monitors(directory),
            Witness(directory) as witness,
            Session(directory / ADDRESS) as session,
            nullcontext() if request.signals else signals,
            signals.ending(session.end) as caught,
        ):
            spec = replace(spec, run_dir=str(directory), session=str(session.directory))
            check(spec)
            if spec.records:  # of an earlier run
                FILES.remove(directory / "summary.json")
            starter = MpirunStarter(spec, session, request, mpirun, hostfile, has_terminal)
            supervisor = Supervisor(spec, starter, session, witness, caught)
            try:
                supervisor.start()
                signals.ask = partial(request.ask_to_stop, session.directory)
                try:
                    failure = supervisor.watch(
                        0 if has_terminal else request.timeout
                    )  # debugging takes its time
                except SupervisorError as error:
                    failure = str(error)
                supervisor.end(failure)
            except Exception as error:
                failure = failure or f"{type(error).__name__}: {error}"
                raise
            finally:
                witness.outcome = signals.outcome() or ({"reason": failure} if failure else {})
        if caught:
            say(f"ended by {signal.Signals(caught[0]).name}{request.describe_end(directory)}")
            FILES.settle()
            return signals.code(0)
        code = supervisor.judge(failure)
        say_stopped(code, signals, request, directory)
        FILES.settle()
        return signals.code(code)


def say_stopped(code: int, signals: JobSignals, request: LaunchRequest, run_dir: Path) -> None:
    """Say that a user's script has stopped as asked, if so, and how it goes on."""
    if code == 0 and signals.asked and request.is_user_script:
        say(f"stopped by {signal.Signals(signals.asked).name}{request.describe_end(run_dir)}")


def _check(ranks: int, request: LaunchRequest, hostfile: Path | None) -> JobSpec:
    """The job as it was asked for. Raises Refusal."""
    preflight.check_numbers(ranks, request.replica_size, request.timeout)
    limit = preflight.check_hang_limit(request.hang_limit, request.timeout)
    link_limit = preflight.check_link_timeout(request.link_timeout, request.timeout)
    preflight.check_carrier(request.carrier)
    if hostfile is None:
        preflight.check_gpus(request.carrier, ranks)
    else:
        check_hostfile(hostfile, ranks)
    faults = preflight.check_faults(request.faults, ranks, request.replica_size)
    request.check_script()
    return JobSpec(
        ranks,
        request.replica_size,
        request.carrier,
        limit,
        faults,
        records=request.is_user_script,
        token=secrets.token_hex(16),
        link_timeout=link_limit,
        replay=request.replay,
    )


@contextmanager
def held(lock: int) -> Iterator[None]:
    """Hold the lock of a run directory until its descriptor is closed."""
    try:
        yield
    finally:
        os.close(lock)
