"""Move the state of members (modes, hooks, frozen parameters) when their rows move or the array is copied."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hfusion.array.array_description import member_rows, row_copy
from hfusion.array.member_module import MemberSettings, RowView, settings_of
from hfusion.capture.compare_models import check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import freeze_rows, frozen_rows

if TYPE_CHECKING:
    from hfusion.array.member_views import Views
    from hfusion.array.module import FusedModule


def rearranged(views: Views, fused: FusedModule, sources: Sequence[Any], members: int) -> None:
    """Update the views: member b is now ``sources[b]``, one of the ``members`` former rows or a model that joined."""
    for stack in {id(t): t for t in fused.stacks.values()}.values():
        frozen = frozen_rows(stack)
        if frozen is not None:
            freeze_rows(stack, torch.tensor([isinstance(s, int) and bool(frozen[s]) for s in sources], device="cpu"))
    if not views.members:
        return
    settings = {row: settings_of(member) for row, member in views.members.items()}
    new_rows = _find_new_rows(sources, members)
    before, views.members = views.members, {}
    views.watched.clear()
    for row, member in before.items():
        if row in new_rows:
            member.row = new_rows[row]
            views.members[member.row] = member
        else:
            member.leave()
    for tie in views.ties.values():
        tie.untie_all()
    views.watched.update(views.members)
    for member in views.members.values():
        for parameter in member.parameters.values():
            parameter.grad = None
    views.follow(fused)
    _copy(views, fused, sources, settings)
    views.index()
    views.freeze(fused)
    views.hear(fused, views.members)


def _copy(views: Views, fused: FusedModule, sources: Sequence[Any], settings: Mapping[int, MemberSettings]) -> None:
    """Set modes and frozen parameters of overwritten members to those of the members they are copies of."""
    array, base = fused._array, MemberSettings(fused.training_by_path(), {}, {})
    for row, source in enumerate(sources):
        source_settings = settings.get(source) if isinstance(source, int) else None
        member = views.members.get(row)
        if member is None and source_settings is not None and _modes_differ(source_settings, base):
            member = views.add(fused, row)
        if member is not None and source != row and settings.get(row, source_settings) is not None:
            member.become(array.skeletons[array.comparison.variants[row]])
            source_settings = base if source_settings is None else source_settings
            member.set(
                source_settings.modes,
                source_settings.trained or {n: fused.stacks[n].requires_grad for n in member.parameters},
            )


def differing_settings(views: Views, fused: FusedModule) -> dict[int, MemberSettings]:
    """Return the settings in which members differ from the array, by row. Members must be up to date."""
    base = MemberSettings(fused.training_by_path(), {n: t.requires_grad for n, t in fused.stacks.items()}, {})
    settings = {row: settings_of(member) for row, member in views.members_by_row.items()}
    return {
        row: member_settings
        for row, member_settings in settings.items()
        if _modes_differ(member_settings, base)
        or member_settings.hooks
        or any(base.trained[n] != flag for n, flag in member_settings.trained.items())
    }


def _modes_differ(settings: MemberSettings, base: MemberSettings) -> bool:
    """Return whether a member is in other modes than its array, which may have more modules."""
    return any(base.modes[path] != mode for path, mode in settings.modes.items())


def restore(views: Views, fused: FusedModule, settings: Mapping[int, MemberSettings]) -> None:
    """Apply the settings that `differing_settings` returned to members."""
    if settings:
        views.note(fused)
    for row, member_settings in settings.items():
        member = views.add(fused, row)
        member.set(member_settings.modes, member_settings.trained)
        for path, hooks in member_settings.hooks.items():
            for hook in hooks:
                hook.register(member.modules[path])
        member.touch()


def unfused(fused: FusedModule) -> list[nn.Module]:
    """Return copies of the members as separate models, with the settings of the members."""
    fused._views.update(fused)
    whole, rows = fused._views.locate_members(fused)
    array, stacks = whole._array, dict(tensors(whole))
    shared_copies = {name: row_copy(tensor, None) for name, tensor in stacks.items() if name in array.comparison.shared}
    models = {row: whole._around(row, member_rows(array, row, stacks, shared_copies)) for row in rows}
    for row, settings in differing_settings(whole._views, whole).items():
        if row in models:
            _apply(settings, whole._views.members[row], models[row])
    return list(models.values())


def _apply(settings: MemberSettings, member: RowView, model: nn.Module) -> None:
    """Give ``model``, a copy of ``member``, its settings."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # A hook that is a method of a member's module becomes one of the copy's, as in a copy of the model.
    memo = {id(module): modules[path] for path, module in member.modules.items()}
    for path, module in modules.items():
        module.training = settings.modes[path]
        for hook in settings.hooks.get(path, ()):
            copy.deepcopy(hook, memo).register(module)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(settings.trained.get(name, parameter.requires_grad))


def _find_new_rows(sources: Sequence[Any], members: int) -> dict[int, int]:
    """Return the new rows of the members that remain; an overwritten member keeps its row."""
    rows = [source for source in sources if isinstance(source, int)]
    if len(sources) == members and len(set(rows)) < members:
        return {row: row for row in range(members)}
    new_rows: dict[int, int] = {}
    for index, source in enumerate(sources):
        if isinstance(source, int) and (source not in new_rows or source == index):
            new_rows[source] = index
    return new_rows


def check_fits(fused: FusedModule, row: int, model: nn.Module) -> None:
    """Raise a FusionError if the member ``model`` was changed so that it does not fit the array any more."""
    like = fused._member(row)
    others = dict(model.named_modules(remove_duplicate=False))
    for path, module in like.named_modules(remove_duplicate=False):
        module.training = others[path].training if path in others else module.training
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in like.named_parameters(remove_duplicate=False):
        if name in named and parameter.requires_grad != named[name].requires_grad:
            parameter.requires_grad_(named[name].requires_grad)
    try:
        check_pair(like, len(fused), model)
    except FusionError as error:
        reason = str(error).replace(f"model {len(fused)}", f"member {row}").replace("model 0", "the array")
        raise FusionError(
            f"what was done to member {row} of a fused {fused._original} does not fit its array: {reason}. Undo it, or "
            "do it to all models of unfuse() and fuse them again"
        ) from error


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer ``name`` of ``model`` to ``tensor``."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    table: Any = module._parameters if leaf in module._parameters else module._buffers
    if table[leaf] is not tensor:
        table[leaf] = tensor
