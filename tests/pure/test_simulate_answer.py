"""The answer of `recover simulate` in sentences: its numbers are those of the tables and of other runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from recover_lab.simulate.answer import OURS, THEIRS, answer
from recover_lab.simulate.memory import gpu_gigabytes
from recover_lab.simulate.number_words import figure, many, quantity
from recover_lab.simulate.race import race
from recover_lab.simulate.scenario import Scenario, parse_scenario
from recover_lab.simulate.scenario_keys import SYSTEMS as SYSTEMS_BY_NAME
from recover_lab.simulate.simulation_tables import crossing_rows
from recover_lab.simulate.study import ask, study
from typer.testing import CliRunner

from recover.cli import app
from recover.policy import get_policy

# 32 replicas of a node each; the job has a failure every 6 hours, after which a step takes 17 rounds instead of 16.
CLUSTER = (
    "gpus=256",
    "mtbf_hours=6",
    "mtbf_of=job",
    "job.parameters=3e10",
    "job.replica_gpus=8",
    "run.seeds=4",
)
SYSTEMS = "run.systems=restart,restart-memory,recover,recover-return,torchft"


def simulate(*words: str) -> Any:
    result = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    """The complete answer to one question."""
    found: dict[str, Any] = json.loads(simulate(*CLUSTER, SYSTEMS, "--json").stdout)
    return found


def scenario(*words: str) -> Scenario:
    return ask([*CLUSTER, *words], None, []).scenario


def interval_of_four(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / 4
    spread = (sum((value - mean) ** 2 for value in values) / 3) ** 0.5
    half = 3.182 * spread / 4**0.5  # Student's t of 3 degrees of freedom
    return mean - half, mean + half


def percents(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([+-]?[\d.]+)%", text)]


@pytest.mark.guarantee(
    "Simulated clusters",
    "The answer in a sentence has the numbers of the tables, and an interval over seeds under equal failures.",
)
def test_simulation_headline_has_the_numbers_of_the_table(asked: dict[str, Any]) -> None:
    """Yields, gain, interval and GPUs are computed again here, from the goodput of each seed."""
    headline = asked["answer"]["sentences"][0]
    ours, theirs = (asked["systems"][name] for name in (OURS, THEIRS))
    gains = [a - b for a, b in zip(ours["goodputs"], theirs["goodputs"], strict=True)]
    mean, base = sum(gains) / 4, sum(theirs["goodputs"]) / 4
    low, high = interval_of_four(gains)
    expected = [ours["goodput"]["mean"], base, mean / base, 0.95, low / base, high / base]
    assert percents(headline) == pytest.approx([100 * share for share in expected], abs=0.06)
    assert f"the work of {round(256 * mean)} GPUs." in headline
    tokens = 32 * 16 * 8192
    assert asked["tokens_per_step"] == tokens
    assert headline.startswith(
        "On 256 H100 with a failure every 6 hours, a model of 30B parameters and "
        f"{tokens / 1e6:.3g}M tokens per step, ReCoVer yields "
    )
    assert headline.endswith(" ReCoVer is worth it here.")
    assert len(ours["goodputs"]) == 4


def test_scale_page_shows_the_answer_of_its_command() -> None:
    """The same seeds give the same sentence everywhere."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "scale.md").read_text()
    command, told = page.split("$ recover simulate ")[1].split("```")[0].split("\n", 1)
    result = simulate(*command.split(), f"run.systems={THEIRS},{OURS}", "--brief")
    assert result.stdout.splitlines()[0] == " ".join(told.split())


def test_simulation_answer_comes_first_and_tables_agree(asked: dict[str, Any]) -> None:
    result = simulate(*CLUSTER, SYSTEMS, "--brief")
    first, *_ = result.stdout.splitlines()
    assert first == asked["answer"]["sentences"][0]
    row = next(line for line in result.stdout.splitlines() if "ReCoVer, replicas rejoin " in line)
    assert f"{percents(first)[0]:.1f}% (" in row
    assert result.stdout.index("days to the budget") > result.stdout.index("Assumed: ")


