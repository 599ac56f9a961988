"""torch.optim for arrays of models: every hyper-parameter is one value or one per member."""

from hfusion.optim import lr_scheduler
from hfusion.optim.adadelta import Adadelta
from hfusion.optim.adagrad import Adagrad
from hfusion.optim.adam import Adam, AdamW
from hfusion.optim.adamax import Adamax
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.clip import clip_grad_norm_, clip_grad_value_
from hfusion.optim.convert import fuse
from hfusion.optim.hyper import Hyper
from hfusion.optim.lion import Lion
from hfusion.optim.muon import Muon
from hfusion.optim.nadam import NAdam
from hfusion.optim.param_groups import groups
from hfusion.optim.radam import RAdam
from hfusion.optim.rmsprop import RMSprop
from hfusion.optim.scaler import GradScaler
from hfusion.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "FusedOptimizer",
    "GradScaler",
    "Hyper",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "clip_grad_norm_",
    "clip_grad_value_",
    "fuse",
    "groups",
    "lr_scheduler",
]
