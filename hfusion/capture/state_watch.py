"""The Python state of modules while forward runs: attributes, and the lists, dicts and objects that they refer to.

A submodule that runs as an eager fallback keeps its Python state from call to call, as outside of an array. That is
exact only while no code outside of it uses that state: the rest of forward is a graph, which neither repeats
assignments of a parent (``self.cell.state = None``) nor reads the state. A recorded run detects such use: the state is
read whenever a call begins and ends.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.attribute_writes import (
    containers_changed,
    names_in_call,
    names_named,
    read_elsewhere,
    written_by_call,
    written_elsewhere,
)
from hfusion.capture.method_interception import Island
from hfusion.capture.python_state import MUTABLE_CONTAINERS, compared_variables, identity
from hfusion.capture.reachable_code import holders_of
from hfusion.core.errors import FusionError
from hfusion.core.python_values import PLAIN, Link, parts, read_attribute, walk
from hfusion.torch_private.dispatch_modes import disable_current_modes

# Types whose contents are no state of a model.
_LEAVES = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType, nn.Module, fx.Graph)

# By the id of each holder (a module, an object, a container), its items as pairs of a name and the value's `identity`;
# by the full name of each variable of a class or file, one such pair.
State: TypeAlias = Mapping[int | str, Sequence[tuple[Any, Any]]]


@dataclass(frozen=True)
class CallState:
    """The state within reach of a module when a call of it began and ended.

    Attributes:
        before: the state at the beginning.
        after: the state at the end.
        changed_attributes: the attributes that the call changed, or whose contents it changed, with their values. A
            key has the path in the module and the name.
    """

    before: State
    after: State
    changed_attributes: Mapping[tuple[str, str], Any]


@dataclass(frozen=True)
class RunState:
    """The state of a whole model before and after a run of forward, and of each island around each of its calls."""

    start: State
    calls: Mapping[Island, Sequence[CallState]]
    end: State

    @property
    def changes(self) -> bool:
        """Return whether a call, or the run as a whole, changes Python state."""
        borders = [(call.before, call.after) for calls in self.calls.values() for call in calls]
        return any(changed(before, after) for before, after in [*borders, (self.start, self.end)])

    def changed_outside(self, island: Island) -> Set[int | str]:
        """Return the holders within reach of ``island`` that change outside of its calls."""
        calls = self.calls.get(island, ())
        ends, starts = [self.start, *(call.after for call in calls)], [*(call.before for call in calls), self.end]
        return {holder for end, start in zip(ends, starts, strict=True) for holder in changed(end, start)}

    def changed_inside(self, island: Island) -> Set[int | str]:
        """Return the holders that change during the calls of ``island``."""
        return {holder for call in self.calls.get(island, ()) for holder in changed(call.before, call.after)}


@dataclass(frozen=True, eq=False)
class ModelState:
    """The Python state of a ``model`` in two recorded runs; the second starts from the state after the first."""

    model: nn.Module
    reader: StateReader
    runs: Sequence[RunState]

    def shared(self, island: Island) -> str | None:
        """Return an attribute below ``island`` that other code can change, or read while it changes; None if none."""
        module = self.model.get_submodule(island.path)
        within = set(module.modules())
        others = [part for part in self.model.modules() if part not in within]
        inside, outside = self.reader.read(module), self.reader.reach(others)
        shared_holders = inside.keys() & outside.keys()
        present = self.reader.assignable(inside)
        written = written_by_call(island, module) & written_elsewhere(island, module, others) & present
        written |= self._read_while_assigned(island, module, others, inside, shared_holders)
        if written:
            return min(written)
        last = self.runs[-1]
        # Other calls, such as that of the next member, see variables that a call changed. Caches are filled by now.
        variables = {key for key in last.changed_inside(island) if isinstance(key, str)}
        named = names_in_call(island, module)
        variables |= {k for k in last.changed_outside(island) if isinstance(k, str) and k.rpartition(".")[2] in named}
        if variables:
            return min(variables)
        for run in self.runs:
            keys = (run.changed_outside(island) & inside.keys()) | (run.changed_inside(island) & shared_holders)
            holders = {key for key in keys if not isinstance(key, str)}
            if holders:
                return self.reader.name(module, holders)
        return None

    def _read_while_assigned(
        self,
        island: Island,
        module: nn.Module,
        others: Sequence[nn.Module],
        inside: State,
        shared_holders: Set[int | str],
    ) -> Set[str]:
        """Return the attributes that a call of ``island`` may change and other code may read, even if no run shows it.

        Rare values of a batch may set a flag that all later calls depend on.
        """
        read = read_elsewhere(others)
        assigned = written_by_call(island, module) & read & self.reader.assignable(inside)
        containers = self.reader.containers(shared_holders) & containers_changed(island, module) & names_named(others)
        return assigned | containers


def changed(before: State, after: State) -> Set[int | str]:
    """Return the holders in both states whose items differ."""
    return {holder for holder, items in after.items() if before.get(holder, items) != items}


class StateReader:
    """Reads states. The objects read are kept alive, so that no id is reused."""

    def __init__(self, model: nn.Module) -> None:
        self._alive: dict[int, Any] = {}
        self._variables = holders_of(model)

    def read(self, module: nn.Module) -> State:
        """Return the state within reach of ``module`` and its submodules, and all variables that code names."""
        variables = compared_variables(self._variables)
        return {**self.reach(module.modules()), **{name: [(name, value)] for name, value in variables}}

    def reach(self, roots: Iterable[Any]) -> State:
        """Return the state within reach of ``roots``: modules without their submodules, objects, containers."""
        state: dict[int | str, Sequence[tuple[Any, Any]]] = {}

        def visit(holder: Any) -> list[Any]:
            held = list(_named_parts(holder))
            state[id(holder)] = [(name, identity(value)) for name, value in held]
            return [value for _, value in held if not isinstance(value, _LEAVES)]

        self._alive |= walk(roots, visit)
        return state

    def assignable(self, state: State) -> Set[Any]:
        """Return the attributes in ``state`` of modules, and of objects whose classes are in files that define modules.

        Assignments in forward's code are known by names alone, and a configuration has many names.
        """
        holders = [(key, self._alive[key]) for key in state if isinstance(key, int)]
        files = {type(holder).__module__ for _, holder in holders if isinstance(holder, nn.Module)}
        return {name for key, holder in holders if type(holder).__module__ in files for name, _ in state[key]}

    def containers(self, state: Collection[int | str]) -> Set[str]:
        """Return the attributes that hold a list, dict or set among the holders in ``state``."""
        return {
            name
            for holder in list(self._alive.values())
            if read_attribute(holder, "__dict__", None) is not None and not isinstance(holder, Tensor)
            for name, value in _named_parts(holder)
            if isinstance(value, MUTABLE_CONTAINERS) and id(value) in state
        }

    def name(self, module: nn.Module, holders: Set[int | str]) -> str:
        """Return the path of an attribute of ``module`` or its submodules that leads to one of ``holders``."""
        for path, part in module.named_modules():
            for name, value in python_attributes(part):
                if not isinstance(value, _LEAVES) and holders & self.reach([value]).keys():
                    return f"{path}.{name}".strip(".")
        return next((path or type(part).__name__ for path, part in module.named_modules() if id(part) in holders), "")

    def changed_attributes(self, module: nn.Module, before: State, after: State) -> dict[tuple[str, str], Any]:
        """Return the attributes that a call changed, see `CallState.changed_attributes`."""
        holders = changed(before, after)
        if not holders:
            return {}
        return {
            (path, name): value
            for path, part in module.named_modules()
            for name, value in python_attributes(part)
            if (id(part) in holders and (name, identity(value)) not in before[id(part)])
            or (not isinstance(value, _LEAVES) and holders & self.reach([value]).keys())
        }


def _named_parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes and items of a holder by name; for a module, the attributes that its author set."""
    if isinstance(holder, nn.Module):
        yield from python_attributes(holder)
        return
    for link, name, value in parts(holder):
        yield name if link is Link.ATTRIBUTE else (link, identity(name)), value


