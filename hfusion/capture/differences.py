"""The attributes in which models differ, for messages on models that do different things."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hfusion.capture.attribute_values import contents, modeless_fingerprint

# Attributes that a message names, and letters of a value that it shows.
_MOST, _LETTERS = 3, 60
# Of objects in attributes.
_DEPTH = 4


def differing_attributes(ours: Sequence[nn.Module], theirs: Sequence[nn.Module], names: tuple[str, str]) -> str:
    """Describe the attributes that no model of ``ours`` has in common with one of ``theirs``; empty if there are none.

    ``names``: of the first model of each, such as ``("model 0", "model 2")``.
    """
    lines = [*_attributes(ours, theirs, names), *_closures(ours[0], theirs[0], names)]
    more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return ", ".join(lines[:_MOST]) + more


def _attributes(ours: Sequence[nn.Module], theirs: Sequence[nn.Module], names: tuple[str, str]) -> Iterator[str]:
    here, there = [contents(model) for model in ours], [contents(model) for model in theirs]
    keys = dict.fromkeys(key for found in (here[0], there[0]) for key in found)
    apart = [key for key in keys if {found.get(key) for found in here}.isdisjoint(found.get(key) for found in there)]
    mine, other = _values(ours[0]), _values(theirs[0])
    for key in sorted(apart, key=lambda key: isinstance(mine.get(key), float)):
        if key not in mine or key not in other:
            has, lacks = names if key in mine else names[::-1]
            yield f"{has} has an attribute {key} that {lacks} lacks"
        else:
            yield _difference(key, mine[key], other[key], names, _DEPTH)


def _values(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".strip("."): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
    }


def _difference(where: str, mine: Any, other: Any, names: tuple[str, str], depth: int) -> str:
    """The first difference within two values that are not the same."""
    parts = parts_of(mine), parts_of(other)
    if depth and type(mine) is type(other) and parts[0].keys() == parts[1].keys():
        for name, part in parts[0].items():
            if not _same(part, parts[1][name]):
                return _difference(f"{where}{name}", part, parts[1][name], names, depth - 1)
    return f"{where} is {_shown(mine)} in {names[0]} and {_shown(other)} in {names[1]}"


def parts_of(value: Any) -> dict[str, Any]:
    """What a value holds, by how code would address it."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    if isinstance(value, Tensor | nn.Module | types.FunctionType | type):
        return {}
    return {f".{name}": part for name, part in getattr(value, "__dict__", {}).items()}


def _same(mine: Any, other: Any) -> bool:
    if mine is other:
        return True
    if isinstance(mine, str | bool | int | float | complex | bytes | None) or not parts_of(mine):
        return type(mine) is type(other) and not isinstance(mine, Tensor) and repr(mine) == repr(other)
    parts = parts_of(mine), parts_of(other)
    return parts[0].keys() == parts[1].keys() and all(_same(part, parts[1][name]) for name, part in parts[0].items())


def _shown(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} (line {value.__code__.co_firstlineno})"
    if isinstance(value, types.BuiltinFunctionType | types.MethodType | type):
        return value.__name__
    text = " ".join(repr(value).split())
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


def _closures(mine: nn.Module, other: nn.Module, names: tuple[str, str]) -> Iterator[str]:
    """Functions of classes that were made per model, which read other values from outside."""
    ours, theirs = ({closure[:2]: closure for closure in modeless_fingerprint(model)[1]} for model in (mine, other))
    for (path, name), closure in ours.items():
        if theirs.get((path, name)) != closure:
            yield f"{name} of module {path or '(root)'} is closed over other values in {names[0]} than in {names[1]}"
