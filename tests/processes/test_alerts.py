"""`--on-incident`: every loss is reported once, with its cause, and a command that hangs holds nothing up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from patience import wait_until
from recorded import START, exit_line, incident_line, make_run

from recover.runs.live import alerts


def add(path: Path, line: dict[str, object]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.mark.guarantee(
    "Monitoring", "`--on-incident` reports every loss once with its cause and delays nothing."
)
def test_on_incident_reports_every_loss_once_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_KNOWN", 600.0)
    run, heard = make_run(tmp_path / "run"), tmp_path / "heard"
    said: list[str] = []
    with alerts.Alerts(run, f"cat >> {heard}; exit 3", said.append) as alert:
        add(run / "incidents.jsonl", incident_line(20, [2], epoch=3))
        assert wait_until(lambda: alert._seen)
        assert not heard.exists(), "its cause may still come"
        add(run / "job.jsonl", exit_line(2, START + 21, oom_kills=1, signal="SIGKILL"))
        assert wait_until(heard.exists)
        add(run / "job.jsonl", exit_line(3, START + 30, signal="SIGSEGV"))
    told = [json.loads(line) for line in heard.read_text().splitlines()]
    assert [(one["step"], one["dead_ranks"], one["first"][0]["cause"]) for one in told] == [
        (20, [2], "oom"),  # and not that of step 5, which was there before
        (None, [3], "crashed"),
    ]
    assert told[0]["run"] == "run"
    assert said == [f"--on-incident: 'cat >> {heard}; exit 3' failed (exit code 3); the run goes on"]


@pytest.mark.guarantee(
    "Monitoring", "`--on-incident` reports every loss once with its cause and delays nothing."
)
def test_on_incident_command_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_CLOSING", 0.5)
    monkeypatch.setattr(alerts, "_KNOWN", 0.0)
    run, child = make_run(tmp_path / "run"), tmp_path / "pid"
    said: list[str] = []
    with alerts.Alerts(run, f"sleep 1000 & echo $! > {child}; wait", said.append):
        add(run / "incidents.jsonl", incident_line(20, [2], epoch=3))
    assert len(said) == 1
    assert "was ended after" in said[0]
    assert wait_until(lambda: not Path(f"/proc/{child.read_text().strip()}").exists())
