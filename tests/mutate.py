"""Breaks the code on purpose, one mutant at a time, and shows which test notices. Run by `make mutants`.

A mutant is data (`tests/mutants/*.toml`): a file, a piece of it, the text that replaces it, and the tests that must
then fail. Each is applied to a copy of the tree, so nothing here changes and several may run at once.

    python tests/mutate.py                 all of them
    python tests/mutate.py evict ledger    those whose name holds one of the words
    python tests/mutate.py --jobs 8        so many at a time
    python tests/mutate.py --shard 2/4     the second quarter of them

Mutants that change nothing on this kind of machine are named and left out. Tests that start no process run in forks
of one process that has imported torch; all others run in a pytest of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds for the tests of one mutant: a broken protocol may hang, which is also a way to notice
GRACE = 60  # seconds for pytest to end the jobs of a test that hangs
CAUGHT, HUNG = "caught", "caught (hung)"
TESTS_FAILED = 1  # pytest's exit code; others mean that it could not run the tests
# Tests with other trainers' packages have an environment of their own (make test-integrations).
APART = "tests/integrations/"
INTEGRATIONS = str(ROOT / ".venv-integrations" / "bin" / "python")
WITHOUT_PROCESSES = ("tests/pure/", "tests/simulated/")
# Packages whose import takes longer than most tests. None of this repository: each fork imports its own tree.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "hypothesis", "pydantic", "pytest", "rich"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Mutant:
    name: str
    why: str
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...]
    only_on: str = ""  # the machine, as `platform.machine()` names it, on which it changes what the code does

    def applied_to(self, text: str) -> str:
        """The broken file. The piece must be there exactly once: a mutant that hits nothing proves nothing."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"mutant {self.name}: its piece of {self.file} is there {count} times, not once")
        return text.replace(self.before, self.after)


def mutants() -> Iterator[Mutant]:
    for path in sorted((ROOT / "tests" / "mutants").glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            pieces = {key: entry.pop(key).strip("\n") for key in ("before", "after")}
            yield Mutant(**entry | pieces | {"caught_by": tuple(entry["caught_by"])})


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count` parts of the list of mutants, counted from 1.

    Mutants are dealt in turn, so that the slow ones of a file do not all fall into one part.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(
                f"shard {text!r} is not i/n with 1 <= i <= n; give 2/4 for the second of four parts"
            )
        return cls(int(number), int(count))

    def of(self, all_mutants: Sequence[Mutant]) -> list[Mutant]:
        return list(all_mutants[self.number - 1 :: self.count])


def outcomes(mutant: Mutant) -> dict[str, str]:
    """By test: what `run` says of it while the mutant is applied."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        tree = Path(place)
        for name in ("recover", "tools", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, tree)
        target = tree / mutant.file
        target.write_text(mutant.applied_to(target.read_text()))
        return {test: run(test, tree) for test in mutant.caught_by}


def run(test: str, tree: Path, limit: float = LIMIT) -> str:
    """CAUGHT if the test fails in this tree, HUNG if it does not end; otherwise what it did instead.

    No process that it started remains.
    """
    log = tree / "pytest.log"
    how = run_in_a_fork if test.startswith(WITHOUT_PROCESSES) else run_in_a_process
    code = how(pytest_arguments(test), tree, log, limit)
    if code is None:
        return HUNG
    if code == TESTS_FAILED:
        return CAUGHT
    last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
    return f"SURVIVES (exit code {code}: {last})"


def pytest_arguments(test: str) -> list[str]:
    return ["-x", "-m", "soak or not soak", "-p", "no:cacheprovider", test]


def run_in_a_fork(arguments: list[str], tree: Path, log: Path, limit: float) -> int | None:
    """The exit code of pytest, or None if it did not end."""
    fork = FORKS.Process(target=pytest_in, args=(arguments, tree, log))
    fork.start()
    fork.join(limit)
    if fork.exitcode is None:
        fork.kill()
        fork.join()
        return None
    return fork.exitcode


def pytest_in(arguments: list[str], tree: Path, log: Path) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(tree)
    installed = [
        place for place in sys.path if not Path(place).is_relative_to(ROOT) or "site-packages" in place
    ]
    sys.path[:] = [str(tree), str(tree / "tools"), *installed]
    sys.exit(int(pytest.main(arguments)))


def run_in_a_process(arguments: list[str], tree: Path, log: Path, limit: float) -> int | None:
    """The exit code of pytest, or None if it did not end. Ends all processes of its tests."""
    python = INTEGRATIONS if arguments[-1].startswith(APART) else sys.executable
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tools'}"}
    # A file, not a pipe: a rank that outlives pytest would hold the pipe open, and its reader would wait for it.
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-m", "pytest", *arguments],
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest ends the jobs of the test
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        kill_all_of(tree)
        process.wait()


def kill_all_of(tree: Path) -> None:
    """Kills pytest and everything below it, by the tree in their environment: launchers, ranks and etcd have
    sessions of their own, and a process group would not hold them."""
    while found := [int(path.name) for path in Path("/proc").glob("[0-9]*") if _belongs(path, tree)]:
        for pid in found:  # and look again: it may have forked meanwhile
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _belongs(process: Path, tree: Path) -> bool:
    try:
        return os.fsencode(tree) in (process / "environ").read_bytes()
    except OSError:  # ended meanwhile, or of another user
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--shard", type=Shard.parse, default=Shard(), metavar="I/N", help="only part I of N")
    options = parser.parse_args()
    named = [m for m in mutants() if not options.words or any(word in m.name for word in options.words)]
    if not named:
        parser.error(f"no mutant's name holds any of {options.words}")
    here = [m for m in named if m.only_on in ("", platform.machine())]
    for mutant in named:
        if mutant not in here:
            print(f"{mutant.name:<48} left out: it changes nothing but on {mutant.only_on}")
    chosen = options.shard.of(here)
    if not Path(INTEGRATIONS).exists() and any(
        test.startswith(APART) for mutant in chosen for test in mutant.caught_by
    ):
        # In another environment these tests fail whatever the code does.
        parser.error(
            f"mutants of tests/integrations need {INTEGRATIONS}; run `make mutants`, which installs it"
        )
    survivors = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, by_test in zip(chosen, pool.map(outcomes, chosen), strict=True):
            survivors += any(outcome not in (CAUGHT, HUNG) for outcome in by_test.values())
            for test, outcome in by_test.items():
                print(f"{mutant.name:<48} {outcome:<8} {test}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
