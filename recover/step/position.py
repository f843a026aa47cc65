"""Where a run stands, for another to go on from."""

from __future__ import annotations

from typing import Any


def check_position(state: dict[str, Any], here: dict[str, Any], rebatch: bool) -> None:
    """Raises ValueError if a step whose own state is `here` would not go on with the run that saved `state`."""
    samples = state.get("samples", {})
    if {"global_batch", "index", "skipped"} - state.keys() or "mode" not in samples:
        raise ValueError(
            f"this state of a step, {state}, does not tell which sample comes next (earlier versions saved less); "
            f"complete it by hand: step.state_dict() has the form {here}"
        )
    if samples["mode"] != here["samples"]["mode"]:
        raise ValueError(
            f"this state was saved with samples={samples['mode']!r}, and this step has "
            f"samples={here['samples']['mode']!r}; go on with the mode it was saved with"
        )
    if state["global_batch"] != here["global_batch"] and not rebatch:
        raise ValueError(
            f"this state was saved with global_batch={state['global_batch']}, and this step has "
            f"global_batch={here['global_batch']}; give the same, or load_state_dict(state, rebatch=True) to go on "
            "from the next sample with another batch"
        )
