"""The Python state of modules while forward runs: attributes, and the lists, dicts and objects that they refer to.

A submodule that runs as an eager fallback is called with the state of the member that was captured, beside a graph that
assigns nothing. So no state within its reach may change while forward runs, and no code may change it in later calls:
such a forward runs as a whole, as the members' own code. A recorded run shows what it changes itself; what only rare
values change is looked for in the code.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor, fx, nn

from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.attribute_writes import names_written
from hfusion.capture.method_interception import Island
from hfusion.capture.python_state import MUTABLE_CONTAINERS, compared_variables, identity
from hfusion.capture.reachable_code import holders_of
from hfusion.capture.registered_tensors import tensors
from hfusion.core.python_values import PLAIN, IdentityRef, Link, parts, walk

# Types whose contents are no state of a model.
_LEAVES = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType, nn.Module, fx.Graph)

# By the id of each holder (a module, an object, a container), its items as pairs of a name and the value's `identity`;
# by the full name of each variable of a class or file, one such pair.
State: TypeAlias = Mapping[int | str, Sequence[tuple[Any, Any]]]


class StateWatch:
    """Compares the state of ``model`` with that at the beginning of a run of its forward.

    Attributes:
        changing: the islands of which a call began or ended with another state in reach, with an attribute of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changing: dict[Island, str] = {}
        self._model, self._variables = model, holders_of(model)
        # The objects read are kept, so that no id is used again.
        self._alive: dict[int, Any] = {}
        self._registered = {id(tensor) for _, tensor in tensors(model)}
        self._start = self._read(model)

    def look(self, island: Island, module: nn.Module) -> None:
        """Compare the state in reach of ``module``, of which a call begins or ends."""
        if island not in self.changing:
            state = self._read(module)
            changed = {holder for holder, items in state.items() if self._start.get(holder, items) != items}
            if changed:
                self.changing[island] = self._name(module, changed)

    def written(self, island: Island) -> str | None:
        """Return an attribute in reach of ``island`` that forward changes, or may change; None if there is none."""
        if island in self.changing:
            return self.changing[island]
        state = self._reach(self._model.get_submodule(island.path).modules())
        holders = [self._alive[key] for key in state if isinstance(key, int)]
        # Assignments in code are known by names alone, and objects of other files, such as a configuration, have many.
        files = {type(holder).__module__ for holder in holders if isinstance(holder, nn.Module)}
        own = [held for held in holders if type(held).__module__ in files or type(held) is types.SimpleNamespace]
        assigned, filled = self._names_written
        names = {name for holder in own for name, _ in state[id(holder)]} & assigned
        names |= {
            name
            for holder in holders
            for name, value in _named_parts(holder)
            if isinstance(value, MUTABLE_CONTAINERS) and name in filled
        }
        return min(names, default=None)

    @cached_property
    def _names_written(self) -> tuple[frozenset[Any], frozenset[Any]]:
        return names_written(self._model)

    def _read(self, module: nn.Module) -> State:
        """Return the state in reach of ``module`` and its submodules, and all variables that code names."""
        variables = compared_variables(self._variables)
        return {**self._reach(module.modules()), **{name: [(name, value)] for name, value in variables}}

    def _reach(self, roots: Iterable[Any]) -> State:
        """Return the state in reach of ``roots``: modules without their submodules, objects, containers."""
        state: dict[int | str, Sequence[tuple[Any, Any]]] = {}

        def visit(holder: Any) -> list[Any]:
            held = list(_named_parts(holder))
            # What is written into registered tensors is no Python state.
            state[id(holder)] = [
                (name, IdentityRef(value) if id(value) in self._registered else identity(value)) for name, value in held
            ]
            return [value for _, value in held if not isinstance(value, _LEAVES)]

        self._alive |= walk(roots, visit)
        return state

    def _name(self, module: nn.Module, holders: Collection[int | str]) -> str:
        """Return the path of an attribute of ``module`` or its submodules that leads to one of ``holders``."""
        for path, part in module.named_modules():
            for name, value in python_attributes(part):
                if id(part) in holders or (not isinstance(value, _LEAVES) and holders & self._reach([value]).keys()):
                    return f"{path}.{name}".strip(".")
        return next((holder for holder in holders if isinstance(holder, str)), type(module).__name__)


def _named_parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes and items of a holder by name; for a module, the attributes that its author set."""
    if isinstance(holder, nn.Module):
        yield from python_attributes(holder)
        return
    for link, name, value in parts(holder):
        yield name if link is Link.ATTRIBUTE else (link, identity(name)), value
