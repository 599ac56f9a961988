"""Train many PyTorch models at once, each exactly as if alone."""

import importlib
from typing import Any

from hfusion import optim
from hfusion.adapters.lora import Adapters, lora
from hfusion.array.each import each
from hfusion.array.fuse import build, fuse
from hfusion.array.module import FusedModule
from hfusion.array.per_model import per_model
from hfusion.checkpoint.save import load, save
from hfusion.cluster.cluster import Cluster
from hfusion.cluster.rank_copies import copy_rows
from hfusion.cluster.ranks import gather_rows, rows
from hfusion.cluster.train_tasks import plan, train
from hfusion.core.calls import stacked
from hfusion.core.errors import (
    CheckpointError,
    ForwardsDiffer,
    FusionError,
    HFusionError,
    NonFiniteError,
    PlanError,
    SpillError,
)
from hfusion.core.patience import Patience
from hfusion.core.ragged import Ragged
from hfusion.device.machine import Device, Machine
from hfusion.population.any_models import Population
from hfusion.population.ensemble import Ensemble
from hfusion.population.logger import MemberLogger, MemberProgress
from hfusion.population.selection import select
from hfusion.population.zip_loaders import zip_loaders
from hfusion.schedule.simulate import simulate
from hfusion.step.train_step import train_step
from hfusion.tasks.task import Evaluation, Step, Task
from hfusion.tasks.train import TrainError
from hfusion.tune.exploit import PBT
from hfusion.tune.result import SweepResult
from hfusion.tune.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "PBT",
    "Adapters",
    "CheckpointError",
    "Cluster",
    "Device",
    "Ensemble",
    "Evaluation",
    "ForwardsDiffer",
    "FusedModule",
    "FusionError",
    "HFusionError",
    "Machine",
    "MemberLogger",
    "MemberProgress",
    "NonFiniteError",
    "Patience",
    "PlanError",
    "Population",
    "Ragged",
    "SpillError",
    "Step",
    "SweepResult",
    "Task",
    "TrainError",
    "build",
    "copy_rows",
    "each",
    "fuse",
    "gather_rows",
    "load",
    "lora",
    "optim",
    "per_model",
    "plan",
    "rows",
    "save",
    "select",
    "simulate",
    "stacked",
    "sweep",
    "train",
    "train_step",
    "zip_loaders",
]


# Imported when first used: they need Lightning and scikit-learn. `from hfusion import *` leaves them out.
_LAZY = ("lightning", "sklearn")


def __getattr__(name: str) -> Any:
    """Import ``hf.lightning`` or ``hf.sklearn``."""
    if name in _LAZY:
        return importlib.import_module(f"hfusion.{name}")
    raise AttributeError(f"module 'hfusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__"])
