"""The members of an array as modules that live as long as their rows, and the changes made to them.

There is one module for each row, created on first access. Its tensors lie in the memory of the row, and its gradients
are those of the row (`core.gradient_usage`). A member that was handed out may be changed, so `heed` compares it, at
every call of the array, with what programs were made for. New attributes need another program; members that differ in
modes, hooks or what they train run their own code. What an array cannot represent is refused there, by name.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, filterfalse, product
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.array.array_editing import ArrayState, check_valued, enter, find_new_rows, row_copy
from hfusion.array.variable_states import MAX_VALUES
from hfusion.capture.attribute_fingerprint import modeless_fingerprint, python_attributes, registered_names, value_keys
from hfusion.capture.compare_models import check_pair
from hfusion.capture.hooks import is_part_of_forward
from hfusion.capture.python_state import content
from hfusion.capture.registered_tensors import holder_of, tensors
from hfusion.capture.skeleton import live_rows, materialize, skeleton
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import freeze_rows, frozen_rows, lies_in, move, tie, untie
from hfusion.core.membership import copy_tensor_hooks, is_own_hook
from hfusion.core.python_values import PLAIN
from hfusion.core.tree import leaves
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

_MODE, _TRAINED = attrgetter("training"), attrgetter("requires_grad")
_TENSOR_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
# Subclasses of these may have attributes that change.
_FIXED = frozenset({*PLAIN, types.FunctionType, types.BuiltinFunctionType})


class MemberModule:
    """A member that was handed out: ``model``, with tensors in the memory of its row.

    Attributes:
        parameters, buffers: the tensors of ``model`` that are rows of stacks, by key.
        modules: the modules of ``model``, by path.
        hooked: where it has a hook of the user; empty where it has none.
    """

    def __init__(self, model: nn.Module, row: int, shared: frozenset[str]) -> None:
        self.model, self.row, self.hooked = model, row, ""
        self.take(shared)

    def take(self, shared: frozenset[str]) -> None:
        """Adopt the modules and tensors that the model has now."""
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        named = {name: tensor for name, tensor in tensors(self.model) if name not in shared}
        self.parameters = {name: t for name, t in named.items() if isinstance(t, nn.Parameter)}
        self.buffers = {name: t for name, t in named.items() if not isinstance(t, nn.Parameter)}

    @property
    def training(self) -> dict[str, bool]:
        """The modes by path."""
        return {path: module.training for path, module in self.modules.items()}

    @property
    def trained(self) -> dict[str, bool]:
        """Whether parameters require a gradient, by key."""
        return {name: parameter.requires_grad for name, parameter in self.parameters.items()}

    def find_hook(self) -> str:
        """Return the path of a user's hook; empty if there is none."""
        for path, module in self.modules.items():
            hooks = chain.from_iterable(vars(module)[name].values() for name in HOOKS)
            if not all(is_own_hook(hook) or is_part_of_forward(hook) for hook in hooks):
                return path or "(root)"
        for name, parameter in self.parameters.items():
            tables = filter(None, _TENSOR_HOOKS(parameter))
            if not all(is_own_hook(hook) for table in tables for hook in table.values()):
                return name
        return ""

    def leave(self) -> None:
        """Become an independent module, with copies of the tensors, as the row is removed."""
        for tensor in (*self.parameters.values(), *self.buffers.values()):
            move(tensor, tensor.data.clone())
            if isinstance(tensor, nn.Parameter):
                untie(tensor)


