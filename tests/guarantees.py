"""Writes the page of guarantees from the `guarantee` markers of the tests.

    python tests/guarantees.py           writes docs/explanation/guarantees.md
    python tests/guarantees.py --check   exits 1 if that page is out of date

A test that proves a guarantee has the decorator `@pytest.mark.guarantee(section, sentence)`. Tests with the same
section and sentence make up one row of the page. Test files are parsed and not imported, so that the page does not
depend on installed packages.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/guarantees.md"
SOAK, IN_PART = " (soak)", " (soak in part)"

# Sections in the order of the page, each with the sentence below its heading.
SECTIONS = {
    "The batch": "",
    "Joining": "",
    "Leaving": "",
    "The trajectory": "",
    "Work kept after a death": "",
    "Paced shares": "",
    "Replay": "",
    "Membership": "",
    "On etcd": "The fabric of [etcd.md](etcd.md), on a real etcd.",
    "Strangers": "",
    "State and samples": "",
    "Verified gradients": "",
    "Trained parameters": "",
    "Sharded replicas (HSDP)": "",
    "Grids (3D parallelism)": "",
    "The trainer": "",
    "On GPUs": "",
    "Faults, hangs and stragglers": "",
    "The launcher": "",
    "Several hosts": "On emulated hosts, which are real to the software.",
    "Emulated hosts": "Properties of the lab itself.",
    "Monitoring": "",
    "User code": "",
    "Simulated clusters": "The simulation of [scale.md](scale.md), in one process except for one soak.",
    "Published figures": "",
    "Rejoining replicas": "",
}

HEAD = """# Guarantees

*Explanation.* Each guarantee with the tests that check it. `python tests/guarantees.py` generates this
page from the `guarantee` markers of the tests; edit the markers, not the page.

The guarantees hold under the [assumptions](assumptions.md). Tests in `tests/processes`,
`tests/lab` and `tests/integrations` use real processes and SIGKILL, those in `tests/simulated`
virtual ranks in one process, and those in `tests/pure` start no process. `make test` runs all of
them except `tests/lab` and `tests/integrations` (`make test-integrations`) and tests marked "(soak)"
(`make soak`); "(soak in part)" means that some parameters of the test are soaks.
"""

LIMITS = """## Not guaranteed

- **Strangers that speak gloo's own format** while a group is created: [assumptions](assumptions.md#strangers).
- **Fencing of hung ranks across hosts under Open MPI**: a rank that is alone on its host is not fenced.
- **Grids on GPUs**: tensor, pipeline and expert parallelism are tested on CPUs with gloo, and with NCCL on
  one GPU that all ranks share; one rank per GPU was not tested.
- **Joins on Open MPI**: the world keeps its size.
"""


@dataclass(frozen=True)
class Marker:
    """One `guarantee` marker: a test, and the sentence that it proves."""

    section: str
    sentence: str
    test: str  # as pytest names it, without parameters
    soak: str  # "", SOAK or IN_PART


def is_soak(node: ast.AST) -> bool:
    """Whether an expression is `pytest.mark.soak`, or a list that holds it."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(map(is_soak, node.elts))
    return ast.unparse(node) == "pytest.mark.soak"


def soak_marks(tree: ast.Module) -> dict[str, str]:
    """By function of a module: SOAK, IN_PART or "", from its decorators and the `pytestmark` of the module."""
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    whole_module = "pytestmark" in values and is_soak(values["pytestmark"])

    def parameters(decorator: ast.expr) -> list[bool]:
        """For each parameter set of a `parametrize` decorator: whether it is marked as a soak."""
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
            whole = whole_module or any(map(is_soak, node.decorator_list)) or any(s and all(s) for s in soaks)
            marks[node.name] = SOAK if whole else IN_PART if any(map(any, soaks)) else ""
    return marks


def markers_of(file: Path, name: str) -> Iterator[Marker]:
    """The markers in one test file, in their order; `name` is its path in test ids."""
    tree = ast.parse(file.read_text())
    soaks = soak_marks(tree)
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not ast.unparse(decorator).startswith("pytest.mark.guarantee"):
                continue
            given = decorator.args if isinstance(decorator, ast.Call) else []
            values = [each.value for each in given if isinstance(each, ast.Constant)]
            if len(values) != 2 or not all(isinstance(value, str) and value for value in values):
                raise ValueError(
                    f"{name}:{decorator.lineno}: {ast.unparse(decorator)} is not a guarantee;"
                    " give a section and a sentence as string literals"
                )
            section, sentence = map(str, values)
            yield Marker(section, sentence, f"{name}::{node.name}", soaks[node.name])


def markers(tests: Path = ROOT / "tests") -> list[Marker]:
    """All markers of the suite, by file and line."""
    files = sorted(tests.glob("*/**/test_*.py"))
    return [one for file in files for one in markers_of(file, f"tests/{file.relative_to(tests).as_posix()}")]


def page(found: Sequence[Marker]) -> str:
    """The page for some markers: one table per section, one row per sentence, in the order of the markers."""
    if unknown := sorted({one.section for one in found} - SECTIONS.keys()):
        raise ValueError(
            f"unknown sections of guarantees: {unknown}; add them to SECTIONS, or use {list(SECTIONS)}"
        )
    parts = [HEAD]
    for section, introduction in SECTIONS.items():
        rows: dict[str, list[str]] = {}
        for one in found:
            if one.section == section:
                rows.setdefault(one.sentence, []).append(f"`{one.test}`{one.soak}")
        if not rows:
            continue
        table = [f"| {sentence} | {', '.join(tests)} |" for sentence, tests in rows.items()]
        lines = ["| Guarantee | Tests |", "|---|---|", *table]
        parts.append(
            "\n".join([f"## {section}", "", *([introduction, ""] if introduction else []), *lines, ""])
        )
    return "\n".join([*parts, LIMITS])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Writes the page of guarantees from the markers of the tests."
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if the page is out of date; write nothing"
    )
    check = parser.parse_args(arguments).check
    text = page(markers())
    if not check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE} is out of date; run `python tests/guarantees.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
