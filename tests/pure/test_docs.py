"""The documents tell the truth about names: tests, files and links that they mention exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FILE = re.compile(r"`((?:recover|tests|examples|docs)/[\w./-]*)(?:::\w+)?`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_test_that_the_docs_name_exists(page: Path) -> None:
    for file, name in TEST.findall(page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{page.name}: there is no {file}::{name}"


@pages
def test_every_file_that_the_docs_name_exists(page: Path) -> None:
    missing = [path for path in FILE.findall(page.read_text()) if not (ROOT / path).exists()]
    assert missing == [], f"{page.name} names {missing}"


@pages
def test_every_link_in_the_docs_resolves(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue  # another site
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path or page.name} has no #{anchor}"


def test_the_index_lists_every_document() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    listed = {link for link in LINK.findall(index) if link.endswith(".md")}
    assert listed == {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} | {"../CONTRIBUTING.md"}