class _Watch:
    """What may be changed of ``members``, as it is when this is made.

    An array compares at each of its calls, in half a microsecond for each module, and in more for attributes that are
    containers or objects, which are read by value.
    """

    def __init__(self, members: Iterable[MemberModule]) -> None:
        members = list(members)
        self._modules = [module for member in members for module in member.modules.values()]
        self._held = [vars(module) for module in self._modules]
        self._tables = [attributes[name] for attributes in self._held for name in _TABLES]
        self._filled = [table for table in self._tables if table]
        attributes = [dict(python_attributes(module)) for module in self._modules]
        # A getter of one name alone would give no tuple.
        pairs = zip(map(list, attributes), self._held, strict=True)
        self._readers = [(itemgetter(names[0], *names), held) for names, held in pairs if names]
        self._parameters = list({id(p): p for member in members for p in member.parameters.values()}.values())
        changeable = [(m.model, list(filterfalse(_is_fixed, _values(m.modules.values())))) for m in members]
        self._containers = [value for _, values in changeable for value in filter(_holds_fixed, values)]
        objects = [(model, list(filterfalse(_holds_fixed, values))) for model, values in changeable]
        self._objects = [(registered_names(model), values) for model, values in objects if values]
        self._sizes = list(map(len, self._held)), list(map(len, self._tables))
        self._seen = list(self._read_tables()), list(self._read_attributes())
        self._flags, self._contents = self._read_flags(), self._read_contents()

    def same_attributes(self) -> bool:
        """Return whether the members have the same attributes, and these the same contents."""
        try:
            same = self._sizes[0] == list(map(len, self._held)) and all(
                map(is_, self._read_attributes(), self._seen[1])
            )
        except KeyError:
            return False
        return same and self._read_contents() == self._contents

    def same_tensors(self) -> bool:
        """Return whether the members hold the same tensors, modules and hooks, in the same modes and memory."""
        same = self._sizes[1] == list(map(len, self._tables)) and all(map(is_, self._read_tables(), self._seen[0]))
        return same and self._read_flags() == self._flags

    def _read_tables(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._filled))

    def _read_attributes(self) -> Iterator[Any]:
        return chain.from_iterable([read(attributes) for read, attributes in self._readers])

    def _read_flags(self) -> tuple[Any, ...]:
        # Otherwise, each attribute of a subclass costs a search for its __torch_function__.
        with DisableTorchFunctionSubclass():
            hooks = list(map(len, filter(None, chain.from_iterable(map(_TENSOR_HOOKS, self._parameters)))))
            memory = list(map(Tensor.data_ptr, self._parameters))
            return list(map(_MODE, self._modules)), list(map(_TRAINED, self._parameters)), memory, hooks

    def _read_contents(self) -> list[Any]:
        return [*map(content, self._containers), *(value_keys(names, values) for names, values in self._objects)]


def _values(modules: Iterable[nn.Module]) -> Iterator[Any]:
    return (value for module in modules for _, value in python_attributes(module))


def _is_fixed(value: Any) -> bool:
    """Return whether a value cannot change."""
    kind = type(value)
    return kind in _FIXED or isinstance(value, type | enum.Enum) or (kind is tuple and all(map(_is_fixed, value)))


def _holds_fixed(value: Any) -> bool:
    """Return whether a value is fixed, or a container of such values, which `content` compares by value."""
    kind = type(value)
    items = (*value, *value.values()) if kind is dict else value if kind in (list, set, tuple) else ()
    return _is_fixed(value) or (kind in (dict, list, set, tuple) and all(map(_holds_fixed, items)))


_Assigned = tuple[int, dict[str, Tensor], list[Tensor], list[tuple[Tensor, Tensor | None]]]
"""A member's row, the tensors that were assigned to it by key, those that they replace, and new gradients."""


