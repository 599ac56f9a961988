"""Registered tensors that a module holds a second time, in plain attributes: ``self.gains = {"input": self.w}``.

Eager fallbacks run with tensors of the array in place of the module's own, which must be replaced wherever they are
held: in lists, dicts, tuples, objects and `functools.partial`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.python_state import PLAIN
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.variable_scopes import slots

_LEAVES = (*PLAIN, type, nn.Module, torch.Generator)

# The path from a module to a slot: names of attributes as strings, and keys of items as tuples of one element.
Steps: TypeAlias = tuple[str | tuple[Any], ...]


@dataclass(frozen=True)
class Reference:
    """A slot that holds a registered tensor: ``steps`` lead there from the submodule at ``path``."""

    path: str
    steps: Steps
    names: frozenset[str]

    def put(self, module: nn.Module, substitutes: Mapping[int, Tensor]) -> None:
        """Replace the tensors in this slot of ``module``; ``substitutes`` maps the ids of old tensors to new ones."""
        holder: Any = module.get_submodule(self.path)
        for step in self.steps[:-1]:
            holder = getattr(holder, step) if isinstance(step, str) else holder[step[0]]
        last = self.steps[-1]
        if isinstance(last, tuple):
            holder[last[0]] = _replaced(holder[last[0]], substitutes)
        elif hasattr(holder, "__dict__") and last in vars(holder):
            vars(holder)[last] = _replaced(vars(holder)[last], substitutes)
        else:
            object.__setattr__(holder, last, _replaced(getattr(holder, last), substitutes))


def references(module: nn.Module, read_names: frozenset[str]) -> tuple[Reference, ...]:
    """Return the slots that hold registered tensors of ``module``.

    Args:
        read_names: names that forward may read, see `names_of`; optimizers under other names are left out.
    """
    names = {id(tensor): name for name, tensor in tensors(module)}
    visited: dict[int, Any] = {}
    return tuple(
        Reference(path, steps, held)
        for path, part in module.named_modules()
        for name, value in python_attributes(part)
        for steps, held in _slots(value, (name,), names, visited, name in read_names)
    )


def _slots(
    value: Any, steps: Steps, names: Mapping[int, str], visited: dict[int, Any], is_read: bool
) -> Iterator[tuple[Steps, frozenset[str]]]:
    held = frozenset(_held(value, names))
    if held:
        yield steps, held
    if isinstance(value, (*_LEAVES, Tensor)) or id(value) in visited or (not is_read and is_optimizer(value)):
        return
    visited[id(value)] = value
    items: list[tuple[str | tuple[Any], Any]] = []
    if isinstance(value, Mapping):
        items += [((key,), item) for key, item in list(value.items())]
    elif isinstance(value, list | deque | tuple):
        items += [((k,), item) for k, item in enumerate(_elements(value))]
    items += [(name, getattr(value, name, None)) for name in slots(type(value))]
    items += list(getattr(value, "__dict__", {}).items())
    for step, item in items:
        # A tuple is replaced as a whole: its tensors have no slots of their own.
        if not isinstance(value, tuple) or not _held(item, names):
            yield from _slots(item, (*steps, step), names, visited, is_read)


def is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)


def _elements(value: list[Any] | deque[Any] | tuple[Any, ...]) -> Sequence[Any]:
    # By list's own method: subclasses may forbid iteration.
    return list(list.__iter__(value) if isinstance(value, list) else iter(value))


def _held(value: Any, names: Mapping[int, str]) -> set[str]:
    """Return the names of the tensors in a tuple or partial, which are replaced as a whole, or of a tensor."""
    if isinstance(value, Tensor):
        return {names[id(value)]} if id(value) in names else set()
    if isinstance(value, tuple):
        return {name for item in value for name in _held(item, names)}
    if isinstance(value, functools.partial):
        return {name for item in (value.args, tuple(value.keywords.values())) for name in _held(item, names)}
    return set()


def _replaced(value: Any, substitutes: Mapping[int, Tensor]) -> Any:
    """Return ``value`` with its tensors replaced by ``substitutes``; ``value`` itself if none is."""
    if isinstance(value, Tensor):
        return substitutes.get(id(value), value)
    if isinstance(value, functools.partial):
        args = _replaced(value.args, substitutes)
        keywords = {name: _replaced(item, substitutes) for name, item in value.keywords.items()}
        changed = args is not value.args or any(keywords[name] is not item for name, item in value.keywords.items())
        return type(value)(value.func, *args, **keywords) if changed else value
    if isinstance(value, tuple):
        items = [_replaced(item, substitutes) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make = getattr(type(value), "_make", type(value))
        return make(items)
    return value