def test_simulation_answer_names_uneven_shares_and_their_rounds(asked: dict[str, Any]) -> None:
    gap = asked["answer"]["sentences"][1]
    parts = asked["systems"][OURS]["parts"]
    assert f"Of the {100 - percents(asked['answer']['sentences'][0])[0]:.1f} points" in gap
    assert f"uneven shares {100 * parts['uneven']:.1f}" in gap
    lost = get_policy("balanced", 32).layout(range(31), 512).accum
    assert f"B = 512 microbatches take 16 rounds on 32 replicas and {lost} on 31" in gap
    assert lost == 17


@pytest.mark.guarantee(
    "Simulated clusters",
    "The answer in a sentence has the numbers of the tables, and an interval over seeds under equal failures.",
)
def test_simulation_spare_node_figures_are_those_of_a_run_with_one(asked: dict[str, Any]) -> None:
    told = next(text for text in asked["answer"]["sentences"] if "spare node" in text)
    with_one = json.loads(simulate(*CLUSTER, SYSTEMS, "cluster.spares=1", "--brief", "--json").stdout)[
        "systems"
    ]
    more = {
        name: 100
        * (with_one[name]["tokens_per_day"]["mean"] / asked["systems"][name]["tokens_per_day"]["mean"] - 1)
        for name in (OURS, THEIRS)
    }
    yields = [100 * with_one[name]["goodput"]["mean"] for name in (OURS, THEIRS)]
    cost = 100 * 8 / 256
    assert percents(told) == pytest.approx([cost, more[OURS], more[THEIRS], *yields], abs=0.06)
    after, before = with_one[OURS]["goodputs"], asked["systems"][OURS]["goodputs"]
    low, high = interval_of_four([x - y for x, y in zip(after, before, strict=True)])
    pays = "which pays" if low > 0 else "which does not pay" if high < 0 else "about as much as it costs"
    assert pays in told
    assert "cluster.spares=1;" in told


def test_simulation_finer_microbatches_are_those_of_a_run_with_them(asked: dict[str, Any]) -> None:
    told = next(text for text in asked["answer"]["sentences"] if "half the size" in text)
    words = ("job.accum=32", "job.tokens=4096", "--brief", "--json")
    finer = json.loads(simulate(*CLUSTER, SYSTEMS, *words).stdout)
    found = finer["systems"][OURS]
    assert percents(told) == pytest.approx([100 * found["goodput"]["mean"]], abs=0.06)
    assert f"cost {100 * found['parts']['uneven']:.1f} points" in told
    assert finer["step_seconds"] == pytest.approx(asked["step_seconds"])
    assert found["parts"]["uneven"] < asked["systems"][OURS]["parts"]["uneven"]


def test_simulation_answer_says_where_a_shrinking_batch_is_ahead(asked: dict[str, Any]) -> None:
    told = asked["answer"]["sentences"][-1]
    shrinking = asked["systems"]["torchft"]
    assert shrinking["goodput"]["mean"] > asked["systems"][OURS]["goodput"]["mean"]
    assert f"yields {100 * shrinking['goodput']['mean']:.1f}%" in told
    assert f"{shrinking['smallest_batch']} at least, not B = 512" in told


@pytest.mark.guarantee(
    "Simulated clusters",
    "The stated break-even separates rates at which ReCoVer yields more than checkpoint-restart from those at "
    "which it yields less.",
)
def test_simulation_gain_changes_sign_at_the_stated_break_even(asked: dict[str, Any]) -> None:
    """Simulated below and above the stated rate, with seeds that the search did not use."""
    even = asked["answer"]["break_even_per_node_day"]
    gaps = []
    for factor in (0.5, 2.0):
        rate = factor * even
        there = scenario().but(failures__per_node_day=rate, run__first_seed=1000, run__days=60 / (rate * 32))
        found = race(there, [OURS, THEIRS])
        gaps.append(found[OURS].goodput.mean - found[THEIRS].goodput.mean)
    assert gaps[0] < 0 < gaps[1], gaps
    told = next(text for text in asked["answer"]["sentences"] if text.startswith("Break-even"))
    between = 24 / (even * 32)
    assert asked["answer"]["break_even_hours"] == pytest.approx(between)
    assert f"less often than every {between:.3g} hours" in told
    assert between > 6  # failures are rarer than in the question, where ReCoVer is ahead