class Views:
    """The members that were handed out, by row.

    Attributes:
        exposed: whether members were ever handed out, so that calls compare them. Dynamo guards on it.
        split: why the members run their own code; empty if they are computed together.
    """

    def __init__(self) -> None:
        self.members: dict[int, MemberModule] = {}
        self.exposed, self.split = False, ""
        # Of members as they were heard; None where some are still to be heard.
        self._watch: _Watch | None = None
        # Why members run their own code as their attributes change often; how many states of attributes there were;
        # and whether members have attributes that programs, which do not read them, do not know yet.
        self._changing, self._states, self._outdated = "", 1, False
        # The stacks, and the modes of the array and the flags and addresses of stacks when members last followed it.
        self._names, self._stacks = list[str](), list[Tensor]()
        self._seen: tuple[list[bool], list[bool], list[int]] = [], [], []

    def get(self, fused: FusedModule, row: int) -> nn.Module:
        """Return member ``row``, whose tensors share the current memory of the row."""
        if not self.members:
            self.note(fused)
        if row not in self.members:
            self.add(fused, row)
        if self._read_array(fused) != self._seen:
            self._pass_on(fused)
            self.note(fused)
        return self.members[row].model

    def add(self, fused: FusedModule, row: int, like: nn.Module | None = None) -> None:
        """Create the module of member ``row``, in the array's state or in that of ``like``, a skeleton."""
        array, shared, stacks = fused._array, fused._array.comparison.shared, fused.stacks
        array.check_stacks(stacks)
        check_valued(stacks.values())
        rows = {name: t if name in shared else live_rows(t, row) for name, t in stacks.items()}
        trained = {} if like is None else {n: p.requires_grad for n, p in like.named_parameters(remove_duplicate=False)}
        for name, tensor in rows.items():
            if name not in shared and isinstance(tensor, nn.Parameter):
                frozen = frozen_rows(stacks[name])
                default = tensor.requires_grad and not (frozen is not None and bool(frozen[row]))
                tensor.requires_grad_(trained.get(name, default))
        model = fused._around(row, rows) if like is None else materialize(like, rows, _modes(like))
        self.members[row] = MemberModule(model, row, shared)
        self._align(fused, [row])
        self._watch = None

    def note(self, fused: FusedModule) -> None:
        """Record the state of the array, to detect changes that apply to all members."""
        self._names, self._stacks = list(fused._real.keys()), list(fused._real.values())
        self._seen = self._read_array(fused)

    def _read_array(self, fused: FusedModule) -> tuple[list[bool], list[bool], list[int]]:
        memory = list(map(Tensor.data_ptr, self._stacks))
        return list(map(_MODE, fused._branches)), list(map(_TRAINED, self._stacks)), memory

    def _pass_on(self, fused: FusedModule) -> None:
        """Pass modes and requires_grad flags that were set on the array's modules and stacks on to all members."""
        (modes, trained, memory), (new_modes, new_trained, new_memory) = self._seen, self._read_array(fused)
        changed = {id(b) for b, old, new in zip(fused._branches, modes, new_modes, strict=True) if old != new}
        for path, branch in fused.named_modules(remove_duplicate=False) if changed else ():
            if id(branch) in changed:
                self.to_all(path, lambda module, mode=branch.training: setattr(module, "training", mode))  # type: ignore[misc]
        for name, stack, old, new in zip(self._names, self._stacks, trained, new_trained, strict=True):
            if old != new:
                freeze_rows(stack, None)
                for member in self.members.values():
                    if name in member.parameters:
                        member.parameters[name].requires_grad_(new)
        if new_memory != memory:
            self._align(fused, list(self.members))

    def to_all(self, path: str, change: Callable[[nn.Module], object]) -> None:
        """Apply ``change`` to the submodule at ``path`` of every member, as it was to the array's."""
        for member in self.members.values():
            if path in member.modules:
                change(member.modules[path])

    def follow(self, fused: FusedModule) -> None:
        """Make the members' tensors views of the array's tensors again, after their memory has changed."""
        if self.members:
            self._align(fused, list(self.members))
            self.note(fused)

    def _align(self, fused: FusedModule, rows: Sequence[int]) -> None:
        stacks, shared = fused.stacks, fused._array.comparison.shared
        fused._array.check_stacks(stacks)
        check_valued(stacks.values())
        for name, stack in stacks.items():
            for row in rows:
                member = self.members[row]
                if name in shared:
                    _put_tensor(member.model, name, stack)
                    continue
                tensor = member.parameters.get(name, member.buffers.get(name))
                if tensor is not None and not lies_in(tensor, stack, row):
                    move(tensor, live_rows(stack, row).data)
                if isinstance(tensor, nn.Parameter):
                    tie(tensor, stack, row)

    def watch(self) -> None:
        """Let `are_unchanged` compare with the present state of the members, unless they were heard already."""
        self._watch = self._watch or _Watch(self.members.values())

    def are_unchanged(self) -> bool:
        """Return whether members are as they were when they were heard."""
        return self._watch is not None and self._watch.same_attributes() and self._watch.same_tensors()

    def update(self, fused: FusedModule) -> None:
        """Apply the changes made to members since the last call. Raises FusionError as `heed` does."""
        if self.members:
            self.heed(fused)

    def heed(self, fused: FusedModule, calling: bool = False) -> str:
        """Apply the changes made to members since the last call, and return why members are computed apart, if so.

        Args:
            calling: for a call of the array, which may run the members' own code; otherwise, programs and skeletons
                must have the present attributes.

        Raises:
            FusionError: an array cannot represent a change made to a member.
        """
        array_changed = self._read_array(fused) != self._seen
        if array_changed:
            self._pass_on(fused)
        watch = self._watch
        same_attributes = watch is not None and watch.same_attributes() and (calling or not self._outdated)
        if array_changed or watch is None or not same_attributes or not watch.same_tensors():
            self._hear_tensors(fused)
            if not same_attributes:
                self._hear_attributes(fused, calling)
            self.hear(fused)
        return self.split

    def hear(self, fused: FusedModule) -> None:
        """Accept the modes, flags and hooks of members, and divide members by them."""
        for member in self.members.values():
            member.hooked = member.find_hook()
        self._freeze(fused)
        self._divide(fused)
        self.note(fused)
        self._watch = _Watch(self.members.values())

    def _hear_tensors(self, fused: FusedModule) -> None:
        """Copy tensors that were assigned to members into their rows, as if all were read before one is written."""
        shared, stacks = fused._array.comparison.shared, fused.stacks
        assigned = [found for row, member in self.members.items() if (found := self._assigned(fused, row, member))]
        owners: dict[int, int] = {}
        for row, member in self.members.items() if assigned else ():
            for name, tensor in tensors(member.model):
                if name not in shared and (first := owners.setdefault(id(tensor), row)) != row:
                    raise FusionError(
                        f"{name} of member {row} of a fused {fused._original} was assigned, and is one tensor with one "
                        f"of member {first}, and members have one each: assign a copy"
                    )
        with torch.no_grad():
            values = {(row, name): t.detach().clone() for row, current, _, _ in assigned for name, t in current.items()}
            for _, _, replaced, _ in assigned:
                for before in replaced:
                    move(before, before.data.clone())
                    if isinstance(before, nn.Parameter):
                        untie(before)
            for row, current, _, _ in assigned:
                for name, tensor in current.items():
                    target = live_rows(stacks[name], row).data
                    target.copy_(values[row, name])
                    move(tensor, target)
        for row, _, _, grads in assigned:
            self.members[row].take(shared)
            self._align(fused, [row])
            for tensor, grad in grads:
                tensor.grad = grad

    def _assigned(self, fused: FusedModule, row: int, member: MemberModule) -> _Assigned | None:
        """Return what was assigned to a member; None for nothing."""
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
            return None
        _check_fits(fused, row, member.model)
        for name, stack in stacks.items():
            if name in shared and current[name] is not stack:
                raise FusionError(
                    f"{name} of member {row} of a fused {fused._original} was assigned, and is one tensor of all "
                    "members; write into it, or fuse models that have one each"
                )
        replaced = [recorded[name] for name in moved if recorded[name] is not current[name]]
        new = [t for name, t in current.items() if t is not recorded[name] and isinstance(t, nn.Parameter)]
        grads: list[tuple[Tensor, Tensor | None]] = [(t, None if t.grad is None else t.grad.clone()) for t in new]
        return row, {name: current[name] for name in moved}, replaced, grads

    def _hear_attributes(self, fused: FusedModule, calling: bool) -> None:
        """Let the array describe members by their present attributes, if programs may read those that changed.

        A training loop may set attributes at every step: a few values are captured, then members run their own code.
        """
        self._outdated = calling and bool(self._changing)
        if self._outdated:
            return
        before, added = fused._array.contents, dict[Any, nn.Module]()
        contents = {row: modeless_fingerprint(member.model) for row, member in self.members.items()}
        changed = {row: content for row, content in contents.items() if content != before[row]}
        differing = [_differing_names(content, before[row]) for row, content in changed.items()]
        after = [changed.get(row, content) for row, content in enumerate(before)]
        if calling and changed:
            readers = [fused._situations, *(array._situations for _, array in fused._methods.values())]
            self._outdated = not any(reader.may_read(names) for reader in readers for names in differing)
            if not self._outdated and tuple(after) not in fused._states:
                self._states += 1
                if self._states > MAX_VALUES:
                    name = min((name for names in differing for name in names or ()), default="an attribute")
                    self._changing = f"{name} of members changes often, and each value needs another program"
                    self._outdated = True
        if changed and not self._outdated:
            for row, content in changed.items():
                if content not in added and content not in before:
                    # Without the user's hooks, which only the member's own code runs.
                    added[content] = bare = skeleton(row, self.members[row].model)
                    for module, name in product(bare.modules(), HOOKS):
                        table = getattr(module, name)
                        for key in [key for key, hook in table.items() if not is_part_of_forward(hook)]:
                            del table[key]
            enter(fused, after, fused._array.of_contents(after, added))

    def _divide(self, fused: FusedModule) -> None:
        """Update `split`: empty if all members can be computed together."""
        base = fused.training_by_path()
        modes = [{**base, **self.members[b].training} if b in self.members else base for b in range(len(fused))]
        frozen = {name: flags for name, stack in fused.stacks.items() if (flags := frozen_rows(stack)) is not None}
        hooked = [(row, member.hooked) for row, member in sorted(self.members.items()) if member.hooked]
        reasons = [f"member {row} has a hook at {where}" for row, where in hooked]
        if (path := next((p for p in base if any(own[p] != modes[0][p] for own in modes)), None)) is not None:
            rows = [[row for row, own in enumerate(modes) if own[path] == mode] for mode in (True, False)]
            reasons.append(f"{path or 'member'} is in train mode in members {rows[0]}, in eval mode in {rows[1]}")
        if frozen:
            name, not_trained = next(iter(frozen.items()))
            reasons.append(f"members {not_trained.nonzero().reshape(-1).tolist()} do not train {name}")
        if self._changing:
            reasons.append(f"{self._changing}; give it as an argument of forward, or keep it in a buffer")
        self.split = "; ".join(reasons)
        for path, branch in fused.named_modules(remove_duplicate=False) if not reasons else ():
            branch.training = modes[0][path]

    def _freeze(self, fused: FusedModule) -> None:
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

    def release(self, fused: FusedModule, rows: Iterable[int]) -> None:
        """Let the members in ``rows`` go on as independent modules, with their hooks."""
        leaving = [self.members.pop(row) for row in rows if row in self.members]
        for member in leaving:
            member.leave()
        if leaving:
            self.hear(fused)

    def rearranged(self, fused: FusedModule, sources: Sequence[Any]) -> None:
        """Update members: b is now ``sources[b]``, a former row or a model that joined."""
        for stack in {id(t): t for t in fused.stacks.values()}.values():
            if (frozen := frozen_rows(stack)) is not None:
                moved = [isinstance(source, int) and bool(frozen[source]) for source in sources]
                freeze_rows(stack, torch.tensor(moved, device="cpu"))
        if not self.members:
            return
        before, new_rows, self.members = self.members, find_new_rows(sources), {}
        copied = [(row, source) for row, source in enumerate(sources) if source in before and new_rows[source] != row]
        # A copy of a member has its modes and hooks.
        likes = {row: (skeleton(source, before[source].model), before[source]) for row, source in copied}
        for row, member in before.items():
            if row in new_rows:
                member.row = new_rows[row]
                self.members[member.row] = member
            else:
                member.leave()
        self.follow(fused)
        base = fused.training_by_path()
        for row, (like, member) in likes.items():
            if member.hooked or any(base[path] != mode for path, mode in _modes(like).items()):
                self.add(fused, row, like)
                copy_tensor_hooks(member.model, self.members[row].model)
        self.hear(fused)


