"""The page's server: it serves the content of the records and nothing more, and no client can block it."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import random
import re
import socket
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import serving
from patience import wait_until
from prometheus_client.parser import text_string_to_metric_families
from recorded import (
    START,
    exit_line,
    finish,
    incident_line,
    make_eventful_run,
    make_run,
    start_line,
    step_line,
    write_lines,
)
from rich.console import Console

from recover.runs.live.page_process import token_for
from recover.runs.live.ranks import _shown
from recover.runs.live.server import READERS, events, status
from recover.runs.live.terminal import once, shown
from recover.runs.live.view import RunView
from recover.runs.records.curve_table import POINTS
from recover.runs.records.curves import CURVES
from recover.runs.records.goodput import account
from recover.runs.records.job_log import job_lines, launches
from recover.runs.records.json_lines import read_lines
from recover.runs.web import assets
from recover.world.liveness.board import Board
from recover.world.liveness.signs import Now

ROOT = Path(__file__).parents[2]


def get(port: int, path: str = "/", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.guarantee(
    "Monitoring",
    "The page shows the records, updates without a reload, and survives its writer and its own server.",
)
def test_page_serves_what_the_records_hold(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    steps, incidents = (list(read_lines(run / name)) for name in ("steps.jsonl", "incidents.jsonl"))
    with serving(run) as port:
        told = json.loads(get(port, "/status.json")[1])
        metrics = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(get(port, "/metrics")[1])
            for sample in family.samples
        }
    assert told["goodput"] == account(steps, incidents, launches(job_lines(run)))
    assert told["goodput"]["total_ms"] == 4 * 22_000
    last = steps[-1]
    assert (told["step"], told["loss"], told["replicas"]) == (20, last["loss"], 3)
    assert (told["steps"], told["global_batch"], told["state"]) == (40, 16, "running")
    assert told["eta_seconds"] == 20.0
    assert [entry["doing"] for entry in told["ranks"]] == ["not known", "gone", "not known", "not known"]
    (loss,) = told["losses"]
    assert loss["cause"] == "rank 1 killed by SIGKILL"
    assert loss["phases"] == {"detect": 20, "repair": 70, "restore": 2, "redo": 40}
    assert loss["pause_ms"] == 132
    assert loss["committed"] == 16
    run_label = ("run", "run")
    for name in CURVES:
        if name in last:
            assert metrics[(f"recover_{name}", run_label)] == last[name], name
    assert metrics[("recover_tokens_per_second", run_label)] == last["tokens"]
    assert metrics[("recover_goodput", run_label)] == told["goodput"]["goodput"]
    assert metrics[("recover_incidents_total", ("cause", "killed"), run_label)] == 1
    parts = {name[1][1]: value for name, value in metrics.items() if name[0] == "recover_rank_seconds_total"}
    assert parts == {name: spent / 1e3 for name, spent in told["goodput"]["parts_ms"].items()}


def read_until(source: Iterator[bytes], wanted: str) -> tuple[str, Any]:
    for text in source:
        if f"event: {wanted}\n" in (lines := text.decode()):
            number, _, data = lines.strip().splitlines()
            return number.removeprefix("id: "), json.loads(data.removeprefix("data: "))
    raise AssertionError("a stream never ends")


@pytest.mark.guarantee("Monitoring", "A page that slept catches up.")
def test_page_that_slept_catches_up_or_starts_again(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    view = RunView(run)
    source = events(view, tick=0.11)
    number, series = read_until(source, "series")
    assert series["step"] == list(range(1, 21))
    with open(run / "steps.jsonl", "a") as file:
        file.write("".join(json.dumps(step_line(n, 3)) + "\n" for n in (21, 22)) + '{"step": 23, "lo')
    assert [row[0] for row in read_until(source, "steps")[1]] == [21, 22], "half a line was told, or all anew"
    again, rows = read_until(events(view, last=number, tick=0.11), "steps")
    assert [row[0] for row in rows] == [21, 22], "who comes again gets what it has missed"
    assert read_until(events(view, last="17:9", tick=0.11), "series")[1]["count"] == 22
    write_lines(run / "steps.jsonl", [step_line(n, 4) for n in range(1, 11)])  # a run that was resumed
    number, series = read_until(source, "series")
    assert series["step"] == list(range(1, 11))
    assert number != again
    write_lines(run / "steps.jsonl", [step_line(n, 4) for n in range(1, 11)])
    with open(run / "incidents.jsonl", "a") as file:
        file.write(json.dumps(incident_line(10, [2, 3], epoch=3)) + "\n")
    assert len(read_until(source, "incidents")[1]) == 2


def test_page_data_of_a_long_run_is_thinned_and_keeps_every_wrong_batch(
    tmp_path: Path,
) -> None:
    run, count, replicas = tmp_path / "run", 20_000, 1000
    run.mkdir()
    lines = [step_line(n, replicas, batch=4000) for n in range(1, count + 1)]
    lines[12_345]["microbatches"] = 3999
    lines[777]["loss"] = None
    lines[9_000]["loss"] = 99.0
    write_lines(run / "steps.jsonl", lines)
    write_lines(run / "job.jsonl", [start_line(replicas)])
    view = RunView(run)
    view.refresh()
    series = view.series()
    assert series["count"] == count
    assert {len(series[name]) for name in ("step", "loss", "low", "high", "microbatches")} == {POINTS}
    assert series["step"][-1] == count
    assert series["microbatches"].count(3999) == 1
    assert max(series["high"]) == 99.0
    assert None not in series["loss"]
    assert len(view.ranks()) == replicas
    assert len(next(event for event in events(view) if b"event: series" in event)) < 60_000


@pytest.mark.guarantee(
    "Monitoring",
    "The page server refuses requests without token, with a foreign host name or path, and survives bad "
    "requests and slow readers.",
)
def test_page_refuses_requests_without_token_or_with_a_foreign_host(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    paths = ("/", "/status.json", "/metrics", "/events", "/log/0", "/nothing")
    assert token_for("127.0.0.1") == token_for("::1") == ""
    token = token_for("0.0.0.0")
    assert len(token) > 20
    with serving(run, token) as port:
        for path in paths:
            for headers in (
                {},
                {"Authorization": "Bearer no"},
                {"Cookie": "recover_token=no"},
                {"Cookie": "\x7f=;;"},
            ):
                assert get(port, path, **headers)[0] == 401, path
            assert get(port, f"{path}?token=")[0] == 401
        assert get(port, "/log/0", Authorization=f"Bearer {token}") == (200, "what rank 0 did\n")
        assert get(port, "/log/0", Cookie=f"recover_token={token}")[0] == 200
        assert get(port, f"/status.json?token={token}")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", f"/?token={token}")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Location"]) == (303, "/"), "it stays in the address bar"
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly; SameSite=Strict" in cookie
        connection.close()
        assert "<title>" in get(port, "/", Cookie=cookie.partition(";")[0])[1]
    with serving(run) as port:
        for path in paths:
            assert get(port, path, Host="evil.example")[0] == 403, path
        for host in ("localhost", f"127.0.0.1:{port}", "[::1]:80"):
            assert get(port, "/log/0", Host=host)[0] == 200


@pytest.mark.guarantee(
    "Monitoring",
    "The page server refuses requests without token, with a foreign host name or path, and survives bad "
    "requests and slow readers.",
)
def test_page_paths_never_leave_the_run_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "secret.log").write_text("secret")
    (run / "ranks" / "1.log").symlink_to(tmp_path / "secret.log")
    (run / "ranks" / "2.log").symlink_to(run / "ranks" / "2.log")
    ways = (
        "/log/1",
        "/log/2",
        "/log/../../secret",
        "/log/..%2f..%2fsecret",
        "/log/0%00",
        "/log//etc/passwd",
        "/log/-1",
    )
    ways += (
        "/log/٣",
        "/log/" + "9" * 5000,
        "/../secret.log",
        "//etc/passwd",
        "/config.yaml",
        "/page.url",
        "/log/",
    )
    with serving(run) as port:
        for way in ways:
            with socket.create_connection(("127.0.0.1", port), 5) as reader:
                reader.sendall(f"GET {way} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                answer = b"".join(iter(lambda reader=reader: reader.recv(65536), b""))
            assert b"secret" not in answer.partition(b"\r\n\r\n")[2].replace(way.encode(), b""), way
            assert answer.split()[1] in (b"400", b"404", b"414"), (way, answer[:80])


@pytest.mark.guarantee(
    "Monitoring",
    "The page server refuses requests without token, with a foreign host name or path, and survives bad "
    "requests and slow readers.",
)
def test_page_server_survives_thousands_of_bad_requests(tmp_path: Path) -> None:
    run, dice = make_run(tmp_path / "run"), random.Random(7)
    words = [
        b"GET",
        b"POST",
        b"PUT",
        b"/",
        b"/log/",
        b"/events",
        b"HTTP/1.1",
        b"HTTP/9.9",
        b"\r\n",
        b"\n",
        b" ",
        b"%00",
    ]
    words += [
        b"Host: localhost",
        b"Last-Event-ID: 9:9",
        b"Cookie: =;",
        b"Content-Length: 99999999",
        b"\x00\xff\xfe",
        b":",
    ]
    words += [b"A" * 70_000, b"Transfer-Encoding: chunked", b"?token=%ff&&=", b"\r\n\r\n"]
    with serving(run) as port:
        for _ in range(3000):
            data = b"".join(
                dice.choice(words[: 17 if dice.random() < 0.99 else None]) for _ in range(dice.randint(1, 12))
            )
            if b"events" in data:
                data += b" x"  # a stream never ends
            with socket.create_connection(("127.0.0.1", port), 5) as reader:
                try:
                    reader.sendall(data + b"\r\n\r\n")
                    reader.shutdown(socket.SHUT_WR)
                    if dice.random() < 0.3:
                        reader.recv(1000)
                except OSError:
                    pass  # the server may hang up
        assert get(port, "/log/0") == (200, "what rank 0 did\n")


@pytest.mark.guarantee(
    "Monitoring",
    "The page server refuses requests without token, with a foreign host name or path, and survives bad "
    "requests and slow readers.",
)
def test_page_server_is_not_blocked_by_slow_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recover.runs.live.server._Handler.timeout", 600.0
    )  # no connected reader is disconnected
    run = make_run(tmp_path / "run")
    with serving(run) as port:
        idle = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(READERS // 2)]
        for reader in idle:
            reader.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert get(port, "/log/0")[0] == 200
        crowd = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(2 * READERS)]
        for reader in crowd:
            reader.setblocking(False)
        away: set[int] = set()

        def enough_are_sent_away() -> bool:
            away.update(number for number, reader in enumerate(crowd) if _hung_up(reader))
            return len(away) >= READERS

        assert wait_until(enough_are_sent_away, 30), "all were let in"
        for reader in (*idle, *crowd):
            reader.close()
        assert any(_is_served(port) for _ in range(300)), (
            "the places of those who left are not given to others"
        )


def _hung_up(reader: socket.socket) -> bool:
    try:
        return reader.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_served(port: int) -> bool:
    try:
        return get(port, "/log/0")[0] == 200
    except OSError:
        threading.Event().wait(0.05)
        return False


def test_run_without_steps_is_reported_when_it_ends(tmp_path: Path) -> None:
    """A script without recover.Step has no steps in its records, and its losses belong to no step."""
    run = tmp_path / "run"
    run.mkdir()
    job = [start_line(3), exit_line(2, START + 1, signal="SIGSEGV"), exit_line(0, START + 2, code=0)]
    write_lines(run / "job.jsonl", [*job, {"what": "end", "at": START + 3}])
    view = RunView(run)
    view.refresh()
    told = status(view)
    assert told["state"] == "ended"
    assert told["goodput"]["total_ms"] == 0
    assert [entry["doing"] for entry in told["ranks"]] == ["gone"] * 3
    assert told["losses"][0]["cause"] == "rank 2 crashed (SIGSEGV)"


def test_joined_replica_is_in_the_grid_and_among_the_incidents(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    came = {"kind": "joined", "joined_ranks": [4], "joined_replicas": [4], "transfer_ms": 30.0}
    with open(run / "incidents.jsonl", "a") as file:
        file.write(json.dumps(incident_line(9, [], epoch=3, **came)) + "\n")
    view = RunView(run)
    view.refresh()
    lost, joined = view.incidents()
    assert (lost["joined_replicas"], joined["joined_replicas"], joined["dead_ranks"]) == ([], [4], [])
    assert (joined["phases"], joined["transfer_ms"]) == ({}, 30.0), "a join has one figure: the pause"
    assert [entry["rank"] for entry in view.ranks()] == [0, 1, 2, 3, 4]
    assert view.state()["lost"] == 1


@pytest.mark.guarantee(
    "Rejoining replicas", "A joining replica is shown by `recover status` and on the page."
)
def test_joining_replica_is_shown_in_the_grid_and_in_status(tmp_path: Path) -> None:
    run, session = make_run(tmp_path / "run"), tmp_path / "session"
    session.mkdir()
    board = Board(session / "board", 9)
    board.claim(0)
    board.claim(5)
    write_lines(run / "job.jsonl", [start_line(4, session=str(session))])
    view = RunView(run)
    view.refresh()
    assert {entry["rank"]: entry["doing"] for entry in view.ranks()}[5] == "joining"
    console = Console(width=200, file=io.StringIO())
    console.print(shown(view))
    assert "1 joining" in console.file.getvalue()  # type: ignore[attr-defined]
    came = {"kind": "joined", "joined_ranks": [5], "joined_replicas": [5], "transfer_ms": 30.0}
    with open(run / "incidents.jsonl", "a") as file:
        file.write(json.dumps(incident_line(9, [], epoch=3, **came)) + "\n")
    view.refresh(at_once=True)
    assert {entry["rank"]: entry["doing"] for entry in view.ranks()}[5] == "starting"


@pytest.mark.parametrize("text", ["", "{", "null", '{"step": "x"}\n', "\x00\n"])
def test_damaged_records_are_tolerated(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run")
    for name in ("steps.jsonl", "incidents.jsonl", "job.jsonl", "config.yaml", "summary.json"):
        (run / name).write_text(text)
    view = RunView(run)
    view.refresh()
    assert status(view)["step"] == 0
    assert view.series()["count"] == 0


def parsed(event: bytes) -> tuple[str, Any]:
    fields = dict(line.split(": ", 1) for line in event.decode().strip().splitlines())
    return fields.get("event", ""), json.loads(fields.get("data", "null"))


@pytest.mark.guarantee("Monitoring", "The last frame of an open page is the state in which the run ended.")
def test_closing_stream_sends_the_whole_end_of_the_run(tmp_path: Path) -> None:
    """The stream sends lines that were written a moment before, too, then its last event, and ends."""
    run, closing = make_run(tmp_path / "run"), threading.Event()
    view = RunView(run)
    source = events(view, closing=closing)
    read_until(source, "ranks")
    finish(run, [0, 2, 3])
    closing.set()
    last = [parsed(event) for event in source]
    told = dict(last)
    assert told["state"]["state"] == "finished"
    assert {entry["rank"]: entry["doing"] for entry in told["ranks"]} == {0: "done", 2: "done", 3: "done"}
    assert last[-1] == ("end", {})


def test_closing_stream_of_a_running_job_does_not_say_that_it_ended(tmp_path: Path) -> None:
    """SIGTERM to all processes of a host also reaches the server: the page connects again."""
    run, closing = make_run(tmp_path / "run"), threading.Event()
    source = events(RunView(run), closing=closing)
    read_until(source, "ranks")
    closing.set()
    assert "end" not in dict(parsed(event) for event in source)


def test_stream_removes_ranks_that_a_new_launch_does_not_have(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    view = RunView(run)
    source = events(view, tick=0.11)
    read_until(source, "ranks")
    with open(run / "job.jsonl", "a") as file:
        file.write(json.dumps(start_line(2, at=START + 100)) + "\n")
    found = {entry["rank"]: entry.get("removed", False) for entry in read_until(source, "ranks")[1]}
    assert {rank for rank, removed in found.items() if removed} == {2, 3}


def test_ranks_of_an_earlier_launch_are_not_in_the_grid(tmp_path: Path) -> None:
    view = RunView(make_eventful_run(tmp_path / "run"))
    view.refresh()
    assert [entry["rank"] for entry in view.ranks()] == [0, 1]


def test_lost_rank_is_past_a_minute_later_by_the_clock_of_the_run(tmp_path: Path) -> None:
    for steps, past in ((60, [False] * 4), (70, [False, True, False, False])):
        view = RunView(make_run(tmp_path / str(steps), steps=steps))
        view.refresh()
        assert [entry["past"] for entry in view.ranks()] == past


def test_rank_that_was_ending_is_not_shown_as_gone(tmp_path: Path) -> None:
    """This is its state between the end of its process and the launcher's record of it."""
    now = Now("ending", 0.0, 0)
    assert _shown(now, "", coming=False)["doing"] == "ending"
    assert _shown(Now("computing", 0.0, 3), "", coming=False)["doing"] == "gone"