def hide(island: Island, module: nn.Module, assigned: Mapping[tuple[str, str], Any]) -> None:
    """Replace the attributes that a loop over members may set by objects that raise when they are read.

    Args:
        module: the module of ``island``, while forward is traced.
        assigned: the attributes that a recorded call changed, see `CallState.changed_attributes`.
    """
    written = written_by_call(island, module)
    for path, part in module.named_modules():
        for name, value in python_attributes(part):
            # None stays readable: code may test whether a call left a value.
            if (path, name) in assigned and assigned[path, name] is None:
                vars(part)[name] = None
            elif (path, name) in assigned or name in written:
                where = ".".join(filter(None, (island.path, path, name)))
                tensor = isinstance(assigned.get((path, name), value), Tensor)
                vars(part)[name] = _unseen_tensor(where) if tensor else _Unseen(where)


def _refuse(where: str) -> NoReturn:
    raise FusionError(
        f"forward reads the attribute {where}, which a call that runs in a loop over members leaves; return from the "
        "call what is read outside of it"
    )


class _UnseenTensor(Tensor):
    """A tensor that raises a FusionError when it is used."""

    hfusion_where: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(
            next(leaf.hfusion_where for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _UnseenTensor))
        )


def _unseen_tensor(where: str) -> _UnseenTensor:
    with disable_current_modes():
        unseen: _UnseenTensor = torch.empty(0, device="cpu").as_subclass(_UnseenTensor)
    unseen.hfusion_where = where
    return unseen


class _Unseen:
    """Any other value that raises a FusionError when it is used."""

    def __init__(self, where: str) -> None:
        object.__setattr__(self, "where", where)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self.where)


def _raising(self: _Unseen, *args: Any) -> NoReturn:
    _refuse(self.where)


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_READS = ["bool", "len", "iter", "next", "call", "getitem", "setitem", "contains", "index", "int", "float", "enter"]
_READS += ["eq", "ne", "lt", "le", "gt", "ge", "hash", "neg", "abs", "str", "repr", "format", "reversed", "setattr"]
for _name in [*_BINARY, *(f"r{name}" for name in _BINARY), *_READS]:
    setattr(_Unseen, f"__{_name}__", _raising)