@pytest.mark.guarantee(
    "Simulated clusters",
    "The stated tokens per step separate steps with which ReCoVer yields more than checkpoint-restart from those "
    "with which it yields less.",
)
def test_simulation_gain_changes_sign_at_the_stated_tokens_per_step() -> None:
    """Both ends of the stated span are simulated again here, as questions of their own."""
    words = ("gpus=256", "mtbf_hours=60", "mtbf_of=job", "job.parameters=8e9", "job.replica_gpus=8")
    there = (*words, "run.seeds=4", f"run.systems={THEIRS},{OURS}")
    found = ask(there, None, []).scenario
    told = answer(found, race(found), more=True)
    assert told is not None
    assert told.even_steps is not None
    behind, ahead = told.even_steps
    assert ahead == behind + 1
    (sentence,) = (text for text in told.sentences() if text.startswith("Tokens per step"))
    stated = [float(number) for number in re.findall(r"([\d.]+)M \(job.accum=", sentence)]
    assert stated == pytest.approx([accum * 32 * 8192 / 1e6 for accum in (behind, ahead)], rel=0.005)
    assert told.to_json()["break_even_tokens_per_step"] == [accum * 32 * 8192 for accum in (behind, ahead)]
    gaps = []
    for accum in (behind, ahead, 2 * ahead):
        at = ask([*there, f"job.tokens_per_step={accum * 32 * 8192}"], None, []).scenario
        assert at.job.accum == accum
        result = race(at)
        gaps.append(result[OURS].goodput.mean - result[THEIRS].goodput.mean)
    assert gaps[0] <= 0 < min(gaps[1:]), gaps


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("recovery.vote_s=0", "recovery.checkpoint_every_s=1e12"),
            "is ahead of checkpoint-restart from 262k",
        ),
        (
            ("recovery.vote_s=100", "job.accum=1"),
            "is behind checkpoint-restart even with 16.8M (job.accum=64)",
        ),
    ],
)
def test_simulation_says_where_every_size_of_a_step_is_ahead_or_behind(
    words: tuple[str, ...], told: str
) -> None:
    there = scenario(*words, "run.days=3")
    found = answer(there, race(there, [OURS, THEIRS]), more=True)
    assert found is not None
    assert any(told in text for text in found.sentences()), found.sentences()


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (("gpus=64", "job.parameters=4e8"), 2**19),  # 64 replicas of one GPU, 8,192 tokens each
        (("gpus=64", "job.parameters=1.3e9"), 2**20),
        (("gpus=1024", "job.parameters=8e9"), 2**22),
        (("gpus=1024", "job.parameters=7e10", "job.replica_gpus=32"), 2**22),
        (("gpus=16384",), 2**24),
        (
            ("gpus=16384", "job.parameters=8e9"),
            2**26,
        ),  # with 8,192 replicas, one microbatch each is already more than usual
        (("gpus=1024", "job.parameters=8e9", "job.accum=16"), 2**26),  # as given
        (("gpus=1024", "job.parameters=8e9", "job.tokens_per_step=8,388,608"), 2**23),
        (("gpus=64", "job.microbatch_s=1", "job.replica_gpus=8"), 8 * 16 * 8192),  # the model is unknown
    ],
)
def test_simulation_step_has_the_usual_tokens_of_its_model(words: tuple[str, ...], tokens: int) -> None:
    question = ask([*words, "mtbf_hours=1000", "mtbf_of=node"], None, [])
    assert question.scenario.tokens_per_step == tokens
    assert f"{tokens / 1e6:.3g}M tokens per step" in question.understood[1].replace("524k", "0.524M")
    chosen = "job.accum" not in question.origins or question.origins["job.accum"].startswith("usual")
    assert chosen == (not {"job.accum", "job.tokens_per_step"} & {word.split("=")[0] for word in words})


