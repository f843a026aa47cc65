"""Hugging Face's `Trainer` under `recover.Step`: `from recover.integrations.hf import Trainer`, and
`recoverable(SFTTrainer)` for other subclasses of `transformers.Trainer`.

The trainer's world is one replica, and its gradient accumulation is B, the microbatches of a step
over all replicas. Its classes are subclassed; nothing of them is copied.
"""

import os

from recover.job import process

# With LOCAL_RANK, accelerate takes this process for a rank of its own job. Before transformers is imported.
if process.rank() is not None:
    os.environ.pop(process.LOCAL_RANK, None)

from recover.integrations.hf.trainer import Trainer, recoverable

__all__ = ["Trainer", "recoverable"]
