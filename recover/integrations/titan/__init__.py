"""torchtitan under `recover.Step`: `-m torchtitan.train --module recover.integrations.titan --config NAME`.

torchtitan's world is one replica, and its gradient accumulation is B, the microbatches of a step
over all replicas. Its trainer is subclassed; nothing of it is copied.
"""
