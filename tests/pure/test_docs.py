"""The documents tell the truth about names: tests, files and links that they mention exist."""

from __future__ import annotations

import ast
import re
import textwrap
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


SOAK, IN_PART = "*soak:* ", "*soak in part:* "
ROW = re.compile(r"^\| (?!guarantee \||---)(.+) \| (.+) \|$", re.MULTILINE)
MARKED = re.compile(r"(\*soak(?: in part)?:\* )?`(tests/[\w/]+\.py)::(\w+)`( \(soak\))?")


def is_soak(node: ast.AST) -> bool:
    """Whether an expression is `pytest.mark.soak`, or a list that holds it."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(map(is_soak, node.elts))
    return ast.unparse(node) == "pytest.mark.soak"


def soak_marks(file: Path) -> dict[str, str]:
    """By test of a file: how the page marks it, going by its decorators and the `pytestmark` of its file."""
    tree = ast.parse(file.read_text())
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    whole_file = "pytestmark" in values and is_soak(values["pytestmark"])

    def parameters(decorator: ast.expr) -> list[bool]:
        """Of those that a decorator gives: whether each is a soak."""
        if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != "pytest.mark.parametrize":
            return []
        given = decorator.args[1]
        given = values.get(given.id, given) if isinstance(given, ast.Name) else given
        each = given.elts if isinstance(given, ast.List | ast.Tuple) else []
        return [
            isinstance(one, ast.Call)
            and any(key.arg == "marks" and is_soak(key.value) for key in one.keywords)
            for one in each
        ]

    marks = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            soaks = [parameters(decorator) for decorator in node.decorator_list]
            whole = whole_file or any(map(is_soak, node.decorator_list)) or any(s and all(s) for s in soaks)
            marks[node.name] = SOAK if whole else IN_PART if any(map(any, soaks)) else ""
    return marks


def test_guarantees_are_marked_as_soaks_where_their_tests_are() -> None:
    """What `make test` does not run may not look as if it did; and every guarantee names a test itself."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    rows = ROW.findall(page)
    assert len(rows) > 300
    assert [what for what, tests in rows if not re.search(r"`tests/|`recover |\]\(", tests)] == []
    wrong = [
        f"{file}::{name} is marked {mark or 'as none'!r}, and is {soak_marks(ROOT / file)[name] or 'none'!r}"
        for mark, file, name, _ in MARKED.findall(page)
        if mark != soak_marks(ROOT / file)[name]
    ]
    assert wrong == []


def test_soak_marks_are_read_from_decorators_parameters_and_files(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    some = "pytest.param(1, marks=pytest.mark.soak)"
    text = f"""
    KINDS = [1, {some}]
    def test_none(): ...
    @pytest.mark.soak
    def test_whole(): ...
    @pytest.mark.parametrize('x', [{some}, {some}])
    def test_all_parameters(): ...
    @pytest.mark.parametrize('x', [1, {some}])
    def test_part(): ...
    @pytest.mark.parametrize('x', KINDS)
    def test_part_by_name(): ...
    """
    file.write_text(textwrap.dedent(text))
    assert list(soak_marks(file).values()) == ["", SOAK, SOAK, IN_PART, IN_PART]
    file.write_text("pytestmark = [pytest.mark.soak]\ndef test_it(): ...\n")
    assert soak_marks(file) == {"test_it": SOAK}
