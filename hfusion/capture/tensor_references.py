"""Registered tensors that a module holds a second time, in plain attributes: ``self.gains = {"input": self.w}``.

Eager fallbacks run with tensors of the array in place of the module's own, which must be replaced wherever they are
held: in lists, dicts, tuples, objects and `functools.partial`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.registered_tensors import tensors
from hfusion.core.python_values import PLAIN, Link, items, parts, put

_LEAVES = (*PLAIN, type, nn.Module, torch.Generator)
# Tensors in these are not replaced one by one.
_WHOLES = (tuple, functools.partial, types.MethodType)


class PathStep(NamedTuple):
    """A step from a value to one of its parts: an attribute, or an item of a mapping, list, tuple or deque."""

    link: Link
    name: Any


@dataclass(frozen=True)
class Reference:
    """A slot that holds a registered tensor: ``steps`` lead there from the submodule at ``path``."""

    path: str
    steps: tuple[PathStep, ...]
    names: frozenset[str]

    def put(self, module: nn.Module, substitutes: Mapping[int, Tensor]) -> None:
        """Replace the tensors in this slot of ``module``; ``substitutes`` maps the ids of old tensors to new ones."""
        holder: Any = module.get_submodule(self.path)
        for step in self.steps[:-1]:
            holder = _part(holder, step)
        last = self.steps[-1]
        put(holder, *last, _replaced(_part(holder, last), substitutes))


def _part(holder: Any, step: PathStep) -> Any:
    if step.link is not Link.ATTRIBUTE:
        return holder[step.name]
    # A property of the same name may hide an attribute.
    attributes = getattr(holder, "__dict__", {})
    return attributes[step.name] if step.name in attributes else getattr(holder, step.name)


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
        for steps, held in _slots(value, (PathStep(Link.ATTRIBUTE, name),), names, visited, name in read_names)
    )


def _slots(
    value: Any, steps: tuple[PathStep, ...], names: Mapping[int, str], visited: dict[int, Any], is_read: bool
) -> Iterator[tuple[tuple[PathStep, ...], frozenset[str]]]:
    held = frozenset(_held(value, names))
    if held:
        yield steps, held
    if isinstance(value, (*_LEAVES, Tensor)) or id(value) in visited or (not is_read and is_optimizer(value)):
        return
    visited[id(value)] = value
    for link, name, part in parts(value):
        has_slot = link in (Link.ATTRIBUTE, Link.KEY, Link.INDEX)
        if has_slot and not (isinstance(value, _WHOLES) and _held(part, names)):
            yield from _slots(part, (*steps, PathStep(link, name)), names, visited, is_read)


def is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)


def _held(value: Any, names: Mapping[int, str]) -> set[str]:
    """Return the names of the tensors in a tuple or partial, which are replaced as a whole, or of a tensor."""
    if isinstance(value, Tensor):
        return {names[id(value)]} if id(value) in names else set()
    if isinstance(value, tuple):
        return {name for _, _, item in items(value) for name in _held(item, names)}
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
        held = [item for _, _, item in items(value)]
        replaced = [_replaced(item, substitutes) for item in held]
        if all(new is old for new, old in zip(replaced, held, strict=True)):
            return value
        make = getattr(type(value), "_make", type(value))
        return make(replaced)
    return value
