"""Sessions of jobs whose processes were all killed: the next job removes them, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recover.launch import guardian, stale_sessions
from recover.launch.stale_sessions import remove_stale_sessions

NOBODY = 2**22 + 1  # no pid is larger than 2**22


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(stale_sessions, "say", said.append)
    return said


def a_session(place: Path, launcher: int = NOBODY) -> tuple[Path, Path]:
    """A session and its scratch directory, as a killed job leaves them."""
    session, scratch = place / f"recover-{launcher}-0a1b2c3d", place / f"recover-{launcher}-0a1b2c3d-tmp"
    os.close(guardian._make_session(str(session), str(scratch)))
    (session / "sm_segment.x").write_bytes(bytes(16_000_000))
    scratch.mkdir()
    (scratch / "file").touch()
    return session, scratch


@pytest.mark.parametrize("pid_in_use", [False, True])
def test_session_without_a_process_is_removed_with_its_scratch_directory(
    tmp_path: Path, said: list[str], pid_in_use: bool
) -> None:
    """The pid of its launcher may belong to another process now: in containers, launchers always have the same pid."""
    session, scratch = a_session(tmp_path, os.getpid() if pid_in_use else NOBODY)
    remove_stale_sessions([tmp_path, tmp_path / "nowhere"])
    assert not session.exists()
    assert not scratch.exists()
    assert said == [f"{session} (16.0 MB) was left by a job whose processes were all killed; removed it"]


@pytest.mark.parametrize("used", ["lock", "no lock", "rank", "another user", "link", "another name"])
def test_session_in_use_or_of_another_user_stays(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
    session, scratch = a_session(tmp_path)
    if used == "no lock":  # a session of an earlier version, perhaps of a job in another container
        (session / guardian.SCRATCH).unlink()
    lock = guardian.hold(str(session)) if used == "lock" else None
    if used == "rank":
        monkeypatch.setattr(guardian, "members", lambda name: [1] if name == str(session) else [])
    if used == "another user":
        monkeypatch.setattr(stale_sessions.os, "geteuid", lambda: os.getuid() + 1)
    if used in ("link", "another name"):
        moved = session.rename(tmp_path / "recover-elsewhere")
        if used == "link":
            session.symlink_to(moved)
        session = moved
    remove_stale_sessions([tmp_path])
    assert (session / "sm_segment.x").exists()
    assert scratch.exists()
    assert said == []
    if lock is not None:
        os.close(lock)


def test_scratch_directory_with_another_name_stays(tmp_path: Path, said: list[str]) -> None:
    """The file that names the scratch directory may be damaged."""
    session, scratch = a_session(tmp_path)
    precious = tmp_path / "precious"
    precious.mkdir()
    (session / guardian.SCRATCH).write_text(str(precious))
    remove_stale_sessions([tmp_path])
    assert (session.exists(), scratch.exists(), precious.exists()) == (False, True, True)


def test_session_that_cannot_be_removed_is_named(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = a_session(tmp_path)
    monkeypatch.setattr(stale_sessions.shutil, "rmtree", lambda *_, **__: None)
    remove_stale_sessions([tmp_path])
    assert said == [
        f"{session} (16.0 MB) was left by a job whose processes were all killed, and cannot be removed; check its "
        "permissions, and remove it"
    ]
