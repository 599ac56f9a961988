"""The members of an array as modules that live as long as their rows, and the changes made to them.

There is one module for each row, created on first access. Its tensors share the memory of the row, gradients are tied
(`core.row_gradients`), and `heed`, at every call of the array, applies the changes made to a member: attributes become
those of its variant; modes and hooks divide the members (`split`); parameters that some members do not train are
noted on their stack. Changes that an array cannot represent are refused there, by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hfusion.array.member_module import RowView, settings_of, tensor_states, without_hooks
from hfusion.array.member_relocation import check_fits, put_tensor, rearranged
from hfusion.array.members_apart import MembersApart, apart, flags_read
from hfusion.array.variable_states import MAX_VALUES
from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import live_rows, skeleton
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import freeze_rows, frozen_rows
from hfusion.core.row_gradients import RowGradients, lies_in

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


_MODE, _TRAINED = attrgetter("training"), attrgetter("requires_grad")


class Views:
    """The members that were accessed, by row.

    Attributes:
        split: the members, if they differ in modes or hooks and so run their own code; None otherwise.
        touched: whether a member may have been changed since the last `heed`.
        words: counts assignments of attributes and hooks of members, so that a change invalidates traces of the array.
        watched: the rows of members that are referenced outside, or were read since.
    """

    def __init__(self, fused: FusedModule) -> None:
        self._fused = weakref.ref(fused)
        self.members: dict[int, RowView] = {}
        self.split: MembersApart | None = None
        self.touched = False
        self.words = 0
        self.attributes = AttributeChanges()
        self.ties: dict[int, RowGradients] = {}
        self.slices: weakref.WeakValueDictionary[range, FusedModule] = weakref.WeakValueDictionary()
        self.watched: set[int] = set()
        self._modes: list[bool] = []
        self._names: list[str] = []
        self._stacks: list[Tensor] = []
        self._trained: list[bool] = []
        self._addresses: list[int] = []
        # The members' parameters, the row of each, and its reference counts: our own, and at the last check.
        self._flat, self._rows = list[Tensor](), list[int]()
        self._states: Any = None
        self._own_counts, self._last_counts = list[int](), list[int]()

    def __bool__(self) -> bool:
        return bool(self.members)

    @property
    def members_by_row(self) -> Mapping[int, RowView]:
        """The members by row; in a slice, the members of the whole array by their rows in the slice."""
        return self.members

    def _touch(self, row: int, changed: bool) -> None:
        """Record that member ``row`` was read, or that it may have been ``changed``."""
        self.touched = True
        self.words += changed
        if row not in self.watched and row in self.members:
            self.watched.add(row)
            self._settle_row(row)

    def _settle_row(self, row: int) -> None:
        for tie in self.ties.values():
            if row in tie.rows:
                tie.settle([row])

    def _called(self) -> None:
        """Prepare a member for a call: its array may have been moved or changed."""
        if (fused := self._fused()) is not None:
            self._catch_up(fused)

    def _catch_up(self, fused: FusedModule) -> None:
        if self._array_changed(fused):
            self._pass_on(fused)
            self.note(fused)

    def get(self, fused: FusedModule, row: int) -> nn.Module:
        """Return member ``row``, whose tensors share the current memory of the row."""
        if not self.members:
            self.note(fused)
        if row not in self.members:
            self.add(fused, row)
        self._catch_up(fused)
        self.members[row].touch()
        return self.members[row].model

    def add(self, fused: FusedModule, row: int) -> RowView:
        array, shared = fused._array, fused._array.comparison.shared
        stacks = fused.stacks
        array.check_stacks(stacks)
        rows = {name: t if name in shared else live_rows(t, row) for name, t in stacks.items()}
        for name, tensor in rows.items():
            frozen = frozen_rows(stacks[name])
            if name not in shared and frozen is not None and frozen[row]:
                tensor.requires_grad_(False)
        model = fused._around(row, rows)
        member = self.members[row] = RowView(model, row, shared, self._touch, self._called)
        del rows, model
        self.watched.add(row)
        self._align(fused, [row])
        member.mark_changes_applied()
        self.index()
        return member

    def note(self, fused: FusedModule) -> None:
        """Record the state of the array, to detect changes that apply to all members."""
        self._modes = list(map(_MODE, fused._branches))
        self._names, self._stacks = list(fused._real.keys()), list(fused._real.values())
        self._trained, self._addresses = self._stack_states()

    def _stack_states(self) -> tuple[list[bool], list[int]]:
        return list(map(_TRAINED, self._stacks)), list(map(Tensor.data_ptr, self._stacks))

    def follow(self, fused: FusedModule) -> None:
        """Make the members' tensors views of the array's tensors again, after their memory has changed."""
        self._cut_slices()
        if self.members:
            self._align(fused, list(self.members))
            self.note(fused)

    def _cut_slices(self) -> None:
        """Turn slices into independent arrays, which keep the memory that they share now."""
        for part in list(self.slices.values()):
            part._views = Views(part)
        self.slices.clear()

    def _align(self, fused: FusedModule, rows: Sequence[int]) -> None:
        stacks, shared = fused.stacks, fused._array.comparison.shared
        fused._array.check_stacks(stacks)
        for name, stack in stacks.items():
            if name in shared:
                for row in rows:
                    put_tensor(self.members[row].model, name, stack)
                continue
            tie = self._tie(stack) if isinstance(stack, nn.Parameter) else None
            for row in rows:
                member = self.members[row]
                tensor = (member.parameters if tie is not None else member.buffers).get(name)
                if tensor is None:
                    continue
                if not lies_in(tensor, stack, row):
                    if tie is not None and (tensor.dtype, tensor.device) != (stack.dtype, stack.device):
                        tie.untie(row)
                        tensor.grad = None
                    tensor.data = live_rows(stack, row).data
                if tie is not None:
                    tie.tie(row, tensor)
        stack_ids = {id(stack) for stack in stacks.values()}
        self.ties = {key: tie for key, tie in self.ties.items() if key in stack_ids}

    def _tie(self, stack: Tensor) -> RowGradients:
        if id(stack) not in self.ties:
            self.ties[id(stack)] = RowGradients(stack, self.watched)
        return self.ties[id(stack)]

    def rearranged(self, fused: FusedModule, sources: Sequence[Any], members: int) -> None:
        """Update members: b is now ``sources[b]``, one of the ``members`` former rows or a model that joined."""
        rearranged(self, fused, sources, members)

    def settle(self) -> None:
        """Synchronize the gradients of members and of the array, after some were assigned."""
        for tie in self.ties.values():
            tie.settle()

    def update(self, fused: FusedModule) -> None:
        """Apply the changes made to members since the last call. Raises FusionError as `heed` does."""
        if self.members:
            self.heed(fused)

    def locate_members(self, fused: FusedModule) -> tuple[FusedModule, Sequence[int]]:
        """Return the array to which the members belong, and their rows there."""
        return fused, range(len(fused))

    def heed(self, fused: FusedModule, calling: bool = False) -> MembersApart | None:
        """Apply the changes made to members since the last call, and return how the array computes them.

        Args:
            calling: for a call of the array, which may run the members' own code; otherwise, programs and skeletons
                must have the present attributes.

        Raises:
            FusionError: an array cannot represent a change made to a member.
        """
        if self.touched or self._changed(fused) or self.attributes.pending(calling):
            self._hear_all(fused, calling)
        return self.split

    def _array_changed(self, fused: FusedModule) -> bool:
        modes = list(map(_MODE, fused._branches))
        return modes != self._modes or self._stack_states() != (self._trained, self._addresses)

    def _changed(self, fused: FusedModule) -> bool:
        if self._array_changed(fused):
            return True
        counts = list(map(getrefcount, self._flat))
        if tensor_states(self._flat) != self._states:
            # Autograd may have held a reference when ours were counted, so a parameter that is held is not watched.
            self.watched |= set(self._rows)
            return True
        if counts == self._own_counts:
            self._release(set())
        elif counts != self._last_counts:
            self._last_counts = counts
            self._watch_held(counts)
        return False

    def _watch_held(self, counts: list[int]) -> set[int]:
        """Watch and return the rows whose parameters have more references than our own, so are held outside."""
        self._own_counts = list(map(min, counts, self._own_counts))
        held = {row for row, count, base in zip(self._rows, counts, self._own_counts, strict=True) if count > base}
        for row in held - self.watched:
            self._settle_row(row)
        self.watched |= held
        return held

    def index(self) -> None:
        """List the members' parameters, with the number of our own references to each."""
        own_counts = {id(t): count for t, count in zip(self._flat, self._own_counts, strict=True)}
        self._flat = [t for member in self.members.values() for t in member.flat]
        self._rows = [row for row, member in self.members.items() for _ in member.flat]
        self._states = tensor_states(self._flat)
        self._last_counts = list(map(getrefcount, self._flat))
        self._own_counts = [own_counts.get(id(t), last) for t, last in zip(self._flat, self._last_counts, strict=True)]

    def _hear_all(self, fused: FusedModule, calling: bool) -> None:
        self._pass_on(fused)
        rows = [row for row in self.watched if self.members[row].may_have_changed()]
        for row in rows:
            self._hear_tensors(fused, row, self.members[row])
        changed = [row for row in rows if self.members[row].changed]
        if contents := self.attributes.to_capture(self, fused, changed, calling):
            self._renew(fused, contents)
        self.hear(fused, rows)

    def hear(self, fused: FusedModule, rows: Iterable[int]) -> None:
        """Divide members by the changes made to those of ``rows``, and mark the changes as applied."""
        before = {row: self.members[row].trains for row in rows}
        for row in before:
            self.members[row].look()
        if any(self.members[row].trains != trains for row, trains in before.items()):
            self.freeze(fused)
        self._divide(fused)
        self.settle()
        for row in before:
            self.members[row].mark_changes_applied()
        self.touched = False
        self.note(fused)
        self._states = tensor_states(self._flat)
        self._release(self._watch_held(list(map(getrefcount, self._flat))))

    def _release(self, held: set[int]) -> None:
        """Stop watching the members that are no longer referenced outside."""
        for row in [row for row in self.watched if row not in held and not self.members[row].hard_to_watch]:
            self.watched.discard(row)
            for tie in self.ties.values():
                if row in tie.rows:
                    tie.release(row)

    def _pass_on(self, fused: FusedModule) -> None:
        """Pass modes and requires_grad flags that were set on the array's modules and stacks on to all members."""
        changed = [b for b, mode in zip(fused._branches, self._modes, strict=True) if b.training != mode]
        branches = {id(branch): branch for branch in changed}
        for path, branch in fused.named_modules(remove_duplicate=False) if branches else ():
            if id(branch) in branches:
                for member in self.members_by_row.values():
                    if path in member.modules:
                        member.modules[path].training = branch.training
        trained, addresses = self._stack_states()
        for name, stack, flag, old_flag in zip(self._names, self._stacks, trained, self._trained, strict=True):
            if flag != old_flag:
                freeze_rows(stack, None)
                for member in self.members_by_row.values():
                    if name in member.parameters:
                        member.parameters[name].requires_grad_(flag)
        if addresses != self._addresses:
            self._align(fused, list(self.members))

    def _hear_tensors(self, fused: FusedModule, row: int, member: RowView) -> None:
        """Copy tensors that were assigned to a member into its row."""
        stacks, shared = fused.stacks, fused._array.comparison.shared
        current = dict(tensors(member.model))
        recorded = {**member.parameters, **member.buffers, **{name: stacks[name] for name in shared}}
        same_structure = member.same_modules and current.keys() == recorded.keys()
        moved = [n for n, t in current.items() if n not in shared and not (n in stacks and lies_in(t, stacks[n], row))]
        if same_structure and not moved and all(current[name] is tensor for name, tensor in recorded.items()):
            return
        check_fits(fused, row, member.model)
        for name, stack in stacks.items():
            if name in shared and current[name] is not stack:
                raise FusionError(
                    f"{name} of member {row} of a fused {fused._original} was assigned, and is one tensor of all "
                    "members; write into it, or fuse models that have one each"
                )
        with torch.no_grad():
            for name in moved:
                if recorded[name] is not current[name]:
                    recorded[name].data = recorded[name].data.clone()
                target = live_rows(stacks[name], row).data
                target.copy_(current[name].detach())
                current[name].data = target
        member.take_modules()
        member.take_tensors(shared)
        self._align(fused, [row])
        self.index()

    def _renew(self, fused: FusedModule, changed: Mapping[int, Any]) -> None:
        """Update members whose attributes have changed; ``changed`` has their new fingerprints, by row."""
        from hfusion.array.array_editing import Kinds, enter

        kinds, array = Kinds.of(fused), fused._array
        after = list(kinds.contents)
        for row, fingerprint in changed.items():
            if fingerprint not in kinds.skeletons:
                kinds.skeletons[fingerprint] = without_hooks(skeleton(row, self.members[row].model))
            after[row] = fingerprint
        distinct = list(dict.fromkeys(after))
        comparison = replace(array.comparison, variants=tuple(map(distinct.index, after)))
        skeletons = tuple(kinds.skeletons[content] for content in distinct)
        enter(fused, kinds.contents, after, replace(array, skeletons=skeletons, comparison=comparison))
        for row, fingerprint in changed.items():
            self.members[row].fingerprint = fingerprint

    def _divide(self, fused: FusedModule) -> None:
        """Update `split`: None if all members can be computed together."""
        base = fused.training_by_path()
        member_modes = {row: member.training for row, member in self.members.items()}
        modes = [tuple({**base, **member_modes.get(row, {})}.values()) for row in range(len(fused))]
        hooked = {row: f"has a hook at {where}" for row, member in self.members.items() if (where := member.hooked)}
        if self.attributes.changing:
            hooked = dict.fromkeys(range(len(fused)), self.attributes.changing) | hooked
        trained = flags_read(fused)
        if hooked or len(set(modes)) > 1 or any(flags != trained[0] for flags in trained):
            for row in range(len(fused)):
                if row not in self.members:
                    self.add(fused, row)
            by_path = [dict(zip(base, row, strict=True)) for row in modes]
            self.split = apart(by_path, trained, hooked, self.members)
            return
        self.split = None
        for (_, branch), mode in zip(fused.named_modules(remove_duplicate=False), modes[0], strict=True):
            if branch.training != mode:
                branch.training = mode

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
            if id(stack) in self.ties:
                self.ties[id(stack)].watch()

    def to_all(self, path: str, change: Callable[[nn.Module], object]) -> None:
        """Apply ``change`` to the submodule at ``path`` of every member, as it was to the array's."""
        for member in self.members_by_row.values():
            if path in member.modules:
                change(member.modules[path])

    def renew(self, fused: FusedModule, trained: Mapping[str, bool]) -> None:
        """Set members' attributes and modes to those of the array, and requires_grad as in ``trained``, by key."""
        array, modes = fused._array, fused.training_by_path()
        for row, member in self.members.items():
            member.become(array.skeletons[array.comparison.variants[row]])
            member.set(modes, {**settings_of(member).trained, **trained})
        if self.members:
            self.hear(fused, self.members)

    def set_modes(self, fused: FusedModule, modes: Mapping[int, Mapping[str, bool]]) -> None:
        """Set the members' modes, given by row and path; other members get those of the array."""
        base = fused.training_by_path()
        for row, member in self.members.items():
            member.set(modes.get(row, base), settings_of(member).trained)
        if self.members:
            self.hear(fused, self.members)


