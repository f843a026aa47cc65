"""The recipe for Muon + AdamW, as its page shows it: through a death, and against the plain loop of the page."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from worlds import run_world

ROOT = Path(__file__).parents[2]
PAGE, SCRIPT = ROOT / "docs/guides/recipes/muon-adamw.md", ROOT / "examples/muon_adamw.py"


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.mark.guarantee(
    "User code", "The recipe for Muon + AdamW trains as its plain loop does, through the death of a replica."
)
def test_muon_recipe_matches_the_plain_loop_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_step, plain = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = SCRIPT.read_text()
    assert with_step in script, "the page shows other lines than the example has"
    monkeypatch.chdir(tmp_path)  # the example writes its checkpoints there
    outcome = run_world(str(SCRIPT), tmp_path / "run", 2, kills=["4:1:in-reduce"])
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("step 20 loss") == 1, outcome.output
    before, _, _ = script.replace("world = recover.init()\n", "").partition("step = recover.Step(")
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(before + plain, "plain.py", "exec"), {"__name__": "plain"})
    right = losses_in(said.getvalue())
    assert len(right) == 20
    assert right[-1] < 0.8 * right[0]
    assert losses_in(outcome.output) == pytest.approx(right, rel=1e-3)
