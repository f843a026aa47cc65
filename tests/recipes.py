"""Assembles the scripts of `examples/recipes` from the pages of `docs/guides/recipes`, and runs them.

    python tests/recipes.py    writes examples/recipes/*.py

The page index.md has the base script. Each Python block of another page begins with a comment that is a line of the
base script, and stands in its place; a block that is the head of a `while` loop replaces the head of that loop.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).parents[1]
PAGES, EXAMPLES = ROOT / "docs" / "guides" / "recipes", ROOT / "examples" / "recipes"
RECIPES = (
    "ema",
    "best-checkpoint",
    "token-schedules",
    "early-stopping",
    "generation",
    "streaming",
    "weights-and-biases",
    "lora",
)
PLACES = ("# model", "# state", "# after each step", "# save", "# after the loop")


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def commands(page: str) -> list[str]:
    """The commands that try a recipe."""
    return [line for block in blocks(page, "") for line in block.splitlines()]


def example(page: str) -> Path:
    return EXAMPLES / f"{'base' if page == 'index' else page.replace('-', '_')}.py"


def assemble(*pages: str, more: str = "") -> str:
    """The base script with the blocks of these pages; `more`: another block. Of several heads of the loop, the last one
    counts."""
    (script,) = blocks("index", "python")
    lines = script.splitlines()
    given = [block for page in pages for block in blocks(page, "python")]
    for block in [*given, *[more] * bool(more)]:
        code = textwrap.dedent(block).splitlines()
        if code[0].startswith("while "):
            (head,) = (number for number, line in enumerate(lines) if line.startswith("while "))
            lines[head : head + 1] = code
            continue
        (place,) = (number for number, line in enumerate(lines) if line.strip() == code[0])
        assert code[0] in PLACES, code[0]
        indent = lines[place].removesuffix(code[0])
        rest = [indent + line if line else "" for line in code[1:]]
        above = ["", ""] if re.match(r"@|def |class ", code[1]) else []
        below = ["", ""] if not indent and rest[-1].startswith(" ") else []
        lines[place:place] = [*above, *rest, *below]
    return "\n".join(line for line in lines if line.strip() not in PLACES).rstrip("\n") + "\n"


def script_of(page: str) -> str:
    """The example of a page, as its file must be."""
    title = (PAGES / f"{page}.md").read_text().splitlines()[0].removeprefix("# ")
    told = "with the blocks of that page; `python tests/recipes.py` writes this file."
    if page == "index":
        title, told = "The script that the recipes change", "`python tests/recipes.py` writes this file."
    else:
        told = f"The script of docs/guides/recipes/index.md {told}"
    text = assemble(*[page] * (page != "index"))
    return f'"""{title} (docs/guides/recipes/{page}.md).\n\n    {commands(page)[0]}\n\n{told}\n"""\n\n{text}'


Told = dict[str, list[float]]
# Two members wait for the replica that joins, so that it is there before they die.
WAIT_FOR_JOIN = """# after each step
if step.index == 21:
    while max(world.replicas) < 2 and not world.asking:
        time.sleep(0.01)
"""


def run_script(place: Path, script: str, options: Sequence[str] | None = None, **environment: str) -> Told:
    """Run a script in `place`, in one process, or with these options of `recover run`.

    Returns the numbers that it printed: of `step 5 best 1.5 of step 3`, [1.5, 3] under "step 5 best".
    """
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(script)
    launch = [] if options is None else ["-P", "-m", "recover.cli", "run", *options]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
    done = subprocess.run(
        [sys.executable, *launch, "train.py"],
        cwd=place,
        env={**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    told: Told = {}
    for name, values in re.findall(
        r"^(?:\[rank \d+\] )?(step \d+ [a-z]+|adapters) (.*)$", done.stdout, re.MULTILINE
    ):
        numbers = [float(number) for number in re.findall(r"[\d.]+", values)]
        assert told.setdefault(name, numbers) == numbers, (
            f"{name} was printed twice and differs\n{done.stdout}"
        )
    return told


def pace(script: str, steps: int = 40, seconds: float = 0) -> str:
    """The script with another number of steps, and another pace."""
    assert script.count("STEPS, EVERY, PAD = 40,") == script.count("PACE = 0.2 ") == 1
    return script.replace("PAD = 40,", f"PAD = {steps},").replace("PACE = 0.2 ", f"PACE = {seconds} ")


if __name__ == "__main__":
    EXAMPLES.mkdir(exist_ok=True)
    for page in ("index", *RECIPES):
        example(page).write_text(script_of(page))
