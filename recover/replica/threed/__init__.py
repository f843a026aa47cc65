"""3D parallelism: a replica whose ranks form a grid of pipeline stages, expert groups and tensor-parallel positions."""

from recover.replica.threed.build import threed
from recover.replica.threed.pipeline import Pipeline
from recover.replica.threed_shape import Shape

__all__ = ["Pipeline", "Shape", "threed"]
