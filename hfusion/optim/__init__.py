"""torch.optim for arrays of models: every hyper-parameter is one value or one per member."""

from hfusion.optim import lr_scheduler
from hfusion.optim.adadelta import Adadelta
from hfusion.optim.adam import Adam, AdamW
from hfusion.optim.clip import clip_grad_norm_
from hfusion.optim.convert import fuse
from hfusion.optim.sgd import SGD

__all__ = ["SGD", "Adadelta", "Adam", "AdamW", "clip_grad_norm_", "fuse", "lr_scheduler"]
