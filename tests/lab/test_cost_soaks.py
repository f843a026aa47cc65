"""Costs of reading data and of monitoring, within wide bounds. Both sides of a ratio take turns in one run, so that
other load on the machine slows both down."""

from __future__ import annotations

import pytest
from recover_lab.bench.monitoring import bench_watch
from recover_lab.bench.reading import bench_data


@pytest.mark.soak
def test_stream_workers_keep_up_with_torch_dataloader() -> None:
    """In memory and with a slow dataset; a stream that does not read ahead takes several times as long."""
    results = bench_data("tiny", 2, 32, 4, 2, workers=2, turns=5, slow_ms=20.0, output=None)
    assert results["tokens_per_second"]["ours slow"]["n"] == 5
    assert results["ratios"]["in memory"]["value"] > 0.5
    assert results["ratios"]["slow"]["value"] > 0.5


@pytest.mark.soak
def test_open_page_and_prometheus_do_not_slow_steps_down() -> None:
    results = bench_watch("tiny", 2, seconds=2, turns=3, output=None)
    assert results["alone_ms"]["n"] >= 3 * 8
    assert results["watched_ms"]["n"] >= 3 * 8
    assert results["ratio"]["mean"] < 2
