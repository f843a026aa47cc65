"""The script that every rank of `recover train` runs. Started by `recover.train.supervision`, never by hand.

Arguments: the configuration as JSON, and the checkpoint to resume from ("" for none).
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
    from recover.train.resuming import name_last_checkpoint
    from recover.train.trainer import Trainer


def main(config: Config, resume: Path | None) -> None:
    pick_device(config.device)  # before the world is created, whose NCCL groups are created on this device
    world = recover.init()
    assert world.job.run_dir is not None
    run_dir = Path(world.job.run_dir)
    try:
        Trainer(world, config, run_dir, resume).run()
    except StateDivergedError as error:
        name_last_checkpoint(error, run_dir)
        raise


if __name__ == "__main__":
    main(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None)
