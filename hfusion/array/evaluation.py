"""An array in eval mode for a while, also where the members' own eval does more than set flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hfusion.array.modes import Switch, own_modes
from hfusion.array.state import ArrayState
from hfusion.capture.contents import modeless_fingerprint
from hfusion.capture.named import tensors
from hfusion.core.errors import FusionError

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


@contextmanager
def evaluating(fused: FusedModule) -> Iterator[None]:
    """As `FusedModule.evaluating`."""
    modes = [(branch, branch.training) for branch in fused._branches]
    state = ArrayState(fused._number, fused._array, fused._compiler)
    if own_modes(fused._array.skeletons[0]):
        views = list(fused)
        before, trained = (
            tuple(map(modeless_fingerprint, views)),
            {name: t.requires_grad for name, t in tensors(fused)},
        )
        switch = Switch(views, fused._array.comparison.shared)
        left = switch.run("", lambda module: module.eval())
        if left.moved or left.written or left.trained != trained:
            switch.undo()
            raise FusionError(
                f"the own eval of {fused._original} changes parameters or buffers, and this evaluation uses them as "
                "training has them; evaluate the trained models by themselves"
            )
        fused._adopt(before, left, views)
    else:
        fused.eval()
    try:
        yield
    finally:
        for branch, training in modes:
            branch.training = training
        fused._enter(state)
