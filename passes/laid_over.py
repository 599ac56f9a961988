"""Align the calls of several graphs: matching calls share an entry, and the order of every graph is kept."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.program import Kind, Slot
from hfusion.ops.rule import MemberScalars, hint
from hfusion.passes.candidates import by_name

Operands = dict[int, Any]


def woven(
    entries: list[tuple[Any, Operands]], number: int, calls: list[tuple[Any, fx.Node]]
) -> list[tuple[Any, Operands]]:
    """Return ``entries`` merged with the ``calls`` of graph ``number``, keeping the order of both."""
    matcher = SequenceMatcher(None, [s for s, _ in entries], [s for s, _ in calls], autojunk=False)
    result: list[tuple[Any, Operands]] = []
    for kind, start, stop, first, last in matcher.get_opcodes():
        if kind == "equal":
            for (signature, entry), (_, node) in zip(entries[start:stop], calls[first:last], strict=True):
                result.append((signature, {**entry, number: node}))
            continue
        result += entries[start:stop]
        result += [(signature, {number: node}) for signature, node in calls[first:last]]
    return result


def signature(node: fx.Node, slots: Mapping[fx.Node, Slot]) -> Any:
    """Return a hashable key that is equal for calls which a single call for all their members can compute."""
    args, kwargs = node.meta.get("arguments", (node.args, node.kwargs))
    if isinstance(node.target, OpOverload):
        args, kwargs = (), by_name(node.target, args, kwargs)

    def key_of(item: Any) -> Any:
        if isinstance(item, fx.Node):
            slot = slots.get(item)
            is_named = slot is not None and slot.kind is not Kind.CONSTANT
            return (
                (slot.kind, slot.name, _kind(item.meta.get("val")))
                if is_named and slot
                else _kind(item.meta.get("val"))
            )
        if isinstance(item, dict):
            return tuple((name, key_of(part)) for name, part in item.items())
        if isinstance(item, list | tuple):
            return ("list" if isinstance(item, list) else "tuple", *map(key_of, item))
        if isinstance(item, MemberScalars):
            types = set(map(type, item.values))
            return "float" if types == {float} else ("members", *map(repr, item.values))
        return "float" if type(item) is float else (type(item).__name__, repr(item))

    return str(node.target), key_of(args), key_of(kwargs), _kind(node.meta.get("val"))


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if not isinstance(value, Tensor):
        return type(value).__name__
    return tuple(size_of(size) for size in value.shape), value.dtype, str(value.device), value.requires_grad


def size_of(size: Any) -> Any:
    return size if isinstance(size, int) else ("N", hint(size))