def test_simulation_warns_of_a_step_far_above_the_usual() -> None:
    words = ["gpus=1024", "mtbf_hours=50000", "mtbf_of=gpu", "job.parameters=8e9"]
    *_, unusual = ask([*words, "job.accum=16"], None, []).understood
    assert unusual.startswith(
        "Unusual: 67.1M tokens per step are 16 times those of published models of this size"
    )
    for quiet in (words, [*words, "job.accum=4"]):
        assert not any("Unusual" in text for text in ask(quiet, None, []).understood)


def test_simulation_writes_one_round_and_fifty_thousand_hours() -> None:
    words = (
        "gpus=8",
        "mtbf_hours=50000",
        "mtbf_of=job",
        "job.parameters=2e8",
        "job.tokens=65536",
        "run.seeds=2",
    )
    question = ask([*words, "failures.repair_hours=1"], None, [])
    text = " ".join(question.understood)
    assert "8 replicas of 1 GPU, 1 microbatch of 65,536 tokens each" in text
    assert "back after 1 hour, 0 spare nodes" in text
    assert question.title.endswith("a failure every 2,083 days")
    assert (figure(50000.0), figure(999.7), figure(48.83)) == ("50,000", "1,000", "48.8")
    assert (quantity(4194304), quantity(999_900_000), quantity(12)) == ("4.19M", "1B", "12")
    assert (many(1, "round"), many(2, "round"), many(3, "microbatch"), many(1.0, "GPU")) == (
        "1 round",
        "2 rounds",
        "3 microbatches",
        "1 GPU",
    )
    small = simulate(
        "gpus=1024", "mtbf_hours=9", "mtbf_of=job", "job.parameters=8e9", "run.seeds=2", "--brief"
    )
    assert "B = 512 microbatches take 1 round on 512 replicas and 2 on 508" in small.stdout


def test_simulation_compares_recover_with_every_other_system_in_one_row_each() -> None:
    """Every pair of systems either crosses or has a row; the main pair crosses at the break-even of the answer."""
    words = ("gpus=256", "mtbf_hours=195", "mtbf_of=job", "job.parameters=8e9", "job.accum=32")
    found = study(ask([*words, SYSTEMS, "run.seeds=6"], None, []))
    rows = crossing_rows(found)[1:]
    assert found.answer is not None
    crossed = {other: rate for one, other, rate in found.crossed if one == OURS}
    assert crossed[THEIRS] == found.answer.even
    for one in (OURS, "recover"):
        for other in (THEIRS, "restart-memory", "torchft"):
            said = [row for row in rows if row[0].startswith(SYSTEMS_BY_NAME[one])]
            said = [row for row in said if SYSTEMS_BY_NAME[other] in f"{row[0]} {row[1]}"]
            assert said, (one, other, rows)


def test_simulation_says_where_recover_is_not_worth_it() -> None:
    rare = simulate(*CLUSTER[:1], "mtbf_hours=20000", *CLUSTER[2:], SYSTEMS, "--brief").stdout
    *_, loss, _, low, high = percents(rare.splitlines()[0])
    assert 0 < low <= loss <= high
    assert "fewer tokens" in rare.splitlines()[0]
    assert "ReCoVer is not worth it here." in rare.splitlines()[0]
    for_nothing = scenario("recovery.vote_s=0", "recovery.checkpoint_every_s=1e12")
    free = answer(for_nothing, race(for_nothing, [OURS, THEIRS]), more=True)
    assert free is not None
    assert free.even == 0
    assert any("ReCoVer is ahead of checkpoint-restart down to" in text for text in free.sentences())


