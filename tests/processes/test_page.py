"""The live page in a real browser: what it shows is what the records have, and it changes without a reload."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Seen
from patience import PATIENCE, wait_until
from recorded import START, exit_line, incident_line, make_run, start_line, step_line, write_lines
from training import small_world

from recover.runs.records.curve_table import POINTS
from recover.runs.report import build
from recover.world.liveness.board import Board

PICTURES = os.environ.get("PAGE_PICTURES")  # a folder: screenshots of the live run go there


@pytest.fixture
def starting() -> Iterator[Any]:
    """Start a process that is gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Any]:
    """Start `recover watch` on a run; gives its address."""
    started = []

    def watch(run_dir: Path) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "recover.cli", "watch", str(run_dir), "--page", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().removeprefix("page: ").strip()

    yield watch
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        process.stdout.close()


@pytest.mark.guarantee(
    "Monitoring",
    "The page shows the records, updates without a reload, and survives its writer and its own server.",
)
def test_page_follows_a_run_that_loses_its_writer_and_its_server(
    browser: Any, tmp_path: Path, watching: Any, starting: Any
) -> None:
    run_dir, alert = tmp_path / "run", tmp_path / "alert.json"
    words = [*small_world(tmp_path), "replicas=4", "accum=2", "steps=100000", "pace=0.05"]
    words += ["eval.every=5", "eval.batches=1"]
    options = ["--page", "0", "--on-incident", f"cat >> {alert}"]
    command = [sys.executable, "-m", "recover.cli", "train", *words, "--run-dir", str(run_dir), *options]
    job = starting(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    url = next(line for line in job.stdout if line.startswith("page: ")).removeprefix("page: ").strip()
    assert (run_dir / "page.url").read_text().strip() == url
    assert not _server_of(job.pid), "nobody has asked yet"
    seen = Seen(browser, url)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    seen.until("+document.querySelector('#now-step').textContent.split(' ')[0] >= 5")
    seen.until("document.querySelectorAll('#grid [data-doing=computing]').length > 0")
    assert seen.text("#incidents") == "Nobody was lost."
    good = seen.text("#now-goodput")

    start = json.loads((run_dir / "job.jsonl").read_text().splitlines()[0])
    os.kill(Board(Path(start["session"]) / "board", 4).pid(0), signal.SIGKILL)  # the writer
    seen.until("document.querySelector('[data-rank=\"0\"]').dataset.doing == 'gone'")
    seen.until("document.querySelector('#incident-1') != null")
    seen.until(f"document.querySelector('#now-goodput').textContent != '{good}'")
    assert "rank 0 killed by SIGKILL" in seen.text("#incident-1 summary")
    seen.until("document.querySelector('#now-replicas').textContent == '3 / 4'")
    assert "killed by SIGKILL" in seen.page.get_attribute("[data-rank='0']", "aria-label")
    assert seen.errors == []

    (server,) = _server_of(job.pid)
    os.kill(server, signal.SIGKILL)
    seen.until("document.querySelector('#link').textContent.startsWith('not connected')")
    before = int(seen.text("#now-step").split()[0])
    seen.until(f"+document.querySelector('#now-step').textContent.split(' ')[0] > {before}")
    seen.until("document.querySelector('#link').textContent == ''")
    assert _server_of(job.pid) not in ([], [server])
    if PICTURES:
        seen.until("+document.querySelector('#now-step').textContent.split(' ')[0] >= 60")
        seen.page.click("#incident-1 summary")
        seen.page.screenshot(path=f"{PICTURES}/page-1600.png", full_page=True)
        small = Seen(browser, url, width=390, scheme="dark")
        small.until("document.querySelector('#loss canvas') != null")
        small.page.screenshot(path=f"{PICTURES}/page-390.png", full_page=True)
        small.close()

    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert not (run_dir / "page.url").exists()
    assert {url.split("/")[2] for url in seen.asked} == {url.split("/")[2]}, "a request left the machine"
    seen.until("document.querySelector('#link').textContent.startsWith('the job has ended')")
    assert seen.text("#state") == "finished"
    assert sorted(seen.text("#legend").splitlines()) == ["\u00d7gone: 1", "\u2713done: 3"]
    seen.close()
    told = json.loads(alert.read_text())
    assert told["dead_ranks"] == [0]
    assert told["first"][0]["cause"] == "killed"

    summary = json.loads((run_dir / "summary.json").read_text())
    finished = Seen(browser, watching(run_dir))
    assert finished.text("#state") == "finished"
    assert finished.text("#now-step") == f"{summary['steps']} / 100,000"
    assert finished.text("#now-loss") == f"{summary['final_loss']:.4f}"
    assert finished.text("#now-goodput") == f"{100 * summary['goodput']['goodput']:.2f}%"
    parts = {name: f"{spent / 1000:.3f}" for name, spent in summary["goodput"]["parts_ms"].items()}
    assert finished.parts() == parts
    assert finished.page.get_attribute("#loss", "data-points") == str(min(POINTS, summary["steps"]))
    assert finished.page.is_visible("#now-heldout")
    assert finished.errors == []
    finished.close()
    if PICTURES:
        report = Seen(browser, build([run_dir], tmp_path / "report").as_uri(), 1100, ready="#loss canvas")
        report.page.screenshot(path=f"{PICTURES}/report.png", full_page=True)
        report.close()


@pytest.mark.guarantee(
    "Monitoring",
    "The page shows 1,000 replicas and 20,000 steps at 390 and 1,600 pixels, light and dark, by keyboard, "
    "and escapes markup.",
)
def test_page_shows_a_thousand_replicas_whole_and_accessibly(
    browser: Any, tmp_path: Path, watching: Any
) -> None:
    """Names and words of ranks that look like markup are shown as they are."""
    evil = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
    run, replicas, steps = tmp_path / "<b>run&amp;", 1000, 20_000
    (run / "ranks").mkdir(parents=True)
    lost = incident_line(500, [7], location=evil)
    words = {"end": "raised", "kind": evil, "detail": evil, "place": evil}
    write_lines(run / "steps.jsonl", [step_line(n, replicas - (n >= 500), 4000) for n in range(1, steps + 1)])
    write_lines(run / "incidents.jsonl", [lost])
    write_lines(run / "job.jsonl", [start_line(replicas, host=evil), exit_line(7, START + 501, words=words)])
    (run / "ranks" / "3.log").write_text(evil)
    url = watching(run)
    for width, scheme in ((390, "dark"), (1600, "light")):
        seen = Seen(browser, url, width, scheme)
        page = seen.page
        seen.until("document.querySelectorAll('#grid button').length == 999")  # one was lost long ago
        assert seen.text("#now-step") == "20,000"
        assert int(page.get_attribute("#loss", "data-points")) <= POINTS
        assert page.evaluate("document.documentElement.scrollWidth") == width, "it does not fit"
        page.click("#incident-1 summary")
        assert evil in seen.text("#incident-1")
        assert seen.text("h1") == run.name
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
        # By keyboard: one stop for the whole grid, arrows inside it, and a rank's log at hand.
        assert page.evaluate("document.querySelectorAll('#grid button[tabindex=\"0\"]').length") == 1
        page.focus("#grid button[tabindex='0']")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.rank") == "3"
        page.keyboard.press("Enter")
        seen.until("document.querySelector('#log').textContent.includes('onerror')")
        assert seen.text("#log") == evil
        # For screen readers: everything that can be used or seen has a name.
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, select, input, figure, section, summary')].filter(e => !("
            "e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim() ||"
            "(e.labels && e.labels.length))).length"
        )
        assert unnamed == 0
        assert page.evaluate("window.pwned") is None
        assert seen.errors == []
        seen.close()


