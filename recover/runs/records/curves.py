"""The numbers that a run shows, and what each is: one name, on every screen that draws curves."""

from __future__ import annotations

from recover.runs.records.kinds import Line

# In TensorBoard and Weights & Biases under these names, in Prometheus with `recover_` before them.
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
    """What there is to draw of a committed step."""
    values = {name: line[name] for name in CURVES if isinstance(line.get(name), int | float)}
    if line.get("seconds") and "tokens" in line:
        values["tokens_per_second"] = line["tokens"] / line["seconds"]
    return values
