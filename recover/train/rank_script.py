"""The script that every rank of `recover train` runs. Started by `recover.train.supervision`, never by hand.

Arguments: the configuration as JSON, the checkpoint to resume from ("" for none), and for a replay its order as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recover.job.imports import importing

with importing():
    import torch._dynamo  # noqa: F401  (the optimizer would import it)

    import recover
    from recover.step.errors import StateDivergedError
    from recover.train.config import Config
    from recover.train.device import pick_device
    from recover.train.replay_order import ReplayOrder
    from recover.train.resuming import name_last_checkpoint
    from recover.train.trainer import Trainer


def main(config: Config, resume: Path | None, replay: ReplayOrder | None = None) -> None:
    pick_device(config.device)  # before the world is created, whose NCCL groups are created on this device
    world = recover.init()
    assert world.job.run_dir is not None
    run_dir = Path(world.job.run_dir)
    try:
        Trainer(world, config, run_dir, resume, replay).run()
    except StateDivergedError as error:
        name_last_checkpoint(error, run_dir)
        raise


if __name__ == "__main__":
    main(
        Config.model_validate_json(sys.argv[1]),
        Path(sys.argv[2]) if sys.argv[2] else None,
        ReplayOrder.from_json(sys.argv[3]) if len(sys.argv) > 3 else None,
    )
