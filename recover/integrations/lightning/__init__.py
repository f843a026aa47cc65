"""Lightning under `recover.Step`: `Trainer(strategy=RecoverStrategy(global_batch=256))`.

The trainer's world is one replica. Its batch is one optimizer step of B microbatches, which are
batches of the user's DataLoader. `Strategy` is subclassed; nothing of Lightning is copied.
"""

from recover.integrations.lightning.strategy import RecoverStrategy

__all__ = ["RecoverStrategy"]
