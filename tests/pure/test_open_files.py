"""Files that a script leaves open when its rank ends."""

from __future__ import annotations

from pathlib import Path

from recover.world.rank_exit import flush_open_files


def test_buffers_of_open_files_are_written_before_a_rank_exits(tmp_path: Path) -> None:
    """Text, bytes and both; a closed file is left alone."""
    text, raw = (tmp_path / "text").open("w"), (tmp_path / "raw").open("wb")
    both, closed = (tmp_path / "both").open("w+b"), (tmp_path / "closed").open("w")
    closed.close()
    try:
        text.write("a line")
        raw.write(b"bytes")
        both.write(b"both")
        assert (tmp_path / "text").stat().st_size == 0
        flush_open_files()
        assert (tmp_path / "text").read_text() == "a line"
        assert (tmp_path / "raw").read_bytes() == b"bytes"
        assert (tmp_path / "both").read_bytes() == b"both"
    finally:
        for each in (text, raw, both):
            each.close()
