"""The numbers of a run that are plotted, each with one name in all tools."""

from __future__ import annotations

from recover.runs.records.kinds import Line

# Names in TensorBoard and Weights & Biases; in Prometheus with the prefix `recover_`.
CURVES = {
    "loss": "training loss of the last committed step",
    "heldout_loss": "loss on held-out data, where it was last evaluated",
    "grad_norm": "norm of the gradient before it was clipped",
    "lr": "learning rate",
    "microbatches": "microbatches in the last committed step: B",
    "replicas": "living replicas",
    "seconds": "seconds that the last step took",
    "tokens_per_second": "tokens per second in the last step",
    "mfu": "model FLOPs utilisation of the GPU's peak",
    "gpu_peak_mib": "memory of the writer's tensors on its GPU, the most so far, in MiB",
}


def curves(line: Line) -> dict[str, float]:
    """The numbers of a committed step that are plotted."""
    values = {name: line[name] for name in CURVES if isinstance(line.get(name), int | float)}
    if line.get("seconds") and "tokens" in line:
        values["tokens_per_second"] = line["tokens"] / line["seconds"]
    return values
