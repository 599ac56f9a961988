"""Train many PyTorch models at once, each exactly as if alone."""

from hfusion import optim
from hfusion.errors import CheckpointError, FusionError, HFusionError, PlanError, SpillError
from hfusion.fuse import build, fuse
from hfusion.inputs import stacked
from hfusion.machine import Device, Machine
from hfusion.module import FusedModule
from hfusion.per_model import per_model
from hfusion.simulate import simulate
from hfusion.step import train_step
from hfusion.task import Evaluation, Step, Task
from hfusion.train import TrainError, plan, train

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Device",
    "Evaluation",
    "FusedModule",
    "FusionError",
    "HFusionError",
    "Machine",
    "PlanError",
    "SpillError",
    "Step",
    "Task",
    "TrainError",
    "build",
    "fuse",
    "optim",
    "per_model",
    "plan",
    "simulate",
    "stacked",
    "train",
    "train_step",
]