def test_simulation_says_next_to_the_answer_that_nobody_chose_its_model(tmp_path: Path) -> None:
    """On these GPUs the default model gains, and a model of 8B parameters loses."""
    words = ("gpus=1024", "mtbf_hours=50000", "mtbf_of=gpu", f"run.systems={THEIRS},{OURS}", "--brief")
    default, said, *_ = simulate(*words, "--output", str(tmp_path)).stdout.splitlines()
    assert "a model of 405B parameters" in default
    assert default.endswith("ReCoVer is worth it here.")
    assert said.startswith("The model of 405B parameters is the default")
    assert "job.parameters=8e9" in said
    page = (tmp_path / "index.html").read_text()
    assert page.index("is worth it here.") < page.index(said) < page.index("Understood: ")
    chosen, empty, *_ = simulate(*words, "job.parameters=8e9").stdout.splitlines()
    assert "a model of 8B parameters" in chosen
    assert chosen.endswith("ReCoVer is not worth it here.")
    assert not empty
    measured, empty, *_ = simulate(*words, "job.microbatch_s=1", "job.replica_gpus=8").stdout.splitlines()
    assert "parameters" not in measured + empty


def test_simulation_equal_systems_show_no_difference() -> None:
    result = race(scenario(), [OURS])[OURS]
    same = answer(scenario(), {OURS: result, THEIRS: result}, more=False)
    assert same is not None
    assert "no difference that can be shown" in same.sentences()[0]
    assert answer(scenario(), {OURS: result}, more=False) is None
    only = simulate(*CLUSTER, "run.systems=recover", "--brief")
    assert only.stdout.startswith("run.systems has not both")


@pytest.mark.guarantee(
    "Simulated clusters",
    "A mean time between failures of a GPU, a node or the job becomes the rate of the simulated failures.",
)
@pytest.mark.parametrize(
    ("words", "between"),
    [
        (("mtbf_hours=12800", "mtbf_of=gpu"), 50.0),
        (("mtbf_hours=1600", "mtbf_of=node"), 50.0),
        (("mtbf_hours=50", "mtbf_of=job"), 50.0),
        (("mtbf_hours=1600", "mtbf_of=node", "cluster.gpus_per_node=4"), 25.0),
        (("mtbf_hours=12800", "mtbf_of=gpu", "cluster.gpus_per_node=4"), 50.0),
    ],
)
def test_simulated_failures_follow_the_mean_time_between_them(words: tuple[str, ...], between: float) -> None:
    """Checked by the number of failures in a simulated time on 256 GPUs, and by the text of the answer."""
    question = ask(["gpus=256", "job.microbatch_s=1", "job.replica_gpus=4", *words], None, [])
    there = question.scenario.but(run__days=200 * between / 24, run__seeds=4, failures__transient=1.0)
    assert there.cluster.nodes * there.cluster.gpus_per_node == 256
    assert race(there, [THEIRS])[THEIRS].failures == pytest.approx(200, rel=0.1)
    assert f"{words[0]} {words[1]}: " in question.understood[0]
    assert question.understood[0].endswith(f"every {between:g}.")


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (
            ("gpus=1024",),
            128,
        ),  # 405B x 16 bytes are 6,480 GB: 81 GPUs of 80 GB, and whole replicas of whole nodes
        (("gpus=1024", "job.parameters=7e9"), 2),
        (("gpus=1024", "job.parameters=7e9", "job.gpu=NVIDIA A100-SXM4-40GB"), 4),
        (("gpus=1024", "job.parameters=7e9", "job.gpu_gigabytes=20"), 8),
        (("gpus=1024", "job.parameters=7e9", "job.bytes_per_parameter=2"), 1),
        (("gpus=4", "job.parameters=7e9"), 2),  # one node of four GPUs
        (("gpus=1024", "job.parameters=7e9", "job.replica_gpus=16"), 16),  # as given
    ],
)
def test_simulation_replica_is_the_smallest_that_holds_the_model(words: tuple[str, ...], size: int) -> None:
    there = ask(["mtbf_hours=1000", "mtbf_of=node", *words], None, []).scenario
    assert there.job.replica_gpus == size
    memory = gpu_gigabytes(there.job)
    assert memory is not None
    needed = there.job.parameters * there.job.bytes_per_parameter / 1e9
    assert size * memory >= needed


def test_simulation_with_measured_microbatches_needs_no_model_that_fits() -> None:
    """In this case the default model is not used."""
    assert parse_scenario({"cluster.nodes": 4, "job.replica_gpus": 8, "job.microbatch_s": 1.0}).replicas == 4
