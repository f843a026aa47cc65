"""3D parallelism: a replica whose ranks form a grid of pipeline stages, expert groups and tensor-parallel positions."""

from recover.replica.model_cut import ModelCut
from recover.replica.threed.build import threed
from recover.replica.threed.pipeline import Pipeline

__all__ = ["ModelCut", "Pipeline", "threed"]
