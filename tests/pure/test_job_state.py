"""Whether a job runs and how it ended, as `recover status` and `recover why` report it: after Ctrl-C, after
`kill -9` of the launcher, after a crash of the machine, on another host."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from recorded import START, exit_line, make_run, start_line, write_lines
from typer.testing import CliRunner

from recover.checkpoint.way_on import how_it_ended, note_place
from recover.cli import app
from recover.job import owner as owners
from recover.job.config_keys import ConfigError
from recover.job.owner import Fate, describe_this_process, fate
from recover.job.stop_request import StopRequest
from recover.launch import guardian, preflight
from recover.launch import signals as signals_module
from recover.launch.request import LaunchRequest
from recover.launch.signals import JobSignals
from recover.runs.live.page_process import listen, served_page
from recover.runs.live.view import RunView
from recover.train.preparation import prepare_run

LIVING = describe_this_process()
KILLED = LIVING | {"born": 1}  # another process has its pid
RESTARTED = LIVING | {"boot": "another"}
ELSEWHERE = RESTARTED | {"machine": "another"}


def run_with(place: Path, *job: dict[str, Any], planned: int | None = 40) -> Path:
    """A run of 20 steps whose job wrote these lines to its log."""
    run = make_run(place, lost_at=None)
    write_lines(run / "job.jsonl", list(job))
    if planned is None:
        (run / "config.yaml").unlink()
    return run


def checkpoint(place: Path, step: int) -> None:
    (place / "checkpoints" / f"step-{step}").mkdir(parents=True)


def end(**outcome: Any) -> dict[str, Any]:
    return {"what": "end", "at": START + 100, **outcome}


def asked(*words: str) -> str:
    """Output of a command, with single spaces."""
    answer = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert answer.exit_code == 0, answer.output
    return " ".join(answer.output.split())


GOES_ON = "`recover train --resume {run}` goes on from step 16"


@pytest.mark.guarantee(
    "Monitoring",
    "`recover status` and `recover why` say how a job ended: by a signal, with its launcher or its machine, or that "
    "this host cannot know.",
)
@pytest.mark.parametrize(
    ("owner", "outcome", "text"),
    [
        (LIVING, None, "run: running"),
        (LIVING, {"signal": "SIGINT", "asked": True}, f"run: stopped by SIGINT after step 20; {GOES_ON}"),
        (KILLED, {"signal": "SIGINT"}, f"run: ended by SIGINT after step 20; {GOES_ON}"),
        (KILLED, {"reason": "no progress"}, f"run: failed after step 20: no progress; {GOES_ON}"),
        (KILLED, None, f"run: the launcher was killed (pid {os.getpid()} is gone) after step 20; {GOES_ON}"),
        (RESTARTED, None, "run: ended with its machine (somewhere has been restarted since) after step 20; " + GOES_ON),
        (ELSEWHERE, None, "run: not known from this host whether it runs: it was started on somewhere, and its last "),
    ],
    ids=["running", "stopped", "ended", "failed", "killed", "restarted", "elsewhere"],
)  # fmt: skip
def test_status_and_why_say_how_a_job_ended(
    tmp_path: Path, owner: dict[str, Any], outcome: dict[str, Any] | None, text: str
) -> None:
    lines = [start_line(4, owner=owner), *([] if outcome is None else [end(**outcome)])]
    run = run_with(tmp_path / "run", *lines)
    checkpoint(run, 15)
    text = text.format(run=run)
    told = asked("status", str(run))
    assert text in told
    running = owner is LIVING and outcome is None
    assert ("20 s to go" in told) is running
    assert ("ranks: 4 gone" in told) is (not running and owner is not ELSEWHERE)
    why = asked("why", str(run))
    assert ("the job: " + text.removeprefix("run: ") in why) is not running


def test_run_that_is_complete_needs_no_way_on(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", start_line(4, owner=KILLED), end())
    (run / "summary.json").write_text(json.dumps({"steps": 40}))
    assert "run: finished step 20" in asked("status", str(run))
    (run / "summary.json").write_text(json.dumps({"steps": 20}))
    assert "run: stopped after step 20; there is no checkpoint" in asked("status", str(run))


def raised(rank: int, ordinary: bool, **more: Any) -> dict[str, Any]:
    words = {
        "end": "raised",
        "detail": "KeyError: 'x'",
        "kind": "KeyError",
        "place": "ex.py:20",
        "ordinary": ordinary,
    }
    return exit_line(rank, START + 50, signal="SIGKILL", words=words | more)


@pytest.mark.parametrize("planned", [20, None], ids=["train", "script"])
def test_status_tells_of_a_rank_that_raised_in_a_run_that_finished(
    tmp_path: Path, planned: int | None
) -> None:
    """The launcher has ended with exit code 4. An exception of a rank inside a step, in contrast, is repaired."""
    done = [exit_line(rank, START + 60, words={"end": "done"}) for rank in (0, 2, 3)]
    start = start_line(4, owner=KILLED)
    run = run_with(tmp_path / "run", start, raised(1, ordinary=False), *done, end(), planned=planned)
    if planned is not None:
        (run / "config.yaml").write_text(f"steps: {planned}")
    (run / "summary.json").write_text(json.dumps({"steps": 20}))
    text = "finished, but rank 1 raised KeyError: 'x', at ex.py:20 (exit code 4)"
    assert f"run: {text} step 20" in asked("status", str(run))
    assert asked("status", str(tmp_path)).endswith(text)
    early = raised(
        1, ordinary=False, detail="RuntimeError: the script has ended after step 2; let all take the same"
    )
    write_lines(run / "job.jsonl", [start, early, *done, end()])
    told = asked("status", str(run))
    assert "rank 1 raised RuntimeError: the script has ended after step 2, at ex.py:20 (exit code 4)" in told
    write_lines(run / "job.jsonl", [start, raised(1, ordinary=False), *done, end()])
    (run / "summary.json").unlink()
    if planned is None:  # a script that takes no step has no summary
        assert text.replace("finished", "ended") in asked("status", str(run))
    (run / "summary.json").write_text(json.dumps({"steps": 20}))
    for other in ([raised(1, ordinary=True)], [exit_line(1, START + 60, words={"end": "done"})]):
        write_lines(run / "job.jsonl", [start, *other, *done, end()])
        assert "run: finished step 20" in asked("status", str(run))


def test_status_and_why_name_the_exception_that_ended_all_ranks(tmp_path: Path) -> None:
    orphan = exit_line(3, START + 50, signal="SIGKILL", words={"end": "orphan", "detail": "rank 2 died"})
    lines = [*(raised(rank, ordinary=True) for rank in (0, 1, 2)), orphan, end()]
    run = run_with(tmp_path / "run", start_line(4, owner=KILLED), *lines)
    cause = "ranks 0-2 raised: KeyError: 'x', at ex.py:20"
    text = f"failed after step 20: no rank finished; {cause}; there is no checkpoint"
    told = asked("status", str(run))
    assert f"run: {text}" in told
    assert f"the job: {text}" in asked("why", str(run))
    assert "replicas 4 of 4 in its last step, none at the end" in told
    assert json.loads(asked("status", "--json", str(run)))["replicas_end"] == 0
    write_lines(run / "job.jsonl", [start_line(4, owner=KILLED), end(signal="SIGINT")])
    assert "replicas 4 of 4 in its last step tokens/s" in asked("status", str(run))
    ends = [{"signal": "SIGKILL"}, {"crash": "Fatal Python error"}, {"code": 3}, {}]
    lines = [exit_line(rank, START + 50, **how) for rank, how in enumerate(ends)]
    write_lines(run / "job.jsonl", [start_line(4, owner=KILLED), *lines, end()])
    each = "rank 0 killed by SIGKILL; rank 1 crashed; rank 2 left with exit code 3; 1 more in the logs"
    assert each in asked("status", str(run))


def test_fate_of_a_process_is_read_where_its_pid_means_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fate(LIVING, tmp_path) is Fate.ALIVE
    assert fate(LIVING | {"pid": 2**22 + 1}, tmp_path) is Fate.GONE  # no such pid
    with monkeypatch.context() as patched:  # a zombie has ended, though its pid still exists
        patched.setattr(owners, "_stat", lambda pid: ("Z", LIVING["born"]))
        assert fate(LIVING, tmp_path) is Fate.GONE
    # In a container of the same machine the pid says nothing, but the lock of the directory does.
    contained = KILLED | {"namespace": 1}
    assert fate(contained, tmp_path) is Fate.GONE
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    assert fate(contained, tmp_path) is Fate.ALIVE
    os.close(lock)
    assert fate(contained, tmp_path / "unmounted") is Fate.UNKNOWN


def test_job_on_several_hosts_runs_while_one_agent_does(tmp_path: Path) -> None:
    """The hosts share the run directory. The end of a host that left is not the end of the job."""
    run = run_with(tmp_path / "run")
    (run / "job.jsonl").unlink()

    def host(name: str, owner: dict[str, Any], *more: dict[str, Any]) -> None:
        common = {"run": "/j/1/", "host": name}
        lines = [start_line(4, owner=owner) | common, *(line | common for line in more)]
        write_lines(run / f"job-{name}.jsonl", lines)

    def state() -> str:
        view = RunView(run)
        view.refresh()
        return view.job().text

    host("h1", KILLED)
    host("h2", LIVING)
    assert state() == "running"
    host("h2", ELSEWHERE)
    assert state().startswith(
        "not known from this host whether it runs: it was started on h2, and its last step, 20"
    )
    host("h2", KILLED)
    assert state().startswith(f"all agents were killed (pids {os.getpid()}, {os.getpid()} are gone)")
    host("h1", KILLED, end(left=True, reason="declared lost"))
    host("h2", LIVING)
    assert state() == "running"
    host("h2", LIVING, end(signal="SIGINT", by="h3") | {"at": START + 50})
    assert state() == "ended by SIGINT on h3 after step 20"
    host("h1", KILLED, end(signal="SIGTERM", asked=True))
    host("h2", LIVING, end() | {"at": START + 101})  # h2 knows nothing of the signal
    assert state() == "stopped by SIGTERM after step 20"
    host("h1", KILLED, end(reason="no etcd has answered") | {"at": START + 300})
    with open(run / "job-h2.jsonl", "a") as file:
        file.write(json.dumps(start_line(4, owner=LIVING, run="/j/2/", host="h2", at=START + 200)) + "\n")
    assert state() == "running", "the end of an agent of the run before is not that of this one"


def test_status_lists_the_runs_of_a_directory_newest_last(tmp_path: Path) -> None:
    for number, (name, owner) in enumerate({"b": KILLED, "a": LIVING}.items()):
        run = run_with(tmp_path / name, start_line(4, owner=owner))
        for path in (run, *run.iterdir()):
            os.utime(path, (1000 + number, 1000 + number))
    (tmp_path / "notes").mkdir()
    lines = CliRunner().invoke(app, ["status", str(tmp_path)]).output.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "b", "a"]
    assert f"the launcher was killed (pid {os.getpid()} is gone)" in lines[1]
    assert lines[2].split()[1:4] == ["20", "of", "40,"]
    assert "3.0927" in lines[2]
    assert "4 of 4" in lines[2]
    assert lines[2].endswith("running")
    told = json.loads(CliRunner().invoke(app, ["status", "--json", str(tmp_path)]).output)
    assert [one["name"] for one in told] == ["b", "a"]
    nothing = CliRunner().invoke(app, ["status", str(tmp_path / "notes")])
    assert nothing.exit_code == 2
    assert "is no run directory (it has neither steps.jsonl nor job.jsonl)" in nothing.output


def test_script_says_where_it_saved_and_whether_it_resumes(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", start_line(4, owner=KILLED), end(signal="SIGINT"), planned=None)
    ended = "ended by SIGINT after step 20; "
    view = RunView(run)
    view.refresh()
    assert how_it_ended(run, view.job()) == f"{ended}the script has saved no checkpoint (recover.save)"
    place = tmp_path / "saved"
    note_place(run, place, resumes=False)
    assert how_it_ended(run, view.job()) == f"{ended}there is no checkpoint in {place}"
    checkpoint(place, 15)
    assert f"a script that calls recover.resume(step, '{place}') goes on from step 16" in how_it_ended(
        run, view.job()
    )
    note_place(run, place, resumes=True)
    assert f"{ended}the same command goes on from step 16 ({place}/checkpoints/step-15)" in how_it_ended(
        run, view.job()
    )


@pytest.mark.guarantee(
    "Monitoring", "`page.url` never leads to the page of a job that has ended, without a word."
)
def test_address_of_a_page_that_is_gone_is_named_as_such(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", start_line(4, owner=LIVING))
    (run / "page.url").write_text("http://127.0.0.1:1/\n")
    assert "page http://127.0.0.1:1/ " in asked("status", str(run))
    write_lines(run / "job.jsonl", [start_line(4, owner=RESTARTED)])
    assert "page none: http://127.0.0.1:1/ was that of the job that has ended" in asked("status", str(run))


def test_guardian_and_launcher_remove_only_their_own_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guardian removes the address of a killed launcher; hosts that share a run directory have a page each."""
    address = tmp_path / "page.url"
    for left in (b"", b"another's\n"):
        address.write_text("mine\n")
        reading, writing = os.pipe()

        def launcher_is_killed(*_: object, writing: int = writing, left: bytes = left) -> None:
            if left:
                address.write_bytes(left)
            os.close(writing)

        with monkeypatch.context() as patched, os.fdopen(reading) as stdin:
            patched.setattr(guardian.sys, "stdin", stdin)
            patched.setattr(guardian.signal, "signal", lambda *_: None)
            patched.setattr(guardian.os, "write", launcher_is_killed)  # "ready"
            guardian.main(str(tmp_path / "session"), str(tmp_path / "scratch"), str(address))
        assert (address.read_bytes() if address.exists() else b"") == left
    for left in (b"", b"another's\n"):
        with served_page(tmp_path, listen(0), ""):
            if left:
                address.write_bytes(left)
        assert (address.read_bytes() if address.exists() else b"") == left
    address.unlink()


