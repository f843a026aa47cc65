"""The documents tell the truth about names: tests, files and links that they mention exist; pages are complete."""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FILE = re.compile(r"`((?:recover|tests|examples|docs|tools)/[\w./-]*)(?:::\w+)?`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_docs_name_existing_tests(page: Path) -> None:
    for file, name in TEST.findall(page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{page.name}: there is no {file}::{name}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_docs_name_existing_files(page: Path) -> None:
    """A changelog tells of files that are gone."""
    missing = [path for path in FILE.findall(page.read_text()) if not (ROOT / path).exists()]
    assert missing == [], f"{page.name} names {missing}"


@pages
def test_docs_links_resolve(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue  # another site
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path or page.name} has no #{anchor}"


def documents() -> set[str]:
    return {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def test_docs_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {link.partition("#")[0] for link in LINK.findall(index)}
    assert documents() - listed == {"index.md"}


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without importing the functions that it names."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, suffix, _node: suffix)


def test_site_navigation_has_every_document() -> None:
    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        assert not isinstance(entries, str)
        return [leaf for each in entries for leaf in leaves(each)]  # type: ignore[attr-defined]

    site = yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)
    assert sorted(leaves(site["nav"])) == sorted(documents())


KINDS = ("*Tutorial", "*Guide", "*Reference", "*Explanation", "*Overview")


@pytest.mark.parametrize("page", sorted(documents()))
def test_document_names_its_kind_in_its_first_line(page: str) -> None:
    heading, empty, first = (ROOT / "docs" / page).read_text().splitlines()[:3]
    assert heading.startswith("# ")
    assert empty == ""
    assert first.startswith(KINDS), f"{page} begins with {first!r}, not with one of {KINDS}"


def test_generated_reference_is_up_to_date() -> None:
    generated = runpy.run_path(str(ROOT / "tools" / "generate_reference.py"))["pages"]()
    stale = [path.name for path, text in generated.items() if path.read_text() != text]
    assert stale == [], "run `make reference`"


def test_readme_is_short_and_shows_the_commands_first() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 1000
    first_screen = "\n".join(readme.splitlines()[:30])
    assert [
        word for word in ("make demo", "make test", "pip install", ".png") if word not in first_screen
    ] == []


def test_readme_diff_matches_the_examples() -> None:
    """Lines with + are in the ported script and nowhere else, lines with - in the plain one."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    before, after = (
        (ROOT / "examples" / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("plain_loop_before.py", "plain_loop.py")
    )
    for sign, lines, others in (("+", after, before), ("-", before, after)):
        shown = {line[1:] for line in diff.splitlines() if line[0] == sign} - {""}
        assert shown == set(lines) - set(others)


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
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()
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


def strings_of_the_package() -> str:
    """All text constants of recover/, with a gap where a value is put in."""
    found = []
    for file in (ROOT / "recover").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(found)


def test_troubleshooting_messages_exist_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [
        text
        for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
        for text in re.findall(r"`([^`]+)`", row)
    ]
    pieces = [piece.strip() for text in quoted for piece in text.split("...") if len(piece.strip()) > 5]
    assert len(pieces) > 30
    code = strings_of_the_package()
    assert [piece for piece in pieces if piece not in code] == []


def test_api_reference_renders_aligned_arguments_as_lists() -> None:
    with_lists = runpy.run_path(str(ROOT / "tools" / "griffe_arguments.py"))["with_lists"]
    docstring = (
        "Does it.\n\nworld:  from `init`\nclip:   limit of\n        the norm\n\n`size`: ranks\nMore: text."
    )
    assert with_lists(docstring) == (
        "Does it.\n\n- **`world`**: from `init`\n- **`clip`**: limit of\n  the norm\n\n- **`size`**: ranks\nMore: text."
    )
