"""`recover run`: how ranks end, what the launcher makes of it, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from launching import ULFM, Job, state_of
from patience import PATIENCE, wait_until

from recover.launch import launcher, preflight
from recover.launch.request import LaunchRequest
from recover.runs.records.rank_ends import name_ranks

RANK = "import os, sys, time; from recover.job import process; rank = process.rank()\n"
BUSY = RANK + "open(os.environ['RECOVER_RUN_DIR'] + f'/{rank}.up', 'w'); time.sleep(100)\n"


def all_up(job: Job, ranks: int) -> bool:
    return wait_until(lambda: len(list(job.run_dir.glob("*.up"))) == ranks)


def show_progress_until_all_are_up(job: Job, ranks: int) -> None:
    """Show progress until all ranks are up, so that `--timeout` does not count the time that they take to start."""
    sign = job.rank_file(".sign")

    def up() -> bool:
        if sign.parent.is_dir():
            sign.touch()
            sign.unlink()
        return len(list(job.run_dir.glob("*.up"))) == ranks

    assert wait_until(up)


def test_script_runs_as_under_plain_python_and_exits_0(tmp_path: Path) -> None:
    script = RANK + (
        "import atexit, threading; from recover.world import rank_exit\n"
        "rank_exit.on_success(lambda: print('second')); rank_exit.on_success(lambda: print('first'))\n"
        "atexit.register(lambda: print('atexit', sys.modules['__main__'].rank == rank))\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\n"
        "print('argv', sys.argv[1:], sys.path[0] == os.path.dirname(__file__), __name__)\n"
        "print('cores', len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
        "print('words' * 20000, file=sys.stderr)\n"
        "if rank == 0: sys.exit()\n"
    )
    job = Job(tmp_path, script, "-n", "2", "--replica-size", "2", args=("-n", "7", "--", "--run-dir"))
    assert job.finish() == 0
    cores = len(os.sched_getaffinity(0))
    expected = [
        "argv ['-n', '7', '--', '--run-dir'] True __main__",
        "first",
        "second",
        "thread",
        "atexit True",
    ]
    expected.append(f"cores {cores} {max(1, cores // 2)}")
    assert sorted(job.stdout.splitlines()) == sorted(expected * 2)
    long = sorted(f"[rank {rank}] {'words' * 20000}" for rank in (0, 1))
    *words, told = sorted(job.stderr.splitlines(), key=lambda line: "never called" in line)
    assert sorted(words) == long
    assert told.endswith("its 2 rank(s) knew nothing of each other, and no death would have been repaired")
    assert {path.name for path in (job.run_dir / "ranks").iterdir()} == {"0.end", "1.end", "0.out", "1.out"}
    assert json.loads(job.rank_file("0.end").read_text())["end"] == "done"
    assert job.leftovers() == []


@pytest.mark.parametrize(("own", "found"), [(None, "1"), ("6", "6")])
def test_torch_in_a_rank_writes_no_extra_files_by_default(
    own: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_JIT_PROFILE", raising=False)
    if own is not None:
        monkeypatch.setenv("ONEDNN_JIT_PROFILE", own)
    script = RANK + "print(os.environ['ONEDNN_JIT_PROFILE'])\n"
    if own is None:
        script += (
            "import torch\n"
            "torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()\n"
            "assert not os.path.exists(f'/tmp/perf-{os.getpid()}.map')\n"
        )
    job = Job(tmp_path, script, "-n", "1")
    assert job.finish() == 0, job.stderr
    assert job.stdout.split() == [found]


@pytest.mark.guarantee("The launcher", "A rank that fails in Python is noticed by the others and named.")
def test_rank_that_fails_in_python_is_noticed_and_named(tmp_path: Path) -> None:
    script = ULFM + (
        "world.Barrier()\n"
        "if rank == 1: raise ValueError('no such luck')\n"
        "if rank == 2: sys.exit(3)\n"
        "if rank == 3: threading.Thread(target=lambda: 1 / 0).start(); world.Recv(bytearray(1), source=0)\n"
        "wait_for_deaths(3)\n"
        "print('went on')\n"
    )
    job = Job(tmp_path, script, "-n", "5")
    assert job.finish() == 4
    assert job.stdout.splitlines() == ["went on"] * 2
    for rank, words in {1: "ValueError: no such luck", 2: "exit code 3", 3: "ZeroDivisionError"}.items():
        log = job.rank_file(f"{rank}.log").read_text()
        assert "Traceback" in log
        assert words in log
        assert f"[rank {rank}] Traceback" in job.stderr
        assert json.loads(job.rank_file(f"{rank}.end").read_text())["end"] == "raised"
    verdict = job.stderr.splitlines()[-1]
    assert "done on ranks 0, 4; lost: rank 1 raised: ValueError: no such luck; rank 2 raised" in verdict
    assert "rank 3 raised outside of any step: ZeroDivisionError at" in verdict
    assert job.leftovers() == []


def test_job_whose_ranks_all_raise_fails(tmp_path: Path) -> None:
    job = Job(tmp_path, "raise RuntimeError('never')", "-n", "2")
    assert job.finish() == 4
    assert "ranks 0-1 raised: RuntimeError: never" in job.stderr.splitlines()[-1]
    assert job.leftovers() == []


@pytest.mark.guarantee("The launcher", "A death before `recover.init()` is survived.")
def test_death_before_the_world_is_joined_is_survived(tmp_path: Path) -> None:
    script = """
        import os, signal
        from recover.job import process
        if process.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        import recover
        print("members", recover.init().members)
    """
    job = Job(tmp_path, script, "-n", "3")
    assert job.finish() == 0, job.stderr
    assert job.stdout.count("members (0, 2)") == 2


def test_death_before_mpi_is_up_ends_the_job_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Killer:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mpi4py' and os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "            os.kill(os.getpid(), 9)\n"
        "sys.meta_path.insert(0, Killer())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = Job(tmp_path / "job", "print('never')", "-n", "3")
    assert job.finish() == 1
    assert "rank 1 ended before MPI was up" in job.stderr
    assert "never" not in job.stdout


@pytest.mark.guarantee("The launcher", "The verdict of a job comes from its ranks, not from mpirun.")
def test_verdict_of_a_job_comes_from_its_ranks_not_from_mpirun(tmp_path: Path) -> None:
    job = Job(tmp_path, ULFM + "os.kill(os.getpid(), signal.SIGKILL)", "-n", "2")  # mpirun returns 0 here
    assert job.finish() == 1
    assert "no rank finished; ranks 0-1 killed" in job.stderr
    assert job.leftovers() == []


def test_native_crash_is_shown_and_named(tmp_path: Path) -> None:
    job = Job(tmp_path, RANK + "import ctypes\ndef here(): ctypes.string_at(0)\nif rank: here()", "-n", "2")
    assert job.finish() == 0
    assert "rank 1 crashed" in job.stderr
    assert "in here" in job.stderr
    assert "done on rank 0; lost: rank 1 crashed" in job.stderr


def test_forked_child_does_not_report_the_end_of_its_rank(tmp_path: Path) -> None:
    script = RANK + (
        "pid = os.fork()\n"
        "if pid == 0: raise ValueError('in the child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"
        "os.waitpid(pid, 0); raise ValueError('in the rank')\n"
    )
    job = Job(tmp_path, script, "-n", "1")
    assert job.finish() == 1
    assert job.stdout == "1\n"
    assert "rank 0 raised: ValueError: in the rank" in job.stderr


@pytest.mark.guarantee(
    "Membership",
    "A rank that cannot build a carrier is evicted with its replica and reason; without a majority that "
    "can, all ranks end and name every cause.",
)
@pytest.mark.guarantee(
    "The launcher",
    "A job without progress is ended and shows every stack, and endless repairs are no progress.",
)
def test_only_commits_are_progress_and_a_rank_without_carrier_is_evicted(tmp_path: Path) -> None:
    """First reductions and agreements for longer than the timeout, then a repair with a sick rank, then a livelock."""
    script = """
        import os, signal, time, numpy, recover
        from recover.world.carriers import mpi
        world = recover.init(carrier="mpi")
        open(os.environ["RECOVER_RUN_DIR"] + f"/{world.rank}.up", "w").close()
        for _ in range(30):
            assert world.cross.all_reduce(numpy.ones(4)).wait()
            time.sleep(0.1)
        for _ in range(30):
            assert world.agree(1) == 1
            time.sleep(0.1)
        def broken(*_):
            raise OSError("no descriptors are left")
        if world.rank == 1:
            mpi.MpiCarriers.make = broken
        elif world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert world.agree(1) is None
        census = world.repair(b"%d" % world.rank)
        print("members", world.members, sorted(census.records.values()), flush=True)
        while True:
            assert world.agree(world.rank) == 0
            world.repair()
    """
    job = Job(tmp_path, script, "-n", "4", "--timeout", "2.5")
    show_progress_until_all_are_up(job, 4)
    assert job.finish() == 1, job.stderr
    assert job.stdout.count("members (0, 3) [b'0', b'3']") == 2
    assert "no progress for 2.5 s (--timeout)" in job.stderr
    assert "rank 1 was evicted: it failed in 3 rounds of a repair" in job.stderr
    assert "OSError: no descriptors are left" in job.stderr
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "The launcher",
    "A job without progress is ended and shows every stack, and endless repairs are no progress.",
)
def test_job_without_progress_is_ended_and_shows_every_stack(tmp_path: Path) -> None:
    script = ULFM + (
        "open(os.environ['RECOVER_RUN_DIR'] + f'/{rank}.up', 'w').close()\n"
        "def computing():\n    time.sleep(1000)\n"
        "def waiting():\n    world.recv(source=0)\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "computing() if rank == 0 else waiting()\n"
    )
    job = Job(tmp_path, script, "-n", "3", "--timeout", "1.5")
    show_progress_until_all_are_up(job, 3)
    assert job.finish() == 1
    assert "in computing" in job.stderr.partition("rank 0 (pid")[2].partition("rank 1 (pid")[0]
    assert "in waiting" in job.stderr.partition("rank 1 (pid")[2].partition("rank 2 (pid")[0]
    assert "has ended" in job.stderr.partition("rank 2 (pid")[2]
    assert (
        "no progress for 1.5 s (--timeout); ranks 0-1 unfinished; rank 2 killed"
        in job.stderr.splitlines()[-1]
    )
    assert job.leftovers() == []


@pytest.mark.guarantee("The launcher", "Ctrl-C ends the job, also ranks that ignore it.")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_ranks_that_ignore_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)\n"
    )
    job = Job(tmp_path, stubborn + "import os; os.fork()\n" + BUSY, "-n", "2")
    assert all_up(job, 2)
    os.killpg(job.process.pid, number)
    assert job.finish() == code
    assert f"ended by {number.name} before its first step; the script has saved no checkpoint" in job.stderr
    assert job.leftovers() == []
    assert state_of(job.run_dir) == f"ended by {number.name} before its first step"


def test_ctrl_c_ends_the_job_although_its_output_is_not_read(tmp_path: Path) -> None:
    job = Job(tmp_path, RANK + "while True: print('words' * 1000)", "-n", "1")
    assert wait_until(job.processes)
    time.sleep(0.5)  # until the launcher is stuck in a write
    os.kill(job.process.pid, signal.SIGINT)
    assert wait_until(lambda: not job.processes())
    assert job.finish() == 130
    assert job.leftovers() == []


def test_job_files_lie_in_its_two_directories(tmp_path: Path) -> None:
    script = (
        ULFM + "world.Barrier(); open(os.environ['RECOVER_RUN_DIR'] + f'/{rank}.up', 'w'); time.sleep(100)"
    )
    job = Job(tmp_path, script, "-n", "2")
    assert all_up(job, 2)
    session = job.session()
    assert session is not None
    assert list(session.glob("sm_segment*"))
    for pid in job.processes():
        fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        shared = {
            field[5] for field in fields if len(field) > 5 and field[5].startswith(("/dev/shm", "/tmp"))
        }
        expected = (str(session), str(job.tmp), sys.prefix)  # a checkout may itself lie under /tmp
        assert [path for path in shared if not path.startswith(expected)] == []
    assert {path.name for path in job.tmp.iterdir()} == {f"{session.name}-tmp"}
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 130
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "The launcher", "A job leaves nothing behind after `kill -9` of the launcher, mpirun or the guardian."
)
def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, "import os; os.fork()\n" + BUSY, "-n", "2")
    assert all_up(job, 2)
    assert job.leftovers() != []
    assert (job.run_dir / "page.url").exists()
    assert state_of(job.run_dir) == "running"
    job.process.kill()
    assert wait_until(lambda: job.leftovers() == []), job.leftovers()
    assert job.finish() == -signal.SIGKILL
    assert (
        state_of(job.run_dir)
        == f"the launcher was killed (pid {job.process.pid} is gone) before its first step"
    )
    assert wait_until(lambda: not (job.run_dir / "page.url").exists()), "its guardian removes it"


@pytest.mark.guarantee(
    "The launcher", "A job leaves nothing behind after `kill -9` of the launcher, mpirun or the guardian."
)
def test_kill_9_of_mpirun_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, RANK + "if rank == 0: sys.exit(0)\n" + BUSY, "-n", "3")
    assert all_up(job, 2)
    assert wait_until(job.rank_file("0.end").exists)
    os.kill(
        next(pid for pid, line in job.processes().items() if "bootstrap" in line and "-np" in line),
        signal.SIGKILL,
    )
    assert job.finish() == 1
    assert "mpirun was ended by SIGKILL; ranks 1-2 unfinished" in job.stderr
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "The launcher", "A job leaves nothing behind after `kill -9` of the launcher, mpirun or the guardian."
)
def test_kill_9_of_the_guardian_leaves_nothing_either(tmp_path: Path) -> None:
    job = Job(tmp_path, "import os; os.fork()\n" + BUSY, "-n", "1")
    assert all_up(job, 1)
    os.kill(job.guardian(), signal.SIGKILL)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 130
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "The launcher",
    "What a job leaves if all of its processes are killed at once, the next job on the host removes.",
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-n", "2"], id="openmpi"),
        pytest.param(["-n", "2", "--return"], id="etcd", marks=pytest.mark.soak),
    ],
)
def test_kill_9_of_everything_is_cleaned_up_by_the_next_job(tmp_path: Path, options: list[str]) -> None:
    """One of two earlier jobs still runs: it keeps its files and processes, also without its guardian."""
    for name in ("killed", "living", "next"):
        (tmp_path / name).mkdir()
    killed, living = (Job(tmp_path / name, BUSY, *options) for name in ("killed", "living"))
    assert all_up(killed, 2)
    assert all_up(living, 2)
    assert killed.session() is not None
    for pid in (killed.guardian(), killed.process.pid, living.guardian()):
        os.kill(pid, signal.SIGKILL)
    killed.process.wait()

    def kill_all() -> bool:
        for pid in killed.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not killed.processes()

    assert wait_until(kill_all)
    kept = living.session()
    following = Job(tmp_path / "next", "", "-n", "1")
    assert following.finish() == 0, following.stderr
    assert killed.leftovers() == []
    assert kept is not None
    assert {"job.json", "board"} <= {path.name for path in kept.iterdir()}
    os.kill(living.process.pid, signal.SIGINT)
    assert living.finish() == 130
    assert living.leftovers() == following.leftovers() == []


@pytest.mark.parametrize("options", [["-n", "1"], ["-n", "1", "--return"]], ids=["openmpi", "etcd"])
def test_closed_output_ends_the_job(tmp_path: Path, options: list[str]) -> None:
    job = Job(tmp_path, RANK + "while True: print('words' * 100)", *options)
    assert job.process.stdout is not None
    job.process.stdout.readline()
    job.process.stdout.close()
    assert job.process.wait(timeout=PATIENCE) == 1
    assert job.leftovers() == []


def test_mpirun_that_hangs_after_the_last_rank_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hanging, script = tmp_path / "mpirun", tmp_path / "script.py"
    hanging.write_text(f'#!/bin/sh\n{preflight.find_mpirun()} "$@"\n[ "$1" = --version ] || sleep 100000\n')
    hanging.chmod(0o755)
    script.write_text("print('said')")
    monkeypatch.setattr("recover.launch.mpirun.GRACE", 0.5)
    request = LaunchRequest(script, run_dir=tmp_path / "run")
    assert launcher.launch(2, request, mpirun=str(hanging)) == 0
    assert capfd.readouterr().out == "said\n" * 2


def test_run_directory_can_be_reused_and_keeps_its_logs(tmp_path: Path) -> None:
    job = Job(tmp_path, "raise ValueError('first')", "-n", "2")
    assert job.finish() == 4
    job = Job(tmp_path, RANK + "if rank == 0: raise ValueError('second')", "-n", "2")
    assert job.finish() == 4
    assert "lost: rank 0 raised: ValueError: second" in job.stderr
    log = job.rank_file("0.log").read_text()
    assert "first" in log
    assert "second" in log


def test_foreign_mpirun_gives_the_same_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        RANK + "from recover.world import rank_exit; rank_exit.install_hooks(standalone=True)\n"
        "if rank == 1: raise ValueError('no such luck')\n"
        "if rank == 2: sys.exit('bad')\n"
        "rank_exit.on_success(lambda: rank_exit.log('closing'))\n"
    )
    command = [
        preflight.find_mpirun(),
        "--with-ft",
        "ulfm",
        "--oversubscribe",
        "-np",
        "3",
        sys.executable,
        str(script),
    ]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = preflight.clean_environment() | root | {"RECOVER_RUN_DIR": str(tmp_path)}
    subprocess.run(command, env=environment, timeout=PATIENCE, capture_output=True)
    ends = [json.loads((tmp_path / "ranks" / f"{rank}.end").read_text()) for rank in range(3)]
    assert [end["end"] for end in ends] == ["done", "raised", "raised"]
    assert "no such luck" in ends[1]["detail"]
    assert "sys.exit('bad')" in ends[2]["detail"]
    assert "closing" in (tmp_path / "ranks" / "0.log").read_text()


def test_rank_lists_are_formatted_as_ranges() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
