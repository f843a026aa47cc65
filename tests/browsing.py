"""Pages in a real browser, and the page's server on a thread."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from left_out import leave_out
from patience import PATIENCE

from recover.runs.live.page_process import listen
from recover.runs.live.server import PageServer
from recover.runs.records.goodput import PARTS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def serving(run_dir: Path, token: str = "") -> Iterator[int]:
    """Serve the page of a run on loopback; yields the port."""
    with serving_page(run_dir, token) as server:
        yield server.socket.getsockname()[1]


@contextmanager
def serving_page(run_dir: Path, token: str = "") -> Iterator[PageServer]:
    server = PageServer(run_dir, listen(0), token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        leave_out("browser", f"none of {', '.join(BROWSERS)} is found; `apt-get install chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


class Seen:
    """An open page, its errors, and the addresses that it requested."""

    def __init__(
        self, browser: Any, url: str, width: int = 1600, scheme: str = "light", ready: str = "#now-step"
    ) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.errors: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url)
        self.until(f"document.querySelector('{ready}') != null")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, condition: str, seconds: float = PATIENCE) -> None:
        """Wait for a condition in JavaScript. The page's own rules forbid what playwright has for this: it evaluates
        text inside of the page."""
        for _ in range(int(20 * seconds)):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never so: {condition}; it shows {self.text('body')}")

    def parts(self) -> dict[str, str]:
        rows = {name: self.page.query_selector(f"#part-{name} td:nth-child(2)") for name in PARTS}
        return {name: row.text_content() for name, row in rows.items() if row}

    def close(self) -> None:
        self.page.close()
