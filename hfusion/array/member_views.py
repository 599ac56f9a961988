"""The members of an array as modules that live as long as their rows, and the changes made to them.

There is one module for each row, created on first access. Its tensors lie in the memory of the row, and its gradients
are those of the row (`core.row_gradients`). A member that was handed out may be changed, so `heed` compares it, at
every call of the array, with what programs were made for: attributes become those of its variant; members that differ
in modes, hooks or what they train run their own code. What an array cannot represent is refused there, by name.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hfusion.array.array_description import member_rows, row_copy
from hfusion.array.member_module import MemberModule, MemberSettings, MemberWatch, without_hooks
from hfusion.array.variable_states import MAX_VALUES
from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.capture.compare_models import check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import live_rows, skeleton
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import freeze_rows, frozen_rows
from hfusion.core.membership import is_own_hook
from hfusion.core.row_gradients import lies_in, tie, untie

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

_MODE, _TRAINED = attrgetter("training"), attrgetter("requires_grad")
# Number of calls after which a program is captured again for attributes that have not changed meanwhile: at first, and
# at most. Each such capture doubles it, so that captures cost less than the loops that they save.
_QUIET_CALLS, _MAX_QUIET_CALLS = 8, 512


@dataclass(frozen=True, eq=False)
class MembersApart:
    """Why members run their own code. ``key``: equal for members that differ in the same way."""

    key: Any
    why: str


class Views:
    """The members that were handed out, by row.

    Attributes:
        exposed: whether members were ever handed out, so that calls compare them. Dynamo guards on it.
        split: why the members run their own code; None if they are computed together.
        slices: the slices of the array that are in use.
    """

    def __init__(self, fused: FusedModule) -> None:
        self._fused = weakref.ref(fused)
        self.members: dict[int, MemberModule] = {}
        self.exposed = False
        self.split: MembersApart | None = None
        self.slices: weakref.WeakValueDictionary[range, FusedModule] = weakref.WeakValueDictionary()
        # Why members run their own code as their attributes change often; and those with attributes that programs,
        # which may not read them, do not know yet.
        self._changing, self._outdated = "", set[int]()
        self._states, self._quiet, self._quiet_calls = 1, 0, _QUIET_CALLS
        self._watch: MemberWatch | None = None
        # The modes, stacks, flags and addresses of the array, when members last followed it.
        self._modes = list[bool]()
        self._names, self._stacks = list[str](), list[Tensor]()
        self._stack_states: tuple[list[bool], list[int]] = [], []

    @property
    def members_by_row(self) -> Mapping[int, MemberModule]:
        """The members by row; in a slice, the members of the whole array by their rows in the slice."""
        return self.members

    def catch_up(self) -> None:
        """Let members follow modes, flags and memory that the array was given."""
        fused = self._fused()
        if fused is not None and self._array_changed(fused):
            self._pass_on(fused)
            self.note(fused)

    def get(self, fused: FusedModule, row: int) -> nn.Module:
        """Return member ``row``, whose tensors share the current memory of the row."""
        if not self.members:
            self.note(fused)
        if row not in self.members:
            self.add(fused, row)
        self.catch_up()
        return self.members[row].model

    def add(self, fused: FusedModule, row: int) -> MemberModule:
        array, shared, stacks = fused._array, fused._array.comparison.shared, fused.stacks
        array.check_stacks(stacks)
        rows = {name: t if name in shared else live_rows(t, row) for name, t in stacks.items()}
        for name, tensor in rows.items():
            frozen = None if name in shared else frozen_rows(stacks[name])
            if frozen is not None and frozen[row]:
                tensor.requires_grad_(False)
        member = self.members[row] = MemberModule(fused._around(row, rows), row, shared, self.catch_up)
        self.exposed = True
        self._align(fused, [row])
        member.accept()
        self._watch = None
        return member

    def note(self, fused: FusedModule) -> None:
        """Record the state of the array, to detect changes that apply to all members."""
        self._modes = list(map(_MODE, fused._branches))
        self._names, self._stacks = list(fused._real.keys()), list(fused._real.values())
        self._stack_states = self._read_stacks()

    def _read_stacks(self) -> tuple[list[bool], list[int]]:
        return list(map(_TRAINED, self._stacks)), list(map(Tensor.data_ptr, self._stacks))

    def _array_changed(self, fused: FusedModule) -> bool:
        return list(map(_MODE, fused._branches)) != self._modes or self._read_stacks() != self._stack_states

    def _pass_on(self, fused: FusedModule) -> None:
        """Pass modes and requires_grad flags that were set on the array's modules and stacks on to all members."""
        changed = [b for b, mode in zip(fused._branches, self._modes, strict=True) if b.training != mode]
        branches = {id(branch): branch for branch in changed}
        for path, branch in fused.named_modules(remove_duplicate=False) if branches else ():
            if id(branch) in branches:
                self.to_all(path, lambda module, mode=branch.training: setattr(module, "training", mode))  # type: ignore[misc]
        (trained, addresses), (old_trained, old_addresses) = self._read_stacks(), self._stack_states
        for name, stack, flag, old_flag in zip(self._names, self._stacks, trained, old_trained, strict=True):
            if flag != old_flag:
                freeze_rows(stack, None)
                for member in self.members_by_row.values():
                    if name in member.parameters:
                        member.parameters[name].requires_grad_(flag)
        if addresses != old_addresses:
            self._align(fused, list(self.members))

    def to_all(self, path: str, change: Callable[[nn.Module], object]) -> None:
        """Apply ``change`` to the submodule at ``path`` of every member, as it was to the array's."""
        for member in self.members_by_row.values():
            if path in member.modules:
                change(member.modules[path])

    def follow(self, fused: FusedModule) -> None:
        """Make the members' tensors views of the array's tensors again, after their memory has changed."""
        # Slices become independent arrays, which keep the memory that they share now.
        for part in list(self.slices.values()):
            part._views = Views(part)
        self.slices.clear()
        if self.members:
            self._align(fused, list(self.members))
            self.note(fused)

    def _align(self, fused: FusedModule, rows: Sequence[int]) -> None:
        stacks, shared = fused.stacks, fused._array.comparison.shared
        fused._array.check_stacks(stacks)
        for name, stack in stacks.items():
            for row in rows:
                member = self.members[row]
                if name in shared:
                    put_tensor(member.model, name, stack)
                    continue
                tensor = member.parameters.get(name, member.buffers.get(name))
                if tensor is not None and not lies_in(tensor, stack, row):
                    tensor.data = live_rows(stack, row).data
                if isinstance(tensor, nn.Parameter):
                    tie(tensor, stack, row)

    def update(self, fused: FusedModule) -> None:
        """Apply the changes made to members since the last call. Raises FusionError as `heed` does."""
        if self.members:
            self.heed(fused)

    def locate_members(self, fused: FusedModule) -> tuple[FusedModule, Sequence[int]]:
        """Return the array to which the members belong, and their rows there."""
        return fused, range(len(fused))

    def heed(self, fused: FusedModule, calling: bool = False) -> MembersApart | None:
        """Apply the changes made to members since the last call, and return why members are computed apart, if so.

        Args:
            calling: for a call of the array, which may run the members' own code; otherwise, programs and skeletons
                must have the present attributes.

        Raises:
            FusionError: an array cannot represent a change made to a member.
        """
        array_changed = self._array_changed(fused)
        if array_changed:
            self._pass_on(fused)
        if self._watch is None or not self._watch.is_unchanged():
            rows = [row for row, member in self.members.items() if member.has_changed()]
        else:
            rows = [row for row, member in self.members.items() if member.has_changed_inside()]
        self._watch = self._watch or (None if rows else MemberWatch(self.members.values()))
        if rows or array_changed or self._changing or (self._outdated and not calling):
            for row in rows:
                self._hear_tensors(fused, row, self.members[row])
            if contents := self._to_capture(fused, rows, calling):
                self._renew(fused, contents)
            self.hear(fused, rows)
        return self.split

    def hear(self, fused: FusedModule, rows: Iterable[int]) -> None:
        """Accept the changes made to the members of ``rows``, and divide members by them."""
        for row in rows:
            self.members[row].accept()
        self._watch = None
        self.freeze(fused)
        self._divide(fused)
        self.note(fused)

    def _hear_tensors(self, fused: FusedModule, row: int, member: MemberModule) -> None:
        """Copy tensors that were assigned to a member into its row."""
        stacks, shared = fused.stacks, fused._array.comparison.shared
        current = dict(tensors(member.model))
        for name, parameter in member.parameters.items():
            if not all(map(is_own_hook, (parameter._post_accumulate_grad_hooks or {}).values())):
                raise FusionError(
                    f"{name} of member {row} of a fused {fused._original} has a hook that runs after its gradient is "
                    "accumulated, but an array accumulates the gradients of all members together. Use register_hook"
                )
        recorded = {**member.parameters, **member.buffers, **{name: stacks[name] for name in shared}}
        modules = dict(member.model.named_modules(remove_duplicate=False))
        same = list(modules.items()) == list(member.modules.items()) and current.keys() == recorded.keys()
        moved = [n for n, t in current.items() if n not in shared and not (n in stacks and lies_in(t, stacks[n], row))]
        if same and not moved and all(current[name] is tensor for name, tensor in recorded.items()):
            return
        check_fits(fused, row, member.model)
        for name, stack in stacks.items():
            if name in shared and current[name] is not stack:
                raise FusionError(
                    f"{name} of member {row} of a fused {fused._original} was assigned, and is one tensor of all "
                    "members; write into it, or fuse models that have one each"
                )
        grads = {name: t.grad for name, t in current.items() if t is not recorded[name] and isinstance(t, nn.Parameter)}
        with torch.no_grad():
            for name in moved:
                target = live_rows(stacks[name], row).data
                target.copy_(current[name].detach())
                if (before := recorded[name]) is not current[name]:
                    before.data = before.data.clone()
                    if isinstance(before, nn.Parameter):
                        untie(before)
                current[name].data = target
        member.take(shared)
        self._align(fused, [row])
        for name, grad in grads.items():
            current[name].grad = grad

    def _to_capture(self, fused: FusedModule, rows: Sequence[int], calling: bool) -> Mapping[int, Any]:
        """Return the new fingerprints of the members that programs must know from now on, by row.

        A training loop may set attributes at every step: a few values are captured, then members run their own code.
        """
        changes = {row: self.members[row].changed_names() for row in rows}
        changes = {row: names for row, names in changes.items() if names != set()}
        is_read = any(map(fused._situations.may_read, changes.values()))
        if calling and (self._changing or not is_read):
            self._outdated |= changes.keys()
            self._quiet = 0 if is_read else self._quiet + 1
            if not self._changing or self._quiet < self._quiet_calls:
                return {}
            self._quiet_calls = min(2 * self._quiet_calls, _MAX_QUIET_CALLS)
        contents: dict[int, Any] = {}
        for row in self._outdated | changes.keys():
            member = self.members[row]
            fingerprint = modeless_fingerprint(member.model)
            if member.fingerprint is None:
                member.fingerprint = modeless_fingerprint(fused._member(row))
            if fingerprint != member.fingerprint:
                contents[row] = fingerprint
        if calling and not self._changing and contents and self._is_new(fused, contents):
            self._states += 1
            if self._states > MAX_VALUES:
                name = min((name for names in changes.values() for name in names or ()), default="an attribute")
                self._changing, self._quiet = (
                    f"{name} of members changes often, and each value needs another program",
                    0,
                )
                self._outdated = set(contents)
                return {}
        self._outdated, self._changing = set(), ""
        return contents

    @staticmethod
    def _is_new(fused: FusedModule, contents: Mapping[int, Any]) -> bool:
        """Return whether there are no programs yet for members with these fingerprints, by row."""
        from hfusion.array.array_editing import Kinds

        after = [contents.get(row, content) for row, content in enumerate(Kinds.of(fused).contents)]
        return tuple(after) not in fused._states

    def _renew(self, fused: FusedModule, changed: Mapping[int, Any]) -> None:
        """Update members whose attributes have changed; ``changed`` has their new fingerprints, by row."""
        from hfusion.array.array_editing import Kinds, enter

        kinds, array = Kinds.of(fused), fused._array
        after = list(kinds.contents)
        for row, fingerprint in changed.items():
            if fingerprint not in kinds.skeletons:
                kinds.skeletons[fingerprint] = without_hooks(skeleton(row, self.members[row].model))
            after[row] = fingerprint
            self.members[row].fingerprint = fingerprint
        distinct = list(dict.fromkeys(after))
        comparison = replace(array.comparison, variants=tuple(map(distinct.index, after)))
        skeletons = tuple(kinds.skeletons[content] for content in distinct)
        enter(fused, kinds.contents, after, replace(array, skeletons=skeletons, comparison=comparison))

    def _divide(self, fused: FusedModule) -> None:
        """Update `split`: None if all members can be computed together."""
        base = fused.training_by_path()
        own = {row: member.training for row, member in self.members.items()}
        modes = [{**base, **own.get(row, {})} for row in range(len(fused))]
        frozen = {name: flags for name, stack in fused.stacks.items() if (flags := frozen_rows(stack)) is not None}
        hooked = [(row, member.hooked) for row, member in sorted(self.members.items()) if member.hooked]
        reasons = [f"member {row} has a hook at {where}" for row, where in hooked]
        if any(member_modes != modes[0] for member_modes in modes):
            path = next(path for path in base if any(flags[path] != modes[0][path] for flags in modes))
            rows = [[row for row, flags in enumerate(modes) if flags[path] == mode] for mode in (True, False)]
            reasons.append(f"{path or 'member'} is in train mode in members {rows[0]}, in eval mode in {rows[1]}")
        if frozen:
            name, not_trained = next(iter(frozen.items()))
            reasons.append(f"members {not_trained.nonzero().reshape(-1).tolist()} do not train {name}")
        if self._changing:
            reasons.append(f"{self._changing}; give it as an argument of forward, or keep it in a buffer")
        if reasons:
            trained = tuple((name, tuple(flags.tolist())) for name, flags in frozen.items())
            key = tuple(tuple(own.values()) for own in modes), trained, tuple(hooked), self._changing
            self.split = MembersApart(key, "; ".join(reasons))
            return
        self.split = None
        for path, branch in fused.named_modules(remove_duplicate=False):
            branch.training = modes[0][path]

    def freeze(self, fused: FusedModule) -> None:
        """Record on each stack which members train it."""
        shared = fused._array.comparison.shared
        for name, stack in fused.named_parameters():
            if name in shared:
                continue
            before = frozen_rows(stack)
            trains = [stack.requires_grad and not (before is not None and before[row]) for row in range(len(fused))]
            for row, member in self.members.items():
                if name in member.parameters:
                    trains[row] = member.parameters[name].requires_grad
            if stack.requires_grad != any(trains):
                stack.requires_grad_(any(trains))
            freeze_rows(stack, None if all(trains) or not any(trains) else ~torch.tensor(trains, device="cpu"))

    def renew(self, fused: FusedModule) -> None:
        """Set members' attributes and modes to those of the array."""
        array, modes = fused._array, fused.training_by_path()
        for row, member in self.members.items():
            member.become(array.skeletons[array.comparison.variants[row]])
            member.set(modes, member.settings.trained)
        if self.members:
            self.hear(fused, self.members)

    def set_modes(self, fused: FusedModule, modes: Mapping[int, Mapping[str, bool]]) -> None:
        """Set the members' modes, given by row and path; other members get those of the array."""
        base = fused.training_by_path()
        for row, member in self.members.items():
            member.set(modes.get(row, base), member.settings.trained)
        if self.members:
            self.hear(fused, self.members)

    def rearranged(self, fused: FusedModule, sources: Sequence[Any], members: int) -> None:
        """Update members: b is now ``sources[b]``, one of the ``members`` former rows or a model that joined."""
        for stack in {id(t): t for t in fused.stacks.values()}.values():
            if (frozen := frozen_rows(stack)) is not None:
                moved = [isinstance(source, int) and bool(frozen[source]) for source in sources]
                freeze_rows(stack, torch.tensor(moved, device="cpu"))
        if not self.members:
            return
        settings = {row: member.settings for row, member in self.members.items()}
        new_rows = _find_new_rows(sources, members)
        before, self.members = self.members, {}
        for row, member in before.items():
            if row in new_rows:
                member.row = new_rows[row]
                self.members[member.row] = member
            else:
                member.leave()
        self.follow(fused)
        array, base = fused._array, MemberSettings(fused.training_by_path(), {}, {})
        for row, source in enumerate(sources):
            # An overwritten member gets the modes, flags and attributes of the one that it is a copy of.
            source_settings = settings.get(source) if isinstance(source, int) else None
            if row not in self.members and source_settings is not None and _modes_differ(source_settings, base):
                self.add(fused, row)
            if row in self.members and source != row and settings.get(row, source_settings) is not None:
                member, source_settings = self.members[row], source_settings or base
                member.become(array.skeletons[array.comparison.variants[row]])
                trained = source_settings.trained or {n: fused.stacks[n].requires_grad for n in member.parameters}
                member.set(source_settings.modes, trained)
        self.hear(fused, self.members)


