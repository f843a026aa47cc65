"""The code of a job that replicas may join: how it is recorded and compared, and what a difference leads to."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover.job import code
from recover.job.code import RECOVER, TORCH, Loaded, differences, file_digest
from recover.launch.hosts.slots import REFUSED, HostSlots
from recover.launch.job_code import FILE, HostCode, JobCode
from recover.world.rank_exit import End


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "loaded", {})
    monkeypatch.setattr("recover.launch.job_code.loaded", code.loaded)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


class Etcd:
    """An etcd with one key."""

    def __init__(self) -> None:
        self.value, self.version = b"", 0

    def read(self, _: Any) -> SimpleNamespace:
        found = [SimpleNamespace(value=self.value, version=self.version)] if self.version else []
        return SimpleNamespace(found=[found])

    def txn(self, guards: list[Any], writes: list[Any]) -> None:
        assert guards
        self.value, self.version = writes[0]["request_put"]["value"], self.version + 1


def make_package(place: Path) -> None:
    (place / "mypackage").mkdir()
    (place / "mypackage" / "__init__.py").write_text("from mypackage import data\n")
    (place / "mypackage" / "data.py").write_text("SIZE = 1\n")


def test_user_modules_are_recorded_as_they_are_loaded(tmp_path: Path) -> None:
    """Installed modules are not recorded, nor changes on disk after the import."""
    make_package(tmp_path)
    code.record()
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    importlib.import_module("mypackage")
    (tmp_path / "mypackage" / "data.py").write_text("SIZE = 2\n")
    importlib.import_module("json.tool")
    importlib.import_module("recover.policy.static")
    assert code.loaded.keys() == {RECOVER, TORCH, "mypackage", "mypackage.data"}
    assert code.loaded["mypackage.data"].digest == file_digest(b"SIZE = 1\n")
    assert code.loaded["mypackage.data"].path == str(tmp_path / "mypackage" / "data.py")


def test_code_difference_names_the_file_both_digests_and_the_remedy() -> None:
    job = {"train.py": "a" * 64, "mine": "b" * 64, RECOVER: "0.1.0 (x)", "lazy": "c" * 64}
    mine = {
        "train.py": Loaded("/there/train.py", "d" * 64),
        "mine": Loaded("/there/mine.py", "b" * 64),
        RECOVER: Loaded("", "0.2.0 (y)"),
        "other": Loaded("/there/other.py", "e" * 64),
    }
    assert differences(job, mine) == [
        "the version of recover is 0.2.0 (y), and this job was started with 0.1.0 (x); install that one or restart the "
        "job",
        "train.py differs from the version this job was started with (sha256 dddddddddddd vs aaaaaaaaaaaa); restore it "
        "or restart the job",
    ]


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A rejoining replica runs the code of the job or is refused by name before it asks, and a host with "
    "edited files starts none.",
)
def test_ranks_compare_with_the_code_of_the_job(tmp_path: Path) -> None:
    """The first rank of the job publishes the digests of its modules; modules that are loaded later are added, and
    none is replaced."""
    etcd = Etcd()
    first, later = (JobCode(etcd, tmp_path) for _ in range(2))  # type: ignore[arg-type]
    assert first.differs() == "", "nobody has said anything yet"
    code.loaded["train.py"] = Loaded(str(tmp_path / "train.py"), "a" * 64)
    first.publish(first=False)
    assert not etcd.version
    code.loaded["mine"] = Loaded(str(tmp_path / "mine.py"), "b" * 64)
    first.publish(first=True)
    assert json.loads(etcd.value) == {"train.py": "a" * 64, "mine": "b" * 64}
    assert later.differs() == ""
    code.loaded["train.py"] = Loaded(str(tmp_path / "train.py"), "c" * 64)
    assert later.differs().startswith(
        "train.py differs from the version this job was started with (sha256 cccc"
    )
    code.loaded["lazy"] = Loaded(str(tmp_path / "lazy.py"), "d" * 64)
    later.publish(first=True)
    assert json.loads(etcd.value) == {"train.py": "a" * 64, "mine": "b" * 64, "lazy": "d" * 64}
    # The file for the agent of the host: paths on this host, with the digests of the job.
    assert json.loads((tmp_path / FILE).read_text())["train.py"] == [str(tmp_path / "train.py"), "a" * 64]


def test_agent_detects_edits_and_their_reversal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("TARGET = 1.0\n")
    here = HostCode(tmp_path)
    assert here.differs() == "", "no rank has said anything yet"
    (tmp_path / FILE).write_text(json.dumps({"train.py": [str(script), file_digest(script.read_bytes())]}))
    assert here.differs() == ""
    script.write_text("TARGET = 5.00\n")
    assert here.differs().startswith("train.py differs")
    script.write_text("TARGET = 1.0\n")
    assert here.differs() == ""
    script.unlink()
    assert "sha256 missing vs" in here.differs()


def test_slots_of_refused_ranks_rest_until_the_code_is_restored() -> None:
    """The slot gets no strike, and replicas are not started in a busy loop; no slot of a host is free while its files
    differ."""
    slots = HostSlots(2, delay=0.0, forgive=60.0)
    slots.take(0, 0.0)
    marker = json.dumps({"end": str(End.REFUSED), "detail": "train.py differs"})
    for now in (1.0, 2.0, 3.0):
        assert slots.leave(0, marker, -9, now) == ""
    assert slots.free(4.0) == [1]
    assert slots.free(3.0 + REFUSED) == [0, 1]
    slots.hold("train.py differs")
    assert slots.free(3.0 + REFUSED) == []
    slots.hold("")
    assert slots.free(4.0) == [0, 1]