# Attributes of members that a training loop sets: capture a few values, then run the members' own code.

# Number of calls after which a program is captured again for attributes that have not changed meanwhile: at first, and
# at most. Each such capture doubles it, so that captures cost less than the loops that they save.
_QUIET_CALLS, _MAX_QUIET_CALLS = 8, 512


@dataclass
class AttributeChanges:
    """How often attributes of the members change.

    Attributes:
        changing: why members run their own code now; empty while a program computes them.
        outdated: the members whose attributes are newer than those that programs were captured with.
        states: the number of states of the attributes, beginning with the first.
        quiet: the number of calls since the last change, while members run their own code.
        quiet_calls: the value of ``quiet`` from which on a program is captured again.
    """

    changing: str = ""
    outdated: set[int] = field(default_factory=set)
    states: int = 1
    quiet: int = 0
    quiet_calls: int = _QUIET_CALLS

    def pending(self, calling: bool) -> bool:
        """Return whether `to_capture` has to look, even if no attribute has changed since."""
        return bool(self.changing or (self.outdated and not calling))

    def to_capture(self, views: Views, fused: FusedModule, rows: Sequence[int], calling: bool) -> Mapping[int, Any]:
        """Return the new fingerprints of the members that programs must know from now on, by row.

        Args:
            rows: the members whose attributes may have changed since the last call of this.
            calling: for a call of the array; otherwise, all changes count now.
        """
        names = [views.members[row].take_changed_names() for row in rows]
        is_read = any(map(fused._situations.may_read, names))
        may_wait = calling
        if may_wait and (self.changing or not is_read):
            self.outdated |= set(rows)
            self.quiet = 0 if is_read else self.quiet + 1
            if not self.changing or self.quiet < self.quiet_calls:
                return {}
            self.quiet_calls = min(2 * self.quiet_calls, _MAX_QUIET_CALLS)
        contents: dict[int, Any] = {}
        for row in self.outdated | set(rows):
            member = views.members[row]
            fingerprint = modeless_fingerprint(member.model)
            if member.fingerprint is None:
                member.fingerprint = modeless_fingerprint(fused._member(row))
            if fingerprint != member.fingerprint:
                contents[row] = fingerprint
        if may_wait and not self.changing and contents and _is_new(fused, contents):
            self.states += 1
            if self.states > MAX_VALUES:
                name = min((name for changed in names for name in changed or ()), default="an attribute")
                self._run_own_code(views, fused, name)
                self.outdated = set(contents)
                return {}
        self.outdated, self.changing = set(), ""
        return contents

    def _run_own_code(self, views: Views, fused: FusedModule, name: str) -> None:
        self.changing, self.quiet = f"runs its own code, since {name} changes often", 0
        fused._loops[
            f"{fused._original}: loop over members: {name} of members changes often, and each value needs another "
            "program; give it as an argument of forward, or keep it in a buffer"
        ] = None
        for row in range(len(fused)):
            if row not in views.members:
                views.add(fused, row)


def _is_new(fused: FusedModule, contents: Mapping[int, Any]) -> bool:
    """Return whether there are no programs yet for members with these fingerprints, by row."""
    from hfusion.array.array_editing import Kinds

    after = [contents.get(row, content) for row, content in enumerate(Kinds.of(fused).contents)]
    return tuple(after) not in fused._states
