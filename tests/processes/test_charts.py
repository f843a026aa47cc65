"""The charts of the live page and of the report in a real browser: from recorded runs, without any network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsing import Seen, serving, serving_page
from patience import wait_until
from recorded import finish, incident_line, make_eventful_run, make_run, step_line, write_lines

from recover.runs.records.curve_table import POINTS
from recover.runs.records.goodput import PARTS
from recover.runs.report import build

SIZES = [(width, scheme) for width in (1600, 400) for scheme in ("light", "dark")]
NEAREST = 45  # least distance of two colours, of 441


@pytest.mark.parametrize("count", [2, 6])
def test_numbers_of_the_report_fit_a_phone_or_show_that_they_go_on(
    browser: Any, tmp_path: Path, count: int
) -> None:
    """Two runs with long names fit at 400 pixels; six scroll, with a shadow at the edge."""
    runs = [make_run(tmp_path / f"a-run-with-a-long-name-{number}") for number in range(count)]
    facts = {"steps": 20, "tokens": 123_456_789, "final_loss": 2.718281828, "parameters_digest": "0f" * 32}
    for run in runs:
        finish(run, [0, 2, 3])
        (run / "summary.json").write_text(json.dumps(facts))
    seen = Seen(browser, build(runs, tmp_path / "out").as_uri(), 400, ready="#loss canvas")
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 400
    width, shown, shadows = seen.page.evaluate(
        "(e => [e.scrollWidth, e.clientWidth, getComputedStyle(e).backgroundAttachment])"
        "(document.getElementById('numbers'))"
    )
    assert (width <= shown) == (count == 2)
    assert shadows == "local, local, scroll, scroll"
    assert seen.errors == []
    seen.close()


@contextmanager
def opened(kind: str, browser: Any, run: Path, width: int = 1600, scheme: str = "light") -> Iterator[Seen]:
    """The live page or the report of a run. Checks at the end: no errors on it, and no requests to other servers."""
    if kind == "page":
        with serving(run) as port:
            seen = Seen(browser, f"http://127.0.0.1:{port}/", width, scheme, "#loss canvas")
            yield seen
            assert {url.split("/")[2] for url in seen.asked} == {f"127.0.0.1:{port}"}
    else:
        place = build([run], run / "report").as_uri()
        seen = Seen(browser, place, width, scheme, "#loss canvas")
        yield seen
        assert seen.asked == {place}, "a report is one file"
    assert seen.errors == []
    seen.close()


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def column(seen: Seen, chart: str, label: str) -> dict[int, float]:
    """Values of the series with this label, by step."""
    steps, values = seen.page.evaluate(
        f"(() => {{ const u = charts.all.{chart}.u, at = u.series.findIndex(s => s.label === '{label}');"
        "return [u.data[0], at < 0 ? [] : u.data[at]]; })()"
    )
    return {step: value for step, value in zip(steps, values, strict=False) if value is not None}


def point_at(seen: Seen, chart: str, step: int) -> dict[str, str]:
    """The values of a chart, by their labels, when the pointer is over this step."""
    told: dict[str, str] = {}

    def shows_step() -> bool:
        """The chart follows the pointer in its next frame, and a page that is refreshed meanwhile forgets it."""
        left = seen.page.evaluate(f"charts.all.{chart}.u.valToPos({step}, 'x')")
        seen.page.mouse.move(0, 0)
        seen.page.hover(f"#{chart} .u-over", position={"x": left, "y": 20})
        told.clear()
        told.update(
            seen.page.evaluate(
                f"[...document.querySelectorAll('#{chart} .u-legend .u-series')].map(row => "
                "[row.querySelector('.u-label').textContent, row.querySelector('.u-value').textContent])"
            )
        )
        return told["step"] == f"{step:,}"

    assert wait_until(shows_step), told
    return told


def distance(one: list[int], two: list[int]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, two, strict=True)) ** 0.5


@pytest.mark.guarantee(
    "Monitoring",
    "Page and report show losses, held-out loss, learning rate, gradient norm and GPU memory at 400 and 1,600 pixels, "
    "light and dark, without a network.",
)
@pytest.mark.parametrize("kind", ["page", "report"])
def test_charts_fit_at_every_width_in_light_and_dark(browser: Any, tmp_path: Path, kind: str) -> None:
    run = make_eventful_run(tmp_path / "run")
    with opened(kind, browser, run) as seen:
        page = seen.page
        for width, scheme in SIZES:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            seen.until(f"{AXES} === {INK}")  # drawn again, in the colours of the scheme
            for chart in ("loss", "batch", "replicas", "speed", "grad", "lr", "memory"):
                assert page.is_visible(f"#{chart}"), chart
                fits = f"document.querySelector('#{chart} canvas').getBoundingClientRect().right <= {width}"
                seen.until(fits)  # drawn again, in the new width
                assert page.evaluate(f"parseFloat(charts.all.{chart}.u.axes[1].font[0])") >= 10
            assert page.is_hidden("#pace"), "tokens are known"
            assert page.evaluate(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
            smallest = page.evaluate(
                "Math.min(...[...document.querySelectorAll('body *')].filter(e => e.offsetParent && "
                "[...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))"
                ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
            )
            assert smallest >= 10
            ground = page.evaluate(COLOUR_OF, "--page")
            assert (sum(ground) < 200) == (scheme == "dark")
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == f"rgb({', '.join(map(str, ground))})"
            parts = {name: page.evaluate(COLOUR_OF, f"--{name}") for name in PARTS}
            for name, colour in parts.items():
                others = {other: distance(colour, parts[other]) for other in parts if other != name}
                assert min(others.values()) > NEAREST, (name, others)
                assert distance(colour, ground) > NEAREST, name
            kinds = {name: page.evaluate(COLOUR_OF, name) for name in ("--red", "--violet", "--sky")}
            assert distance(kinds["--red"], kinds["--violet"]) > NEAREST
            assert distance(kinds["--sky"], kinds["--violet"]) > NEAREST


AXES = "charts.all.loss.u.axes[1].stroke()"
INK = "getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()"
COLOUR_OF = (
    "name => { const e = document.createElement('i'); e.style.color = `var(${name})`; document.body.append(e);"
    "const found = getComputedStyle(e).color.match(/\\d+/g).map(Number); e.remove(); return found.slice(0, 3); }"
)


@pytest.mark.parametrize("kind", ["page", "report"])
def test_charts_show_the_records_and_keep_them_when_switched(browser: Any, tmp_path: Path, kind: str) -> None:
    """Values under the pointer are those of the records; smoothing and logarithmic scale change the drawing alone."""
    run = make_eventful_run(tmp_path / "run")
    lines = lines_of(run)
    losses = {line["step"]: line["loss"] for line in lines}
    heldout = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
    with opened(kind, browser, run) as seen:
        # The page asks for the records in parts.
        seen.until("charts.all.loss.u.series.some(s => s.label === 'held-out')")
        seen.until(f"charts.all.loss.u.data[0].length === {len(lines)}")
        assert column(seen, "loss", "loss") == pytest.approx(losses)
        assert column(seen, "loss", "held-out") == pytest.approx(heldout)
        assert column(seen, "lr", "learning rate") == pytest.approx({n["step"]: n["lr"] for n in lines})
        assert column(seen, "grad", "gradient norm") == pytest.approx(
            {n["step"]: n["grad_norm"] for n in lines}
        )
        told = point_at(seen, "loss", 23)
        assert (told["step"], told["loss"]) == ("23", f"{losses[23]:.5g}")
        assert told["held-out"] == f"{heldout[20]:.5g} (step 20)"
        assert point_at(seen, "lr", 23)["learning rate"] == f"{lines[22]['lr']:.5g}"
        assert point_at(seen, "grad", 23)["gradient norm"] == f"{lines[22]['grad_norm']:.5g}"
        assert point_at(seen, "memory", 23)["gpu memory"] == "3.125"  # GiB

        where = seen.page.evaluate("charts.all.loss.u.valToPos(2, 'y')")
        seen.page.check("#chart-log")
        seen.until("document.querySelector('#grad figcaption').textContent.endsWith('logarithmic')")
        assert seen.page.evaluate("[charts.all.loss, charts.all.grad].map(c => c.u.scales.y.distr)") == [3, 3]
        assert seen.page.evaluate("charts.all.loss.u.valToPos(2, 'y')") != where
        assert column(seen, "loss", "loss") == pytest.approx(losses)
        seen.page.uncheck("#chart-log")
        seen.until("charts.all.loss.u.scales.y.distr === 1")

        assert column(seen, "loss", "smoothed") == {}
        seen.page.select_option("#chart-smooth", "5")
        seen.until("charts.all.loss.u.series.some(s => s.label === 'smoothed')")
        mean = sum(losses[step] for step in range(28, 33)) / 5
        assert column(seen, "loss", "smoothed")[30] == pytest.approx(mean)
        assert column(seen, "loss", "loss") == pytest.approx(losses)
        assert point_at(seen, "loss", 30)["smoothed"] == f"{mean:.5g}"


@pytest.mark.parametrize("kind", ["page", "report"])
def test_joins_and_resumptions_have_labels_marks_and_counts(browser: Any, tmp_path: Path, kind: str) -> None:
    """A join has one figure, the pause; a resume on fewer replicas does not count as a loss."""
    run = make_eventful_run(tmp_path / "run")
    with opened(kind, browser, run) as seen:
        marks = [[10, "lost", "lost 1"], [20, "joined", "joined 4"], [41, "resumed", "resumed on 2"]]
        seen.until(
            f"document.querySelector('#replicas').dataset.marks === JSON.stringify({json.dumps(marks)})"
        )
        labels = json.dumps(["joined 4", "resumed on 2", "lost 1"])
        seen.until(f"document.querySelector('#replicas').dataset.labels === JSON.stringify({labels})")
        kinds = seen.page.evaluate("[...document.querySelectorAll('.marks span')].map(e => e.dataset.kind)")
        assert kinds == ["lost", "joined", "resumed"]
        for step, _, _ in marks:
            assert seen.page.evaluate(IS_MARKED, step), step
        assert not seen.page.evaluate(IS_MARKED, 31)
        counts = "1 of 4 replicas lost, 1 joined, resumed on 2"
        assert counts in (seen.text("#now-lost") if kind == "page" else seen.text("h1"))
        told = seen.text(".joined")
        assert "146 ms" in told
        assert "redo" not in told
        assert "346" not in told
        assert "345" not in told
        assert "479" not in told
        if kind == "page":
            assert "replica 4 joined; the others waited 146 ms" in told


@pytest.mark.parametrize("kind", ["page", "report"])
def test_marks_close_to_each_other_keep_the_labels_of_joins(browser: Any, tmp_path: Path, kind: str) -> None:
    """A loss and its join a step later, twice, on a narrow chart: labels stand above each other, in three rows at most,
    and those of losses are left out first."""
    run = make_run(tmp_path / "run", lost_at=None)
    write_lines(
        run / "incidents.jsonl",
        [
            incident_line(5, [0]),
            incident_line(6, [], epoch=3, joined_ranks=[4], joined_replicas=[4]),
            incident_line(7, [1], epoch=4),
            incident_line(8, [], epoch=5, joined_ranks=[5], joined_replicas=[5]),
        ],
    )
    with opened(kind, browser, run, width=400) as seen:
        for chart in ("loss", "replicas"):
            seen.until(f"(document.querySelector('#{chart}').dataset.labels || '').includes('joined 5')")
            labels = json.loads(seen.page.get_attribute(f"#{chart}", "data-labels"))
            assert {"joined 4", "joined 5"} < set(labels) <= {"joined 4", "joined 5", "lost 0", "lost 1"}, (
                chart
            )
            # All rows are inside the canvas.
            room = seen.page.evaluate(f"charts.all.{chart}.u.bbox.top / uPlot.pxRatio")
            rows = seen.page.evaluate(
                f"charts.all.{chart}.place(charts.all.{chart}.u).map(label => label.row)"
            )
            assert set(rows) == set(range(max(rows) + 1))
            assert max(rows) > 0
            assert room >= 16 + 14 * max(rows)


# Whether the chart of replicas has a vertical line at this step: other pixels than a little to the left of it.
IS_MARKED = """step => {
  const u = charts.all.replicas.u, x = Math.round(u.valToPos(step, "x", true)), {top, height} = u.bbox;
  const column = at => [...u.ctx.getImageData(at, top + 2, 1, Math.round(height / 8)).data].join();
  return [x - 1, x, x + 1].some(at => column(at) !== column(x - 5));
}"""


def test_long_run_is_drawn_quickly_from_few_points(browser: Any, tmp_path: Path) -> None:
    """10,000 steps: no chart has more points than a screen can show, and drawing all of them is cheap."""
    run = make_eventful_run(tmp_path / "run", steps=10_000)
    for kind in ("page", "report"):
        with opened(kind, browser, run) as seen:
            assert int(seen.page.get_attribute("#loss", "data-points")) == POINTS
            assert len(column(seen, "loss", "held-out")) == POINTS
            told = point_at(seen, "loss", 5000)["loss"]
            assert " to " in told, "the extremes of the steps behind a point"


def test_script_without_tokens_has_its_pace_and_only_what_it_measured(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{**step_line(n, 4), "weight": 4.0} for n in range(1, 21)]
    for line in lines:
        del line["tokens"]
    write_lines(run / "steps.jsonl", lines)
    with opened("page", browser, run) as seen:
        assert column(seen, "pace", "microbatches per second") == dict.fromkeys(range(1, 21), 16.0)
        speed = "document.getElementById('now-speed')"
        assert seen.page.evaluate(f"{speed}.previousElementSibling.textContent") == "Microbatches/s"
        assert seen.text("#now-speed") == "16"
        hidden = seen.page.evaluate("['speed', 'memory'].map(id => document.getElementById(id).hidden)")
        assert hidden == [True, True]
        assert seen.page.query_selector("#now-memory") is None
        assert "held-out" not in seen.text("#loss")


def test_tiles_have_one_order_whenever_the_page_was_opened(browser: Any, tmp_path: Path) -> None:
    """The first held-out loss is recorded while one page is open; another page is opened afterwards."""
    run = make_run(tmp_path / "run")
    order = "[...document.querySelectorAll('#tiles dd')].map(value => value.id)"
    with opened("page", browser, run) as early:
        assert "now-heldout" not in early.page.evaluate(order)
        with open(run / "steps.jsonl", "a") as file:
            file.write(json.dumps(step_line(21, 3, heldout_loss=2.5)) + "\n")
        early.until("document.getElementById('now-heldout') != null")
        found = early.page.evaluate(order)
        assert found[:3] == ["now-step", "now-loss", "now-heldout"]
        with opened("page", browser, run) as late:
            late.until("document.getElementById('now-heldout') != null")
            assert late.page.evaluate(order) == found


@pytest.mark.guarantee("Monitoring", "The last frame of an open page is the state in which the run ended.")
def test_last_frame_of_an_open_page_is_the_end_of_the_run(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving_page(run) as server:
        seen = Seen(browser, f"http://127.0.0.1:{server.socket.getsockname()[1]}/")
        assert seen.text("#state") == "running"
        finish(run, [0, 2, 3])
        server.finish()
    seen.until("document.querySelector('#state').textContent == 'finished'")
    seen.until("document.querySelector('#link').textContent.startsWith('the job has ended')")
    assert seen.text("#legend").split("\n") == ["\u2713done: 3", "\u00d7gone: 1"]
    assert "off" not in (seen.page.get_attribute("#link", "class") or "")
    assert seen.errors == []
    seen.close()


def test_dead_ranks_leave_the_grid_and_stay_in_the_counts(browser: Any, tmp_path: Path) -> None:
    """A minute after the loss, by the clock of the run; the log of a dead rank can still be read."""
    run = make_run(tmp_path / "run", steps=40)
    (run / "ranks" / "1.log").write_text("last words")
    with opened("page", browser, run) as seen:
        assert seen.page.evaluate("document.querySelectorAll('#grid button').length") == 4
        with open(run / "steps.jsonl", "a") as file:
            file.writelines(json.dumps(step_line(n, 3)) + "\n" for n in range(41, 71))
        seen.until("document.querySelectorAll('#grid button').length == 3")
        assert "gone: 1" in seen.text("#legend")
        seen.page.select_option("#which", "1")
        seen.until("document.querySelector('#log').textContent == 'last words'")
