"""One source for every figure: the documents have the figures of `docs/figures.json`, and runs write both."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from recover_lab.bench import suite
from recover_lab.bench.figures import FIGURES
from recover_lab.locations import CHECKOUT
from recover_lab.peers.scene import Scene
from recover_lab.publish.documents import FILE, ORIGIN, QUOTED, TABLE, fill, pages, publish, read

SCENE = Scene(replicas=4, kills=((3, 1),)).to_json()
SPREAD = {"median": 100.0, "low": 90.0, "high": 110.0, "n": 9}
PARTS = {"baseline": {"pieces": {"restart": 4.7}}, "ours": {"pieces": {"redo": 0.2}}}
COSTS = {**PARTS, "N": 2, "baseline_cost": 8.04, "ours_cost": 0.31, "step_seconds": 0.6}
LATER = {**COSTS, "N": 16, "baseline_cost": 12.0, "ours_cost": 0.4}
STEPS = {"steps": [{"microbatches": 16, "seconds": 0.6, "loss": 5.5}], "per_provisioned_rank": 50.0}
RESULTS: dict[str, Any] = {
    "verify": {
        "replicas": 4,
        "slots": 1,
        "batches": [
            {
                "batch": batch,
                "plain": 0.1,
                "verified": 0.125,
                "ratio": 1.25,
                "least": 1.2,
                "most": 1.3,
                "longest_share": 1.25,
            }
            for batch in (16, 256)
        ],
    },
    "paced": {
        "replicas": 2,
        "slow": [
            {
                "factor": 2,
                "ratio": 1.4,
                "low": 1.3,
                "high": 1.5,
                "optimum": 1.34,
                "shares": [[1, [3, 3]], [9, [4, 2]]],
            }
        ],
    },
    "trajectory": {
        "scene": SCENE,
        "runs": {
            "stock": {**STEPS, "effective_throughput": 100.0},
            "failure-free": {**STEPS, "effective_throughput": 99.0},
            "ours": {**STEPS, "effective_throughput": 98.0, "largest_distance": 2.4e-7},
            "adaptive": {**STEPS, "effective_throughput": 98.0, "largest_distance": 0.123},
        },
    },
    "breakdown": {"scene": SCENE, "rows": [COSTS, LATER]},
    "multi": {
        "scene": SCENE,
        "interval": 12,
        "ours": {
            "steps_of": {"4": 0.6},
            "intervals": [{"alive": 3, "effective_throughput": 90.0, "per_provisioned_rank": 70.0}],
        },
        "baselines": [
            {
                "save_every": 4,
                "ratios": [2.0],
                "intervals": [{"effective_throughput": 45.0}],
                "advantage": {"more": 0.5, "rank_seconds_ratio": 1.5},
            }
        ],
    },
    "sweep": {
        "scene": SCENE,
        "curves": [
            {"alive": n, "crossing_effective": None, "crossing_wall": 0.2, "paper": {"2.23 times": 0.9}}
            for n in (5, 4, 3)
        ],
        "measured": [{"alive": 5, "share": 0.5, "measured": 1.9, "predicted": 1.8}],
    },
    "peers": {
        "scene": SCENE,
        "systems": {
            "ours": {"seconds": 0.5, "microbatches": 16, "discarded": 0},
            "torchft Manager.allreduce": {"seconds": "not measured: no wheel"},
        },
    },
    "overhead": {
        "peer": "stock HSDP",
        "tokens_per_second": dict.fromkeys(("stock", "ours", "reproducible"), SPREAD),
        "peak_bytes": {"stock": 400 << 20, "ours": 410 << 20},
        "replicas": 2,
        "shard": 2,
        "parameters": 27_800_000,
        "ratio": {"value": 0.991, "low": 0.97, "high": 1.013},
        "reproducible_against_fast": {"value": 0.7},
        "reproducible_32_against_fast": {"value": 0.9},
        "extra_bytes_per_parameter": -0.5,
    },
    "recovery": {
        "replicas": 4,
        "recovery_ms": {"median": 123.4, "low": 100.0, "high": 150.0, "n": 15},
        "step_ms": SPREAD,
        "discarded": 0,
    },
    "repair": {
        "repair_ms": {"mpi": SPREAD | {"median": 77.0}, "gloo": SPREAD | {"median": 55.0}},
        "ranks": 8,
    },
    "collectives": {
        "collectives_ms": {
            str(ranks): {
                size: {"mpi carrier": {"median": 10.0}, "stock gloo": {"median": 15.0}}
                for size in ("25.0", "100.0")
            }
            for ranks in (2, 4)
        }
    },
    "simulate": {
        "rows": [
            {
                "gpus": 1024,
                "failures_per_second": {"restart": 9000.0, "recover-return": 7000.0},
                "peak_mib": 80.0,
                "asked": 3,
            }
        ],
        "whole": {"gpus": 1024, "days": 30, "seeds": 2, "systems": 3},
        "whole_seconds": 12.0,
        "whole_cpu_seconds": 20.0,
    },
    "hosts": {
        "agreement_ms": {"64": {"median": 8.0, "low": 7.0, "high": 9.0}},
        "agreement_own_ms": {"64": {"median": 4.0, "low": 3.0, "high": 5.0}},
        "step": {
            "2": {
                "parameters": 27_800_000,
                "milliseconds": {"stock": {"median": 500.0}, "ours": {"median": 505.0}},
                "ratio": {"value": 0.99, "low": 0.97, "high": 1.01},
            }
        },
        "kill": {
            "rank": {
                name: {"median": 90.0, "low": 80.0, "high": 100.0, "n": 9}
                for name in ("whole", "less_redone", "notice", "drain", "repair", "restore", "redo")
            },
            "step": {"median": 400.0},
        },
        "power_cut": {
            "systems": {
                "ours": {"seconds": 3.4, "microbatches": 6},
                "torchft": {"seconds": "not measured: no wheel"},
            }
        },
        "hosts": {"emulated": False, "why_not": "it needs root"},
    },
    "return": {
        "replicas": 3,
        "sizes": [
            {
                "bytes": 5e6,
                "bound": 0.15,
                **{
                    ours: {
                        name: {"median": 0.1, "low": 0.1, "high": 0.1}
                        for name in ("again", "whole", "wait", "stall", "repair", "transfer", "rest")
                    }
                    for ours in ("ours", "cold")
                },
                "restart": {"again": 9.0, "whole": 9.0, "wait": 8.0},
                "torchft": {"not_measured": "no wheel"},
            }
        ],
    },
    "returning": {
        "duels": [
            {
                "share": 1.2,
                "interval": 12,
                "ours": 9000.0,
                "restart": 4000.0,
                "ratio": 2.25,
                "away": [4.0, 5.0],
            }
        ],
        "calm_ratio": 0.99,
        "crossing": None,
    },
}


@pytest.mark.guarantee("Published figures", "Documents quote the figures file, and measurements reach both.")
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_documents_quote_the_figures_file(page: Path) -> None:
    text = page.read_text()
    assert fill(text, read()) == text, (
        f"{page.name} or docs/figures.json was edited alone; run `recover bench publish`"
    )


def test_edited_figure_is_detected_wherever_it_is_quoted() -> None:
    figures, quoted = read(), set()
    for page in pages():
        text = page.read_text()
        for found in QUOTED.finditer(text):
            quoted.add(found[2])
            other = text[: found.start(3)] + "9" + text[found.start(3) :]
            assert fill(other, figures) == text
        if TABLE.search(text):
            assert fill(TABLE.sub(r"\1nothing\n\4", text), figures) == text
    for name in quoted - {"origin"}:
        part, _, key = name.rpartition(".")
        edited = json.loads(json.dumps(figures))
        edited[part]["values"][key] += "9"
        assert any(fill(page.read_text(), edited) != page.read_text() for page in pages())


def test_benchmark_figures_are_never_entered_by_hand() -> None:
    page = (CHECKOUT / "docs" / "explanation" / "evaluation.md").read_text()
    rows = [line for line in page.splitlines() if "| `recover bench" in line[1:]]
    assert len(rows) >= 11
    readme = (CHECKOUT / "README.md").read_text()
    assert re.findall(r"\d[\d.]* m?s\b|\d\.\d+x", QUOTED.sub("", readme)) == []
    for row in rows:
        assert QUOTED.search(row), row
        assert "**" not in QUOTED.sub("", row).replace("****", ""), f"bold, and not from the file: {row}"


def test_evaluation_counts_match_the_tables_of_broken_runs() -> None:
    evaluation, faults, world = (
        (CHECKOUT / name).read_text()
        for name in (
            "docs/explanation/evaluation.md",
            "docs/explanation/campaigns.md",
            "docs/explanation/world.md",
        )
    )
    chaos = faults[faults.index("| where | seeds | runs |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[-4:-1]] for line in chaos.splitlines()[2:]]
    runs, struck, broken = (sum(int(row[n]) for row in rows) for n in range(3))
    assert f"{runs} runs, {struck} faults" in evaluation
    assert broken == 0
    assert set(re.findall(r"\d+ of \d+(?= cells held)", faults)) == {
        told.replace("**", "") for told in re.findall(r"\*\*(\d+ of \d+)\*\*(?= cells held)", evaluation)
    }
    bursts = re.findall(r"^\| `(?:mpi|gloo)` \| (\d+) \| (\d+) \| 0 \| 0 \|$", world, re.MULTILINE)
    totals = [sum(int(row[n]) for row in bursts) for n in (0, 1)]
    assert f"{totals[0]} bursts of 2 to 4 deaths within 15 ms, {totals[1]} deaths" in evaluation


def checkout(directory: Path) -> Path:
    """A directory with the documents and nothing else."""
    for page in [*pages(), CHECKOUT / FILE]:
        (directory / page.relative_to(CHECKOUT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, directory / page.relative_to(CHECKOUT))
    return directory


@pytest.mark.guarantee("Published figures", "Documents quote the figures file, and measurements reach both.")
def test_measured_figures_reach_every_document_that_quotes_them(tmp_path: Path) -> None:
    root, runs = checkout(tmp_path), tmp_path / "runs"
    runs.mkdir()
    origin = {
        "command": "recover bench all",
        "machine": {
            "cores": 64,
            "processor": "Abacus",
            "architecture": "oak",
            "torch": "9.9",
            "openmpi": "6.0",
        },
        "commit": "c0ffee",
        "sources": "5ea5e1de",
        "measured_at": "2030-01-01",
    }
    for name in suite.parts(long=False):
        part = name.partition("-")[0]
        content = RESULTS[part] if part in ("repair", "collectives") else {part: RESULTS[part]}
        (runs / f"{name}.json").write_text(json.dumps(origin | content))
    assert sorted(publish([runs], FIGURES, root)) == sorted(suite.parts(long=False))
    readme, world, evaluation = (
        QUOTED.sub(r"\3", (root / name).read_text())
        for name in ("README.md", "docs/explanation/world.md", "docs/explanation/evaluation.md")
    )
    assert "models on 64 cores (Abacus, oak), torch 9.9, Open MPI 6.0;" in readme
    assert "8.0 s to 12.0 s" in readme
    for words in (
        "**0.99x** its tokens/s (95% interval 0.97 to 1.01), no more memory",
        "**+50%**",
        "at most **2e-7** apart",
    ):
        assert words in evaluation
    assert "**123 ms** median" in evaluation
    assert "with `reduction_bits=32` **0.90x**" in evaluation
    assert (
        "| SIGKILL of a rank: to the commit, less what is computed again | 90.0 ms (80.0 to 100.0) |"
        in evaluation
    )
    assert "| 5 MB | ours | 0.10 s | 0.10 s | 100 ms | 150 ms |" in evaluation
    assert "| 2.25 times | 4.0 s, 5.0 s |" in evaluation
    assert "torchft's `Manager.allreduce` not measured: no wheel on ? of 16" in evaluation
    assert "| 4 | 100 | 10.0 | 15.0 |" in world
    assert "0.31 to 0.40 s; checkpoint-restart at its best (N = 2): 8.0 s" in evaluation
    figures = read(root)
    assert all(figures[name][key] == origin[key] for name in suite.parts(long=False) for key in ORIGIN)
    assert not any("carried_over" in each for each in figures.values())
    published = (root / FILE).read_text()
    publish([runs / "recovery.json"], FIGURES, root)
    assert (root / FILE).read_text() == published


GPU = {
    "card": "NVIDIA H200",
    "cards": 1,
    "nccl": "2.31.2",
    "replicas": 2,
    "step": {
        "1b": {
            "nccl": {
                "parameters": 1_056_000_000,
                "milliseconds": {
                    "alone": {"median": 303.0},
                    "stock nccl": {"median": 1554.0},
                    "ours": {"median": 1560.0},
                },
                "ours_against": {
                    "alone": {"value": 0.19, "low": 0.18, "high": 0.2},
                    "stock nccl": {"value": 0.996, "low": 0.98, "high": 1.01},
                },
                "peak_bytes": {"ours": 23 << 30},
            }
        }
    },
    "kill": {},
    "reduce": {
        "mpi": {"gigabytes_per_second": {"400": {"ours": {"median": 1.5}, "stock gloo": {"median": 1.1}}}}
    },
}


def test_gpu_page_has_a_table_only_if_gpus_were_measured(tmp_path: Path) -> None:
    root, run = checkout(tmp_path), tmp_path / "gpu.json"
    page = root / "docs" / "guides" / "gpu.md"
    figures = read(root)
    table = TABLE.search(page.read_text())
    assert table is not None
    without = {name: each for name, each in figures.items() if name != "gpu"}
    assert "No table has been published yet" in fill(table[0], without)
    run.write_text(json.dumps({key: figures["overhead"][key] for key in ORIGIN} | {"gpu": GPU}))
    publish([run], FIGURES, root)
    text = page.read_text()
    assert "| step without failures, 1b (1,056M parameters) | nccl | 1,560 ms, 23.0 GiB |" in text
    assert "stock nccl 1,554 ms (1.00x, 0.98 to 1.01)" in text
    assert "| sum of 400 MB | mpi | 1.50 GB/s | stock gloo 1.10 GB/s |" in text
    readme = QUOTED.sub(r"\3", (root / "README.md").read_text())
    assert "1.00x for 1B parameters on\n2 replicas on 1 x NVIDIA H200, NCCL 2.31.2." in readme


def test_benchmark_has_figures_to_publish() -> None:
    for long in (False, True):
        assert {name.partition("-")[0] for name in suite.parts(long)} <= FIGURES.keys()


def test_run_without_a_quoted_figure_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    before = {page: page.read_text() for page in [*pages(root), root / FILE]}
    small = tmp_path / "collectives.json"
    few = {"collectives_ms": {"2": RESULTS["collectives"]["collectives_ms"]["2"]}}
    small.write_text(json.dumps({key: read()["collectives"][key] for key in ORIGIN} | few))
    with pytest.raises(ValueError, match=r"quotes collectives.4-25"):
        publish([small], FIGURES, root)
    for name in ("shopping", "repair"):
        other = tmp_path / f"{name}.json"
        other.write_text(json.dumps(RESULTS["repair"]))
        with pytest.raises(ValueError, match=f"{name} is not a file of a benchmark"):
            publish([other], FIGURES, root)
    with pytest.raises(ValueError, match="in a checkout"):
        publish([small], FIGURES, tmp_path / "elsewhere")
    assert {page: page.read_text() for page in before} == before
