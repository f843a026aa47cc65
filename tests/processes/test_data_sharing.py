"""Processes that share a corpus: they agree on every sample, and tokenise once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECOVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_data_processes_agree_on_every_sample() -> None:
    program = (
        "from recover.data import open_stream; s = open_stream(None, 'bytes', 64, 2, 7);"
        "print(s.description, [s[i]['tokens'].sum().item() for i in (0, 1, 10**9)])"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [run.communicate(timeout=PATIENCE)[0] for run in runs]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("the standard library of Python 3.")


def test_default_corpus_is_source_code_and_needs_no_torch() -> None:
    program = (
        "import sys; from recover.data import *; check_corpus(None, 'bytes', 128, 4, 64);"
        "assert b'def ' in open_corpus(None, 'bytes').tokens[:10000].tobytes(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_data_is_tokenised_once_by_many_ranks(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / name).write_text("x" * 1000)
    program = (
        "import sys; from recover.data import corpus, open_corpus; encode = corpus._encode\n"
        "def slow(*a):\n    import time; print('built'); time.sleep(0.5); yield from encode(*a)\n"
        "corpus._encode = slow; assert len(open_corpus(sys.argv[1], 'bytes').tokens) == 2002"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "texts")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert "".join(outputs) == "built\n"
