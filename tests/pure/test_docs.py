"""The documents tell the truth about names: tests, files and links that they mention exist; pages are complete."""

from __future__ import annotations

import ast
import re
import runpy
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
    """The changelog is exempt: it names files that are gone."""
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


def test_every_key_of_a_command_is_on_the_page_that_the_command_line_links_to() -> None:
    from recover_lab.simulate.question_words import WORDS
    from recover_lab.simulate.scenario import keys_of_scenario

    from recover.job.config_keys import describe
    from recover.train.config import Config

    reference = ROOT / "docs" / "reference"
    commands = (reference / "cli.md").read_text()
    assert "listed below" not in commands
    simulated = [*WORDS, *(key for key, *_ in keys_of_scenario())]
    for page, keys in (("keys.md", [key for key, *_ in describe(Config)]), ("simulate-keys.md", simulated)):
        assert f"({page})" in commands
        text = (reference / page).read_text()
        assert [key for key in keys if f"| `{key}` |" not in text] == []


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


def strings_of_the_package() -> str:
    """All string constants of recover/, with a gap where a value is inserted."""
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
