"""Train many PyTorch models at once, each exactly as if alone."""

from hfusion import optim
from hfusion.errors import CheckpointError, FusionError, HFusionError, PlanError
from hfusion.fuse import build, fuse
from hfusion.inputs import stacked
from hfusion.module import FusedModule
from hfusion.per_model import per_model

__all__ = [
    "CheckpointError",
    "FusedModule",
    "FusionError",
    "HFusionError",
    "PlanError",
    "build",
    "fuse",
    "optim",
    "per_model",
    "stacked",
]
