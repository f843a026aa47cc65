"""3D parallelism: a replica whose ranks form a grid of pipeline stages, expert groups and
tensor-parallel positions."""

from recover.parallel.partition import ModelCut
from recover.parallel.threed.build import threed
from recover.parallel.threed.pipeline import Pipeline

__all__ = ["ModelCut", "Pipeline", "threed"]