class Signalled:
    """A job that receives real signals and notes their effects."""

    def __init__(self, request: LaunchRequest, session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended, self.said = 0, list[str]()
        self.signals = JobSignals()
        self.signals.ask = lambda: request.ask_to_stop(session)
        monkeypatch.setattr(signals_module, "say", self.said.append)
        monkeypatch.setattr(signals_module.OUTLET, "patience", None)
        monkeypatch.setattr(signals_module.FILES, "patience", 300.0)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.guarantee(
    "The launcher",
    "The first Ctrl-C stops a job after its step if it heeds that (step.stop_agreed; `recover train` does), and the "
    "second one ends it at once.",
)
def test_first_signal_asks_a_script_that_heeds_it_and_the_second_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = LaunchRequest(Path("x"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        session = tmp_path / number.name
        session.mkdir()
        rank = StopRequest(session)
        job = Signalled(request, session, monkeypatch)
        with job.signals as signals, signals.ending(job.end):
            signals.ask = lambda session=session: request.ask_to_stop(session)  # type: ignore[misc]
            rank.heed()
            os.kill(os.getpid(), number)
            assert rank.is_asked
            assert signals.outcome() == {"signal": number.name, "asked": True}
            assert (signals.code(0), signals.code(1)) == (128 + number, 1)
            assert not job.ended
            assert wait_until(lambda job=job: job.said)
            assert (
                "asked to stop after its step (step.stop_agreed); once more ends the job at once"
                in job.said[0]
            )
            os.kill(os.getpid(), number)
            assert job.ended == 1
            assert signals.outcome() == {"signal": number.name}
            assert signals.code(1) == 128 + number


def test_first_signal_ends_a_script_that_heeds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Signalled(LaunchRequest(Path("x")), tmp_path, monkeypatch)
    with job.signals as signals, signals.ending(job.end):
        os.kill(os.getpid(), signal.SIGINT)
        assert (job.ended, signals.caught, signals.asked) == (1, [signal.SIGINT], 0)
    assert not StopRequest(tmp_path).is_asked


def test_signal_before_there_is_a_job_ends_it_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Signalled(LaunchRequest(Path("x")), tmp_path, monkeypatch)
    job.signals.ask = lambda: ""
    with job.signals as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not job.ended
        with signals.ending(job.end):
            assert job.ended == 1


def test_signal_after_the_end_of_the_job_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitors of a job that has finished may need some seconds to end."""
    job = Signalled(LaunchRequest(Path("x")), tmp_path, monkeypatch)
    with job.signals as signals:
        with signals.ending(job.end):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert (job.ended, signals.code(0), signals.outcome()) == (0, 0, {})


def test_second_signal_ends_a_job_whose_request_to_stop_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Signalled(LaunchRequest(Path("x")), tmp_path, monkeypatch)

    def ask() -> str:
        os.kill(os.getpid(), signal.SIGINT)  # while the first handler waits for the disk
        return "stopping"

    with job.signals as signals, signals.ending(job.end):
        signals.ask = ask
        os.kill(os.getpid(), signal.SIGINT)
        assert job.ended == 1


def test_train_heeds_requests_from_its_start_also_on_hosts_that_share_the_directory(tmp_path: Path) -> None:
    request = LaunchRequest(Path("x"), stop_file=tmp_path / "stop")
    assert request.ask_to_stop(tmp_path / "gone") == "finishing the step and saving a checkpoint"
    assert wait_until((tmp_path / "stop").exists)


@pytest.mark.parametrize("saved", [None, 15])
def test_resume_in_a_directory_that_a_job_uses_says_so(tmp_path: Path, saved: int | None) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if saved:
        checkpoint(run, saved)
    directory, lock = preflight.open_run_dir(run, Path("x"))
    with pytest.raises(ConfigError, match="a running job uses it, and it") as refused:
        prepare_run([], None, [], directory)
    assert ("its last checkpoint is of step 15" if saved else "it has saved no checkpoint yet") in str(
        refused.value
    )
    os.close(lock)
    with pytest.raises(ValueError, match="cannot be read" if saved else "no whole checkpoint"):
        prepare_run([], None, [], directory)


def test_reader_that_looks_for_the_lock_refuses_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader holds the lock for a moment, and the launcher tries again."""
    look = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_EX)
    monkeypatch.setattr(preflight.time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN))
    _, lock = preflight.open_run_dir(tmp_path, Path("x"))
    os.close(lock)
    os.close(look)
