"""The page of guarantees is generated from markers on the tests, and is up to date."""

from __future__ import annotations

import ast
import functools
import textwrap
from pathlib import Path

import guarantees
import pytest
from guarantees import IN_PART, SOAK, Marker


@functools.cache
def found() -> list[Marker]:
    return guarantees.markers()


def test_guarantees_page_is_up_to_date() -> None:
    assert guarantees.PAGE.read_text() == guarantees.page(found()), "run `python tests/guarantees.py`"


def test_guarantee_markers_use_every_known_section_and_no_other() -> None:
    assert {one.section for one in found()} == guarantees.SECTIONS.keys()


def test_guarantee_sentences_are_unique_short_and_fit_a_table() -> None:
    """A sentence joins its tests to one row of the page, so it may stand in one section only."""
    rows = {(one.section, one.sentence) for one in found()}
    sentences = [sentence for _, sentence in rows]
    assert len(sentences) == len(set(sentences)) > 300
    assert [
        each for each in sentences if len(each.split()) > 35 or "|" in each or not each.endswith(".")
    ] == []


def test_guarantees_check_fails_for_a_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guarantees, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(guarantees, "markers", lambda: [Marker("The batch", "It holds.", "t::one", SOAK)])
    assert guarantees.main(["--check"]) == 1
    assert guarantees.main([]) == 0
    assert guarantees.main(["--check"]) == 0
    assert "| It holds. | `t::one` (soak) |\n" in guarantees.PAGE.read_text()
    guarantees.PAGE.write_text("edited by hand")
    assert guarantees.main(["--check"]) == 1
    assert guarantees.PAGE.read_text() == "edited by hand"
    assert "run `python tests/guarantees.py`" in capsys.readouterr().err


def test_guarantees_with_one_sentence_are_one_row() -> None:
    text = guarantees.page(
        [Marker("The batch", "It holds.", "t::one", ""), Marker("The batch", "It holds.", "t::two", IN_PART)]
    )
    assert "| It holds. | `t::one`, `t::two` (soak in part) |" in text
    with pytest.raises(ValueError, match=r"unknown sections of guarantees: \['Nowhere'\]"):
        guarantees.page([Marker("Nowhere", "It holds.", "t::one", "")])


@pytest.mark.parametrize(
    "arguments", ["", "()", "('The batch')", "('The batch', sentence)", "('The batch', '')"]
)
def test_guarantee_marker_without_two_strings_is_refused(arguments: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"@pytest.mark.guarantee{arguments}\ndef test_it(): ...\n")
    with pytest.raises(ValueError, match=r"t\.py:1: .* give a section and a sentence as string literals"):
        list(guarantees.markers_of(file, "t.py"))


def test_soak_marks_are_read_from_decorators_parameters_and_files() -> None:
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
    marks = guarantees.soak_marks(ast.parse(textwrap.dedent(text)))
    assert list(marks.values()) == ["", SOAK, SOAK, IN_PART, IN_PART]
    module = "pytestmark = [pytest.mark.soak]\ndef test_it(): ...\n"
    assert guarantees.soak_marks(ast.parse(module)) == {"test_it": SOAK}
