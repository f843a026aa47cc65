"""Words of a question that stand for keys: `gpus=`, `mtbf_hours=`, `mtbf_of=` and `job.tokens_per_step=`.

The last one depends on all keys of the job, and is read by `step_tokens.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recover.job.config_keys import ConfigError, nearest, parse_keys
from recover_lab.simulate.memory import smallest_replica
from recover_lab.simulate.number_words import many
from recover_lab.simulate.scenario_keys import Machinery, TrainingJob

WORDS = {
    "gpus": "GPUs of the job, instead of cluster.nodes; job.replica_gpus is then the fewest that hold the model",
    "mtbf_hours": "mean hours between failures, instead of failures.per_node_day; needs mtbf_of",
    "mtbf_of": "of what mtbf_hours is: gpu, node or job",
    "job.tokens_per_step": "tokens of a step of all replicas, instead of job.accum; without both, what is usual for a "
    "model of this size",
}
_OWNERS = ("gpu", "node", "job")


def translate(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the words by the keys that they stand for; `below` has the keys of presets and measurements."""
    keys = {key: value for key, value in given.items() if key not in WORDS}
    for key in keys:
        if "." not in key and (hint := nearest(key, WORDS, "")):
            raise ConfigError(f"there is no key {key!r}; {hint} The words are {', '.join(WORDS)}")
    if "job.tokens_per_step" in given and "job.accum" in given:
        raise ConfigError(
            f"job.tokens_per_step={given['job.tokens_per_step']} and job.accum={given['job.accum']} both give the size "
            "of a step; give one of them"
        )
    if "gpus" in given:
        keys |= _nodes(given, {**below, **keys})
    if "mtbf_hours" in given or "mtbf_of" in given:
        keys["failures.per_node_day"] = _rate(given, _group(Machinery, "cluster", {**below, **keys}))
    return keys


def failures_per_node_day(hours: float, owner: str, nodes: int, gpus_per_node: int) -> float:
    """The rate of a node, from the mean time between failures of a GPU, a node or the job."""
    return 24 / hours * {"gpu": gpus_per_node, "node": 1.0, "job": 1 / nodes}[owner]


def _group(model: Any, group: str, values: Mapping[str, Any]) -> Any:
    """The keys of one group, checked."""
    inside = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{group}.")}
    try:
        return parse_keys(model, inside, "recover simulate")
    except ConfigError as error:
        raise ConfigError(f"{group}: {error}") from None


def _nodes(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    text = str(given["gpus"]).replace(",", "").strip()
    if not text.isdigit() or not int(text):
        raise ConfigError(f"gpus={given['gpus']!r} must be a whole number above 0, such as gpus=1024")
    if "cluster.nodes" in given:
        raise ConfigError(
            f"gpus={text} and cluster.nodes={given['cluster.nodes']} both give the size of the cluster; give one of "
            "them"
        )
    gpus, found = int(text), {}
    without_nodes = {key: value for key, value in values.items() if key != "cluster.nodes"}
    per_node = _group(Machinery, "cluster", without_nodes).gpus_per_node
    if gpus < per_node and "cluster.gpus_per_node" not in given:
        per_node = found["cluster.gpus_per_node"] = gpus  # one small node
    if gpus % per_node:
        less, more = gpus // per_node * per_node, -(-gpus // per_node) * per_node
        fitting = f"{less} or {more}" if less else str(more)
        raise ConfigError(
            f"gpus={gpus} is not a whole number of nodes of cluster.gpus_per_node={per_node}; use gpus={fitting}"
        )
    found["cluster.nodes"] = gpus // per_node
    if "job.replica_gpus" not in values:
        job = _group(TrainingJob, "job", values)
        size = None if job.microbatch_s is not None else smallest_replica(job, gpus // per_node, per_node)
        if size is not None:
            found["job.replica_gpus"] = size
    return found


def _rate(given: Mapping[str, Any], cluster: Machinery) -> float:
    if "mtbf_hours" not in given:
        raise ConfigError(f"mtbf_of={given['mtbf_of']} says of what mtbf_hours is; give mtbf_hours, too")
    try:
        hours = float(given["mtbf_hours"])
        if not 0 < hours < 1e12:
            raise ValueError
    except ValueError:
        raise ConfigError(f"mtbf_hours={given['mtbf_hours']!r} must be a number of hours above 0") from None
    if "failures.per_node_day" in given:
        raise ConfigError(
            f"mtbf_hours={given['mtbf_hours']} and failures.per_node_day={given['failures.per_node_day']} both give "
            "the rate of failures; give one of them"
        )
    owner = given.get("mtbf_of")
    if owner is None:
        every = {
            name: 24
            / (failures_per_node_day(hours, name, cluster.nodes, cluster.gpus_per_node) * cluster.nodes)
            for name in _OWNERS
        }
        readings = ", ".join(
            f"with mtbf_of={name} the job fails every {many(every[name], 'hour')}" for name in _OWNERS
        )
        raise ConfigError(f"mtbf_hours={given['mtbf_hours']} does not say of what; add mtbf_of: {readings}")
    if owner not in _OWNERS:
        hint = nearest(str(owner), _OWNERS, "choose one of them")
        raise ConfigError(f"mtbf_of={owner!r} must be gpu, node or job; {hint}")
    return failures_per_node_day(hours, owner, cluster.nodes, cluster.gpus_per_node)