def differing_settings(views: Views, fused: FusedModule) -> dict[int, MemberSettings]:
    """Return the settings in which members differ from the array, by row. Members must be up to date."""
    base = MemberSettings(fused.training_by_path(), {n: t.requires_grad for n, t in fused.stacks.items()}, {})
    settings = {row: member.settings for row, member in views.members_by_row.items()}
    return {
        row: own
        for row, own in settings.items()
        if _modes_differ(own, base) or own.hooks or any(base.trained[n] != flag for n, flag in own.trained.items())
    }


def restore(views: Views, fused: FusedModule, settings: Mapping[int, MemberSettings]) -> None:
    """Apply the settings that `differing_settings` returned to members."""
    if settings:
        views.note(fused)
    for row, own in settings.items():
        member = views.add(fused, row)
        member.set(own.modes, own.trained)
        for path, hooks in own.hooks.items():
            for hook in hooks:
                hook.register(member.modules[path])


def unfused(fused: FusedModule) -> list[nn.Module]:
    """Return copies of the members as separate models, with the settings of the members."""
    fused._views.update(fused)
    whole, rows = fused._views.locate_members(fused)
    array, stacks = whole._array, dict(tensors(whole))
    shared_copies = {name: row_copy(tensor, None) for name, tensor in stacks.items() if name in array.comparison.shared}
    models = {row: whole._around(row, member_rows(array, row, stacks, shared_copies)) for row in rows}
    for row, settings in differing_settings(whole._views, whole).items():
        if row not in models:
            continue
        modules = dict(models[row].named_modules(remove_duplicate=False))
        # A hook that is a method of a member's module becomes one of the copy's, as in a copy of the model.
        memo = {id(module): modules[path] for path, module in whole._views.members[row].modules.items()}
        for path, module in modules.items():
            module.training = settings.modes[path]
            for hook in settings.hooks.get(path, ()):
                copy.deepcopy(hook, memo).register(module)
        for name, parameter in models[row].named_parameters():
            parameter.requires_grad_(settings.trained.get(name, parameter.requires_grad))
    return list(models.values())


def check_together(fused: FusedModule, feature: str) -> None:
    """Raise FusionError if members run their own code, so that ``feature`` cannot hold them."""
    split = fused._split()
    if split is not None:
        raise FusionError(
            f"members of a fused {fused._original} cannot be computed together: {split.why}. {feature} needs members "
            "of equal modes and flags without hooks: call train() or eval() of the array, and remove the hooks"
        )


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
    table[leaf] = tensor


def _modes_differ(settings: MemberSettings, base: MemberSettings) -> bool:
    """Return whether a member is in other modes than its array, which may have more modules."""
    return any(base.modes[path] != mode for path, mode in settings.modes.items())


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
