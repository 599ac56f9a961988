"""Train and eval of an array where the members' own do more than set flags; in eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfusion.array.modes import Change, Left, Switch, own_modes
from hfusion.array.state import ArrayState, renewed
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
        _adopt(fused, before, left, views)
    else:
        fused.eval()
    try:
        yield
    finally:
        for branch, training in modes:
            branch.training = training
        fused._enter(state)


def switch(fused: FusedModule, path: str, change: Change) -> None:
    """Let the members' own train or eval decide. Raises FusionError where an array cannot follow."""
    views = list(fused)
    before = tuple(map(modeless_fingerprint, views))
    left = Switch(views, fused._array.comparison.shared).run(path, change)
    stacks = dict(tensors(fused))
    with torch.no_grad():
        for (name, index), tensor in left.moved.items():
            stacks[name].detach()[index].copy_(tensor)
    for name, trained in left.trained.items():
        stacks[name].requires_grad_(trained)
    _adopt(fused, before, left, views)


def _adopt(fused: FusedModule, before: tuple[Any, ...], left: Left, views: Sequence[nn.Module]) -> None:
    """Flags and attributes as the members have them now; programs of each state are kept."""
    for path, training in left.training.items():
        fused.get_submodule(path).training = training
    if left.contents == before:
        return
    fused._states.setdefault(before, ArrayState(fused._number, fused._array, fused._compiler))
    if left.contents not in fused._states:
        fused._array = renewed(fused._array, left.contents, views)
        fused._states[left.contents] = ArrayState(next(fused._numbers), fused._array, fused._new_compiler())
    fused._enter(fused._states[left.contents])