def test_vendored_chart_library_is_unmodified_and_licensed() -> None:
    place = Path(assets.__file__).parent / "vendor" / "uplot"
    facts = tomllib.loads((place / "vendor.toml").read_text())
    assert {path.name for path in place.iterdir()} == {*facts["sha256"], "vendor.toml"}
    for name, checksum in facts["sha256"].items():
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == checksum, name
    assert facts["licence"] == "MIT"
    licence = (place / "LICENSE").read_text()
    assert licence.startswith("The MIT License (MIT)")
    assert licence in assets.script(), "the licence is in every copy"
    assert f"v{facts['version']}" in (place / "uPlot.iife.min.js").read_text()[:200]
    assert "</script" not in assets.script()
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "recover"
    ]
    shipped = {path for pattern in packaged for path in (ROOT / "recover").glob(pattern)}
    web = Path(assets.__file__).parent
    assert {
        path for path in web.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    } <= shipped


def test_page_is_one_file_with_style_and_scripts_in_it(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "run")) as port:
        page = get(port)[1]
    assert assets.script() in page
    assert assets.style() in page
    assert "SHARED" not in page
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)


def test_status_of_a_script_without_tokens_has_microbatches_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B is a whole number also where no configuration states it."""
    run = make_run(tmp_path / "run")
    (run / "config.yaml").unlink()
    lines = [step_line(n, 4, batch=6, seconds=0.5) for n in range(1, 21)]
    for line in lines:
        del line["tokens"]
    write_lines(run / "steps.jsonl", lines)
    view = RunView(run)
    view.refresh()
    told = status(view)
    assert (told["tokens"], told["tokens_per_second"], told["microbatches_per_second"]) == (None, None, 12.0)
    assert json.dumps(told["global_batch"]) == "6"
    once(view)
    text = " ".join(capsys.readouterr().out.split())
    assert "microbatches/s 12.00 " in text
    assert "tokens/s" not in text
    assert "6 of B = 6 " in text
    with serving(run) as port:
        assert "recover_tokens_total" not in get(port, "/metrics")[1]


def test_status_of_a_run_with_tokens_has_both_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = RunView(make_run(tmp_path / "run"))
    assert view.state()["tokens_per_second"] is None, "nothing is known before the first step"
    view.refresh()
    told = status(view)
    assert (told["tokens_per_second"], told["microbatches_per_second"]) == (16 * 128, 16.0)
    once(view)
    assert "tokens/s 2,048 " in " ".join(capsys.readouterr().out.split())
