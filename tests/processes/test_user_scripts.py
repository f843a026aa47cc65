"""A user's script is a job: shown as it runs, recorded, reported on; and it works alone on a desktop, too."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import Job
from patience import PATIENCE
from worlds import run_world

from recover.runs.report import build

STEP = """
import os, sys
import torch
import recover
world = recover.init()
model = torch.nn.Linear(2, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=3)
while step.index < 2:
    for batch in step.microbatches([torch.ones(1, 2) * i for i in range(6)]):
        step.backward(model(batch).sum())
    print("step", step.index, "of", world.members, step.all_samples)
print("MPI" if "mpi4py" in sys.modules else "no MPI")
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.guarantee(
    "User code", "A user's own script is monitored, recorded by any survivor and reported."
)
@pytest.mark.guarantee(
    "User code",
    "Every rank has `LOCAL_RANK`, its index on its host, under every launcher and after a restart.",
)
def test_own_script_is_monitored_recorded_and_reported(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = run_world("own_script.py", run_dir, 3, kills=["3:0:update", "5:2:vote"])
    assert outcome.code == 0, outcome.output
    told = outcome.output.splitlines()

    # Shown as it happens: each death, and each repair with the step that it was committed in.
    for word in (
        "lost rank 0: killed",
        "lost rank 2: killed",
        "step 4: lost replica 0",
        "step 8: lost replica 2",
    ):
        assert any(line.startswith(f"recover: {word}") for line in told), (word, outcome.output)
    assert told[-1].startswith("recover: done on rank 1; lost: ranks 0, 2 killed")
    assert all(line.startswith(("[rank ", "recover: ")) for line in told if line), outcome.output
    assert "[rank 1] step 6 loss" in outcome.output
    assert "[rank 1] bar 6/6" in outcome.output
    assert "[rank 1] launched by []" in outcome.output
    assert all(f"[rank {rank}] local rank {rank}" in told for rank in range(3)), outcome.output
    assert outcome.output.count("breakpoint() is left out") == 3  # once by each rank
    assert "`recover run -n 1 own_script.py`" in outcome.output

    # Recorded: by one survivor after the other, each step once, the second Step's after the first one's.
    steps, incidents = lines(run_dir / "steps.jsonl"), lines(run_dir / "incidents.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 10))
    assert [line.get("own_step") for line in steps] == [None] * 3 + [1, 2, 3, 4, 5, 6]
    assert {line["microbatches"] for line in steps} == {6}
    assert {line["weight"] for line in steps} == {12.0}
    assert [line["lr"] for line in steps] == [0.1] * 3 + [0.05] * 6
    assert [(line["step"], line["dead_ranks"]) for line in incidents] == [(4, [0]), (8, [2])]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["failures"], summary["replicas_end"]) == (9, 2, 1)
    assert "step 9: loss" in (run_dir / "ranks" / "1.log").read_text()
    assert "step 6 loss" in (run_dir / "ranks" / "1.out").read_text()
    assert len((run_dir / "my.log").read_text().splitlines()) == 3 * 3 - 1 + 2 * 4 + 2

    page = build([run_dir], tmp_path / "report").read_text()
    assert "9 steps, every one on exactly 6 microbatches, 2 of 3 replicas lost" in page
    assert "Replica 2 was lost in step 8" in page


@pytest.mark.guarantee(
    "User code",
    "`python train.py` is a world of one without launcher and MPI, and is refused under a foreign launcher.",
)
def test_plain_python_is_a_world_of_one_without_launcher_and_mpi(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEP + "if len(sys.argv) > 1: raise KeyError('mine')\n")
    for words, code in (((), 0), (("raise",), 1)):
        run_dir = tmp_path / f"run{code}"
        run_dir.mkdir()
        done = subprocess.run(
            [sys.executable, str(tmp_path / "train.py"), *words],
            env=os.environ | {"RECOVER_RUN_DIR": str(run_dir)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == code, done.stderr
        expected = ["step 1 of (0,) [0, 1, 2]", "step 2 of (0,) [3, 4, 5]", "no MPI"]
        assert done.stdout.splitlines() == expected
        assert done.stderr.startswith("recover: no launcher has started this process: it is a world of one")
        assert "`recover run -n RANKS train.py`" in done.stderr
        assert ("\nTraceback" in done.stderr) == bool(code)  # as any script shows it
        assert [line["step"] for line in lines(run_dir / "steps.jsonl")] == [1, 2]
        assert (run_dir / "summary.json").exists() == (not code)


class Terminal:
    """`recover run` on a terminal of its own, 100 columns wide."""

    def __init__(self, place: Path, script: str, *words: str) -> None:
        (place / "script.py").write_text(script)
        self._end, slave = pty.openpty()
        command = [sys.executable, "-m", "recover.cli", "run", "--run-dir", str(place / "run"), *words]
        self._process = subprocess.Popen(
            [*command, str(place / "script.py")],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"COLUMNS": "", "TERM": "xterm"},
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, words: str) -> None:
        """Read until the screen shows these words."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self._end], [], [], 0.1)[0]:
                self.text += os.read(self._end, 1 << 16).decode()

    def finish(self) -> int:
        code = None
        deadline = time.monotonic() + PATIENCE
        while code is None and time.monotonic() < deadline:
            code = self._process.poll()
            try:
                while select.select([self._end], [], [], 0.05)[0]:
                    self.text += os.read(self._end, 1 << 16).decode()
            except OSError:  # the last process has closed it
                pass
        self._process.kill()
        self._process.wait()
        os.close(self._end)
        assert code is not None, self.text
        return code


@pytest.mark.guarantee("User code", "A single rank owns the terminal, and its debugger works.")
@pytest.mark.guarantee(
    "User code",
    "Every rank has `LOCAL_RANK`, its index on its host, under every launcher and after a restart.",
)
def test_single_rank_owns_the_terminal_and_its_debugger_works(tmp_path: Path) -> None:
    terminal = Terminal(
        tmp_path,
        "import os, sys\nname = input('name? ')\nbreakpoint()\n"
        "print('hello', name, sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())\n"
        "print('local rank', os.environ['LOCAL_RANK'])\n",
        "-n",
        "1",
    )
    terminal.until("name? ")
    terminal.type("Ada\n")
    terminal.until("(Pdb)")
    terminal.type("p 'the answer is %d' % (6 * 7)\n")
    terminal.until("the answer is 42")
    terminal.type("c\n")
    assert terminal.finish() == 0, terminal.text
    assert "hello Ada True True True" in terminal.text
    assert "local rank 0" in terminal.text
    assert "never called recover.init()" in terminal.text


@pytest.mark.guarantee(
    "The launcher",
    "Ranks that compute for some time without `recover.init()` or a `recover.Step` are reported while they run, "
    "and a script without a Step at its end.",
)
def test_script_with_a_world_and_no_step_is_told_at_its_end(tmp_path: Path) -> None:
    job = Job(tmp_path, "import recover\nworld = recover.init()\nprint('trained')\n", "-n", "2")
    assert job.finish() == 0, job.stderr
    assert (
        job.stderr.count("script.py has ended and made no recover.Step: each of its 2 rank(s) ran by itself")
        == 1
    )


@pytest.mark.guarantee(
    "User code",
    "Output of ranks arrives whole, in order and labelled, and progress bars are redrawn in place.",
)
def test_several_ranks_draw_on_the_terminal(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom recover.job import process\nfrom rich.progress import track\n"
        "if process.rank() == 1:\n"
        "    for _ in track(range(5), 'drawn'): time.sleep(0.05)\n"
        "else:\n"
        "    print(sys.stdout.isatty(), sys.stdin.isatty(), flush=True)\n"
    )
    terminal = Terminal(tmp_path, script, "-n", "2")
    assert terminal.finish() == 0, terminal.text
    assert "[rank 0] True False" in terminal.text
    assert "[rank 1] drawn" in terminal.text
    assert "100%" in terminal.text
    assert "\x1b[" in terminal.text  # colours and the cursor's moves, as rich has them on a terminal


def test_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("word = 'from beside it'")
    (package / "__main__.py").write_text(
        "import sys\nfrom mine.other import word\nfrom . import other\n"
        "print(word, sys.argv[1:], __name__, __package__, __spec__.name, __file__ == sys.argv[0])\n"
    )
    for name, spec in (("mine", "mine.__main__"), ("mine.__main__", "mine.__main__")):
        command = [sys.executable, "-m", "recover.cli", "run", "-n", "1", "-m", name, "--run-dir", "x"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"from beside it ['--run-dir', 'x'] __main__ mine {spec} True\n"
    command[-3:] = ["absent.module"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "-m absent.module: there is no module absent (looked from" in done.stderr


def test_stdin_reaches_a_single_rank_whose_output_is_unprefixed(tmp_path: Path) -> None:
    job = Job(tmp_path, "print('unlabelled'); raise ValueError('plainly')", "-n", "1")
    assert job.finish() == 1
    assert job.stdout == "unlabelled\n"
    assert job.stderr.startswith("Traceback")
    assert "rank 0 raised: ValueError: plainly" in job.stderr.splitlines()[-1]
    command = [sys.executable, "-m", "recover.cli", "run", "-n", "1", "--run-dir", str(tmp_path / "piped")]
    (tmp_path / "echo.py").write_text("print(input().upper())")
    done = subprocess.run(
        [*command, str(tmp_path / "echo.py")],
        input="words\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "WORDS\n"), done.stderr


SPENDING = """
import sys, time
import torch
import recover
world = recover.init()
model = torch.nn.Linear(2, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=4)
for _ in range(4):
    for batch in step.microbatches([torch.ones(1, 2) * i for i in range(16)]):
        step.backward(model(batch).sum())
        time.sleep(0.05)
    time.sleep(0.2)
    if step.index == 2:
        recover.save(step, sys.argv[1])
        step.on_first(time.sleep, 0.3)
        time.sleep(0.1)
        step.record_heldout_loss(1.0)
"""


@pytest.mark.guarantee(
    "Monitoring",
    "Goodput of a script does not count what the script does between two steps, nor its checkpoints and evaluations.",
)
def test_goodput_of_a_script_leaves_out_sleep_checkpoint_and_evaluation(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SPENDING)
    command = [
        sys.executable,
        "-m",
        "recover.cli",
        "run",
        "-n",
        "2",
        "--page",
        "off",
        "--run-dir",
        str(run_dir),
    ]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "saved")], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    spent = [
        tuple(line.get(f"{part}_ms", 0.0) for part in ("checkpoint", "evaluation", "outside"))
        for line in lines(run_dir / "steps.jsonl")
    ]
    # Each replica runs two microbatches a step.
    assert all(outside >= 100 + 200 * (number > 0) for number, (_, _, outside) in enumerate(spent)), spent
    assert [checkpoint > 0 for checkpoint, _, _ in spent] == [False, False, True, False], spent
    assert [evaluation >= 400 for _, evaluation, _ in spent] == [False, False, True, False], spent
    told = json.loads((run_dir / "summary.json").read_text())["goodput"]
    assert sum(told["parts_ms"].values()) == told["total_ms"]
    assert told["parts_ms"]["outside"] >= 2 * (4 * 100 + 3 * 200)
    assert told["parts_ms"]["evaluation"] >= 2 * 400
    assert told["parts_ms"]["checkpoint"] > 0