def test_open_page_follows_a_run_that_starts_again(browser: Any, tmp_path: Path, watching: Any) -> None:
    run = make_run(tmp_path / "run")
    seen = Seen(browser, watching(run))
    assert seen.text("#now-step") == "20 / 40"
    write_lines(run / "steps.jsonl", [step_line(n, 4) for n in range(1, 11)])
    seen.until("document.querySelector('#now-step').textContent == '10 / 40'")
    seen.until("document.querySelector('#loss').dataset.points == '10'")
    assert seen.errors == []
    seen.close()


def _server_of(launcher: int) -> list[int]:
    """The process that serves the page of a running job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(stat[1]) == launcher and b"recover.runs.live.page_process" in line:
                found.append(int(entry.name))
    return found


@pytest.mark.guarantee("Monitoring", "The page ends with a killed launcher.")
def test_page_ends_with_a_killed_launcher(tmp_path: Path, starting: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal; signal.pause()")
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "recover.cli",
        "run",
        "-n",
        "1",
        "--run-dir",
        str(run_dir),
        "--page",
        "0",
    ]
    job = starting([*command, str(script)], stderr=subprocess.PIPE, text=True)
    assert job.stderr is not None
    url = job.stderr.readline().removeprefix("recover: page: ").strip()
    asked = subprocess.run(["curl", "-s", f"{url}status.json"], capture_output=True, text=True)
    assert json.loads(asked.stdout)["state"] in ("running", "ended"), asked
    (server,) = _server_of(job.pid)
    job.kill()
    job.wait()
    job.stderr.close()
    assert wait_until(lambda: not Path(f"/proc/{server}").exists())
