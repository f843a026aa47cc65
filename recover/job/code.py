"""Digests of the code that this process runs: a replica that joins must run the same code as the
job.

Files are digested when they are loaded, since they may change on disk while the job runs: the
script by `bootstrap`, the user's modules (neither the standard library's, nor installed packages,
nor recover's own) by a finder in front of Python's own, recover's sources and the version of torch
when the process starts.
"""

from __future__ import annotations

import functools
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from recover.job.machine import version_of

SHOWN = 12  # characters of a digest
RECOVER, TORCH = "recover", "torch"
_PACKAGE = Path(__file__).parents[1]


class Loaded(NamedTuple):
    path: str  # "" for a package
    digest: str  # of a file; the version of a package


loaded: dict[str, Loaded] = {}  # by the name of a module, or that of the script's file


class _Recorder:
    """A finder that finds what Python's own finder finds, and records the user's modules."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            record_file(name, Path(spec.origin))
        return spec


def record() -> None:
    """Record modules that are loaded from now on, and the versions as they are now."""
    if _Recorder not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Recorder)
    record_versions()


def record_versions() -> None:
    """Record the versions of recover and torch on disk now, once, before anything of torch is imported."""
    if RECOVER not in loaded:
        loaded[RECOVER] = Loaded("", recover_version())
        loaded[TORCH] = Loaded("", version_of("torch"))


def record_file(name: str, path: Path, content: bytes | None = None) -> None:
    """Record a file of the user that is loaded now."""
    if name not in loaded and _is_users(path):
        try:
            content = path.read_bytes() if content is None else content
        except OSError:
            return  # the import reports it
        loaded[name] = Loaded(str(path), file_digest(content))


def recover_version() -> str:
    """The version of recover, with a digest of its sources: a version says little of a working copy."""
    return f"{version_of('recover')} ({digest_of(_sources())})"


def differences(job: Mapping[str, str], mine: Mapping[str, Loaded]) -> list[str]:
    """The differences between two records of loaded code, with the remedy; only modules in both are
    compared."""
    found = []
    for name in sorted(job.keys() & mine.keys()):
        theirs, (path, digest) = job[name], mine[name]
        if theirs == digest:
            continue
        if path:
            shown = Path(path).name if name == Path(path).name else f"module {name} ({path})"
            found.append(
                f"{shown} differs from the version this job was started with (sha256 {digest[:SHOWN]} vs "
                f"{theirs[:SHOWN]}); restore it or restart the job"
            )
        else:
            found.append(
                f"the version of {name} is {digest}, and this job was started with {theirs}; install that one or "
                "restart the job"
            )
    return found


def file_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:SHOWN]


def _sources() -> Iterable[bytes]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        yield path.relative_to(_PACKAGE).as_posix().encode()
        yield path.read_bytes()


def _is_users(path: Path) -> bool:
    return not any(path.is_relative_to(place) for place in _others_places())


@functools.cache
def _others_places() -> list[Path]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [Path(path) for path in {*paths, *site.getsitepackages(), site.getusersitepackages()}] + [_PACKAGE]
