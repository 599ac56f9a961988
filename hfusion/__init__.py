"""Train many PyTorch models at once, each exactly as if alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfusion import optim
    from hfusion.adapters.lora import Adapters, lora
    from hfusion.array.fuse import build, fuse
    from hfusion.array.member_functions import each
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
    from hfusion.population.ensemble import Ensemble, select
    from hfusion.population.logger import MemberLogger
    from hfusion.population.population import Population
    from hfusion.population.zip_loaders import zip_loaders
    from hfusion.schedule.simulate import simulate
    from hfusion.step.train_step import train_step
    from hfusion.tasks.task import Evaluation, Step, Task
    from hfusion.tasks.train import TrainError
    from hfusion.tune.population_based_training import PBT
    from hfusion.tune.sweep import sweep
    from hfusion.tune.sweep_result import SweepResult

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

# The module of each public name. It is imported when the name is first used: a sweep of few epochs ends before the
# compiler, the passes and the scheduler, which it does not need, would be loaded.
_MODULES = {
    "PBT": "hfusion.tune.population_based_training",
    "Adapters": "hfusion.adapters.lora",
    "CheckpointError": "hfusion.core.errors",
    "Cluster": "hfusion.cluster.cluster",
    "Device": "hfusion.device.machine",
    "Ensemble": "hfusion.population.ensemble",
    "Evaluation": "hfusion.tasks.task",
    "ForwardsDiffer": "hfusion.core.errors",
    "FusedModule": "hfusion.array.module",
    "FusionError": "hfusion.core.errors",
    "HFusionError": "hfusion.core.errors",
    "Machine": "hfusion.device.machine",
    "MemberLogger": "hfusion.population.logger",
    "NonFiniteError": "hfusion.core.errors",
    "Patience": "hfusion.core.patience",
    "PlanError": "hfusion.core.errors",
    "Population": "hfusion.population.population",
    "Ragged": "hfusion.core.ragged",
    "SpillError": "hfusion.core.errors",
    "Step": "hfusion.tasks.task",
    "SweepResult": "hfusion.tune.sweep_result",
    "Task": "hfusion.tasks.task",
    "TrainError": "hfusion.tasks.train",
    "build": "hfusion.array.fuse",
    "copy_rows": "hfusion.cluster.rank_copies",
    "each": "hfusion.array.member_functions",
    "fuse": "hfusion.array.fuse",
    "gather_rows": "hfusion.cluster.ranks",
    "load": "hfusion.checkpoint.save",
    "lora": "hfusion.adapters.lora",
    "per_model": "hfusion.array.per_model",
    "plan": "hfusion.cluster.train_tasks",
    "rows": "hfusion.cluster.ranks",
    "save": "hfusion.checkpoint.save",
    "select": "hfusion.population.ensemble",
    "simulate": "hfusion.schedule.simulate",
    "stacked": "hfusion.core.calls",
    "sweep": "hfusion.tune.sweep",
    "train": "hfusion.cluster.train_tasks",
    "train_step": "hfusion.step.train_step",
    "zip_loaders": "hfusion.population.zip_loaders",
}
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