def _modes(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules(remove_duplicate=False)}


def _differing_names(content: Any, other: Any) -> frozenset[str] | None:
    """Return the names of the attributes by which two `modeless_fingerprint` differ; None if more does."""
    if content[1:] != other[1:]:
        return None
    return frozenset(name.rpartition(".")[2] for name, _ in set(content[0]) ^ set(other[0]))


def _put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer ``name`` of ``model`` to ``tensor``."""
    table, leaf, _ = holder_of(model, name)
    table[leaf] = tensor


def differing_members(views: Views, fused: FusedModule) -> dict[int, nn.Module]:
    """Return skeletons of the members that differ from the array in modes, flags or hooks, by row.

    Members must be up to date.
    """
    base, trained = fused.training_by_path(), {name: stack.requires_grad for name, stack in fused.stacks.items()}
    return {
        row: skeleton(row, member.model)
        for row, member in views.members.items()
        if member.hooked
        or any(base[path] != mode for path, mode in member.training.items())
        or any(trained[name] != flag for name, flag in member.trained.items())
    }


def unfused(fused: FusedModule) -> list[nn.Module]:
    """Return copies of the members as separate models, with the settings of the members."""
    fused._views.update(fused)
    array, stacks, members = fused._array, dict(tensors(fused)), fused._views.members
    array.check_stacks(stacks)
    copies = {name: row_copy(stacks[name], None) for name in array.comparison.shared}
    models = []
    for row in range(len(fused)):
        rows = {name: copies[name] if name in copies else row_copy(stacks[name], row) for name in array.shapes}
        member = members.get(row)
        # With its hooks: a method of one of its modules becomes one of the copy's.
        if member is None:
            models.append(fused._around(row, rows))
            continue
        models.append(materialize(skeleton(row, member.model), rows, member.training))
        trained = member.trained
        for name, parameter in models[-1].named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
    return models


def check_together(fused: FusedModule, feature: str) -> None:
    """Raise FusionError if members run their own code, so that ``feature`` cannot hold them."""
    split = fused._split()
    if split:
        needs = "of equal modes and flags without hooks: call train() or eval() of the array, and remove the hooks"
        if fused._views._changing:
            needs = "whose attributes keep their values"
        raise FusionError(
            f"members of a fused {fused._original} cannot be computed together: {split}. {feature} needs "
            f"members {needs}"
        )


def _check_fits(fused: FusedModule, row: int, model: nn.Module) -> None:
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


# Train and eval of arrays whose members override them, and a context in which an array is in eval mode.
# A frozen backbone, a teacher, adapters that merge: each member's own method runs, and what it changes is a change made
# to that member.


def own_modes(model: nn.Module) -> bool:
    """Return whether a module of ``model`` overrides train or eval."""
    classes = {type(module) for module in model.modules()}
    overridden = any(kind.train is not nn.Module.train or kind.eval is not nn.Module.eval for kind in classes)
    return overridden or any(not vars(module).keys().isdisjoint(("train", "eval")) for module in model.modules())


def switch_mode(fused: FusedModule, path: str, set_mode: Callable[[nn.Module], object]) -> None:
    """Call the members' own train or eval.

    Raises:
        FusionError: a member writes into a tensor that all share, or an array cannot hold what it does. Modules,
            tensors and modes are then as before.
    """
    fused._split()
    members = list(fused)
    before = [(dict(tensors(member)), [(module, module.training) for module in member.modules()]) for member in members]
    shared = {name: stack for name, stack in fused.stacks.items() if name in fused._array.comparison.shared}
    try:
        for index, member in enumerate(members):
            for module, name in product(member.get_submodule(path).modules(), ("train", "eval")):
                method = vars(module).get(name)
                if method is not None and not (isinstance(method, types.MethodType) and method.__self__ is module):
                    raise FusionError(
                        f"model {index}: {name} of {type(module).__name__} was set to {method}, which does not work on "
                        "copies of the module. Define it in the class, or set types.MethodType(function, module)."
                    )
            with _Unwritten(index, shared):
                set_mode(member.get_submodule(path))
        fused._split()
    except FusionError:
        for member, (held, modes) in zip(members, before, strict=True):
            for name, tensor in held.items():
                _put_tensor(member, name, tensor)
            for module, training in modes:
                module.training = training
        raise


@contextmanager
def evaluating(fused: FusedModule) -> Iterator[None]:
    """Context manager: see `FusedModule.evaluating`."""
    fused._split()
    views, state = fused._views, ArrayState(fused._number, fused._array, fused._compiler)
    own = own_modes(fused._array.skeletons[0])
    values = [(t, t.requires_grad, t.detach().clone()) for t in fused.stacks.values()] if own else []
    modes = [(branch, branch.training) for branch in fused._branches]
    before = [(module, dict(vars(module))) for member in views.members.values() for module in member.modules.values()]
    trained_parameters = [(p, p.requires_grad) for member in views.members.values() for p in member.parameters.values()]
    fused.eval()
    written = any(t.requires_grad != trained or not torch.equal(t.detach(), value) for t, trained, value in values)
    try:
        if written:
            with torch.no_grad():
                for tensor, trained, value in values:
                    tensor.requires_grad_(trained).copy_(value)
            for parameter, trained in trained_parameters:
                parameter.requires_grad_(trained)
            raise FusionError(
                f"the own eval of {fused._original} changes parameters or buffers, and this evaluation uses them as "
                "training has them; evaluate the trained models by themselves"
            )
        yield
    finally:
        for branch, training in modes:
            branch.training = training
        fused._enter(state)
        # Members that were created meanwhile have the modes of the array.
        base = fused.training_by_path()
        for member in views.members.values():
            for path, module in member.modules.items():
                module.training = base[path]
        for module, held in before:
            module.__dict__.clear()
            module.__dict__.update(held)
        if views.members:
            views.hear(fused)


class _Unwritten(TorchDispatchMode):
    """Refuses writes into the tensors that all members share, before they happen."""

    def __init__(self, index: int, shared: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in shared.items()}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                argument = args[position] if position < len(args) else kwargs.get(parameter.name)
                for name in (self._names.get(t.untyped_storage().data_ptr()) for t in leaves(argument, Tensor)):
                    if name is not None:
                        raise FusionError(
                            f"the own train or eval of model {self._index} writes into {name}, which all members "
                            "share. Give each model its own copy of it before fusing"
                        )
        return func(*args, **kwargs)
