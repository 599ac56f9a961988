"""Train and eval of arrays whose members override them, and a context in which an array is in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfusion.array.array_description import ArrayState, renewed
from hfusion.array.overridden_modes import ModeChange, ModeEffects, ModeSetter, own_modes
from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.core.errors import FusionError

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


def switch_mode(fused: FusedModule, path: str, set_mode: ModeSetter) -> None:
    """Call the members' own train or eval and adopt its effects. Raises FusionError if an array cannot hold them."""
    fused._split()
    members = _copies(fused)
    before = tuple(map(modeless_fingerprint, members))
    effects = ModeChange(members, fused._array.comparison.shared).run(path, set_mode)
    stacks = fused.stacks
    with torch.no_grad():
        for (name, index), tensor in effects.moved.items():
            stacks[name].detach()[index].copy_(tensor)
    changed = {name: trained for name, trained in effects.trained.items() if stacks[name].requires_grad != trained}
    for name, trained in changed.items():
        stacks[name].requires_grad_(trained)
    _adopt(fused, before, effects, members)
    fused._views.renew(fused, changed)


def _copies(fused: FusedModule) -> list[nn.Module]:
    """Return the members as new modules around their rows, in the members' modes."""
    models = [fused._member(row) for row in range(len(fused))]
    for row, member in fused._views.members.items():
        for path, module in models[row].named_modules():
            module.training = member.modules[path].training
    return models


def _adopt(fused: FusedModule, before: tuple[Any, ...], effects: ModeEffects, members: Sequence[nn.Module]) -> None:
    """Adopt the flags and attributes in ``effects``. The programs of each state are cached."""
    for path, training in effects.training.items():
        fused.get_submodule(path).training = training
    if effects.contents == before:
        return
    states = fused._states
    states.setdefault(before, ArrayState(fused._number, fused._array, fused._compiler))
    if effects.contents not in states:
        fused._array = renewed(fused._array, effects.contents, members)
        states[effects.contents] = ArrayState(next(fused._numbers), fused._array, fused._new_compiler())
    fused._enter(states[effects.contents])


@contextmanager
def evaluating(fused: FusedModule) -> Iterator[None]:
    """Context manager: see `FusedModule.evaluating`."""
    fused._split()
    modes = [(branch, branch.training) for branch in fused._branches]
    member_modes = {row: member.training for row, member in fused._views.members.items()}
    state = ArrayState(fused._number, fused._array, fused._compiler)
    has_own = own_modes(fused._array.skeletons[0])
    if has_own:
        members = _copies(fused)
        before = tuple(map(modeless_fingerprint, members))
        trained = {name: tensor.requires_grad for name, tensor in fused.stacks.items()}
        change = ModeChange(members, fused._array.comparison.shared)
        effects = change.run("", lambda module: module.eval())
        if effects.moved or effects.written or effects.trained != trained:
            change.undo()
            raise FusionError(
                f"the own eval of {fused._original} changes parameters or buffers, and this evaluation uses them as "
                "training has them; evaluate the trained models by themselves"
            )
        _adopt(fused, before, effects, members)
        fused._views.renew(fused, {})
    else:
        fused.eval()
    try:
        yield
    finally:
        for branch, training in modes:
            branch.training = training
        fused._enter(state)
        if has_own:
            fused._views.renew(fused, {})
        fused._views.set_modes(fused, member_modes)
