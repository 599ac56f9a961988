"""Train many PyTorch models at once, each exactly as if alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # One line for each module.
    # isort: off
    from hfusion import optim as optim
    from hfusion.adapters import Adapters as Adapters, lora as lora
    from hfusion.array.fuse import build as build, fuse as fuse
    from hfusion.array.member_functions import each as each
    from hfusion.array.module import FusedModule as FusedModule
    from hfusion.array.per_model import per_model as per_model
    from hfusion.checkpoint.save import load as load, save as save
    from hfusion.cluster.cluster import Cluster as Cluster, plan as plan, train as train
    from hfusion.cluster.ranks import copy_rows as copy_rows, gather_rows as gather_rows, rows as rows
    from hfusion.core.calls import Ragged as Ragged, stacked as stacked
    from hfusion.core.errors import CheckpointError as CheckpointError, ForwardsDiffer as ForwardsDiffer
    from hfusion.core.errors import FusionError as FusionError, HFusionError as HFusionError
    from hfusion.core.errors import NonFiniteError as NonFiniteError, PlanError as PlanError
    from hfusion.core.errors import SpillError as SpillError
    from hfusion.core.patience import Patience as Patience
    from hfusion.device.machine import Device as Device, Machine as Machine
    from hfusion.population.ensemble import Ensemble as Ensemble, select as select
    from hfusion.population.group_step import zip_loaders as zip_loaders
    from hfusion.population.logger import MemberLogger as MemberLogger
    from hfusion.population.population import Population as Population
    from hfusion.schedule.engine import simulate as simulate
    from hfusion.step.train_step import train_step as train_step
    from hfusion.tasks.task import Evaluation as Evaluation, Step as Step, Task as Task
    from hfusion.tasks.training_report import TrainError as TrainError
    from hfusion.tune.population_based_training import PBT as PBT
    from hfusion.tune.sweep import sweep as sweep
    from hfusion.tune.study import SweepResult as SweepResult

__version__ = "0.1.0"

# The public names by their modules. A module is imported when one of its names is first used: a sweep of few epochs
# ends before the compiler, the passes and the scheduler, which it does not need, would be loaded.
_NAMES = {
    "hfusion.adapters": ("Adapters", "lora"),
    "hfusion.array.fuse": ("build", "fuse"),
    "hfusion.array.member_functions": ("each",),
    "hfusion.array.module": ("FusedModule",),
    "hfusion.array.per_model": ("per_model",),
    "hfusion.checkpoint.save": ("load", "save"),
    "hfusion.cluster.cluster": ("Cluster", "plan", "train"),
    "hfusion.cluster.ranks": ("copy_rows", "gather_rows", "rows"),
    "hfusion.core.calls": ("Ragged", "stacked"),
    "hfusion.core.errors": (
        "CheckpointError",
        "ForwardsDiffer",
        "FusionError",
        "HFusionError",
        "NonFiniteError",
        "PlanError",
        "SpillError",
    ),
    "hfusion.core.patience": ("Patience",),
    "hfusion.device.machine": ("Device", "Machine"),
    "hfusion.population.ensemble": ("Ensemble", "select"),
    "hfusion.population.group_step": ("zip_loaders",),
    "hfusion.population.logger": ("MemberLogger",),
    "hfusion.population.population": ("Population",),
    "hfusion.schedule.engine": ("simulate",),
    "hfusion.step.train_step": ("train_step",),
    "hfusion.tasks.task": ("Evaluation", "Step", "Task"),
    "hfusion.tasks.training_report": ("TrainError",),
    "hfusion.tune.population_based_training": ("PBT",),
    "hfusion.tune.sweep": ("sweep",),
    "hfusion.tune.study": ("SweepResult",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULES, "optim"])
# `from hfusion import *` leaves out the last two, which need Lightning and scikit-learn.
_SUBMODULES = ("optim", "lightning", "sklearn")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _SUBMODULES:
        return importlib.import_module(f"hfusion.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'hfusion' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES[1:], "__version__"])
