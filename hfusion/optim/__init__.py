"""torch.optim for arrays of models: every hyper-parameter is one value or one per member."""

from hfusion.optim import lr_scheduler
from hfusion.optim.base import FusedOptimizer, fuse
from hfusion.optim.clip import GradScaler, clip_grad_norm_, clip_grad_value_
from hfusion.optim.coupling import groups
from hfusion.optim.formula import for_all, per_member
from hfusion.optim.formulas import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, Muon, NAdam, RAdam, RMSprop

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "FusedOptimizer",
    "GradScaler",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "clip_grad_norm_",
    "clip_grad_value_",
    "for_all",
    "fuse",
    "groups",
    "lr_scheduler",
    "per_member",
]
