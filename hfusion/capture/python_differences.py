"""The Python attributes in which members differ: described for messages, and the numbers among them by name."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hfusion.capture.attribute_values import contents, modeless_fingerprint
from hfusion.capture.specialized_dims import SizeUse
from hfusion.capture.variable_guards import names_of

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
    our_contents, their_contents = [contents(model) for model in ours], [contents(model) for model in theirs]
    keys = dict.fromkeys(key for attributes in (our_contents[0], their_contents[0]) for key in attributes)
    apart = [
        key
        for key in keys
        if {attributes.get(key) for attributes in our_contents}.isdisjoint(
            attributes.get(key) for attributes in their_contents
        )
    ]
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
    """Return the items and attributes of a value, by the expression that reads them."""
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


# Containers and objects in one another that are looked into.
MAX_DEPTH = 6
# With these, code may read an attribute without naming it.
_READS_ALL = frozenset({"vars", "__dict__", "getattr", "__getattribute__", "attrgetter", "values", "items"})


@dataclass(frozen=True)
class DifferingNumbers:
    """Attributes:
    path_names: all names on the way to such numbers: attributes, and keys of mappings.
    last_names: the last name of each path.
    values: the numbers of the first member.
    anything: members differ in a value that is no number, or has no name.
    """

    path_names: frozenset[str]
    last_names: frozenset[str]
    values: tuple[Any, ...]
    anything: bool

    @staticmethod
    def of(model: nn.Module, others: Sequence[nn.Module]) -> DifferingNumbers:
        own_contents = contents(model)
        closed = modeless_fingerprint(model)[1:]
        numbers: list[_Number | None] = []
        for other in others:
            its_contents = contents(other)
            if own_contents.keys() != its_contents.keys() or modeless_fingerprint(other)[1:] != closed:
                numbers.append(None)
                continue
            for key in (key for key in own_contents if own_contents[key] != its_contents[key]):
                path, _, name = key.rpartition(".")
                mine, theirs = (vars(m.get_submodule(path)).get(name, _ABSENT) for m in (model, other))
                numbers += _differing((name,), mine, theirs, MAX_DEPTH)
        named = [number for number in numbers if number is not None]
        return DifferingNumbers(
            frozenset(name for number in named for name in number.names),
            frozenset(number.names[-1] for number in named),
            tuple(number.value for number in named),
            None in numbers,
        )

    def may_stand_in(self, uses: Sequence[SizeUse], model: nn.Module) -> bool:
        """Return whether one of these numbers may be one that met a size, or that was computed of."""
        if self.anything:
            return bool(uses)
        if any(use.other == value for use in uses if use.in_torch for value in self.values):
            return True
        unknown = [
            use
            for use in uses
            if not use.in_torch
            and (not use.attribute or use.attribute in self.last_names or _is_computed(model, use.attribute))
        ]
        if not unknown:
            return False
        names = names_of([model])
        return not names.isdisjoint(self.path_names | _READS_ALL)


def _is_computed(model: nn.Module, attribute: str) -> bool:
    """Return whether code may run where ``attribute`` is read of a module, or of an object in one."""
    held = [part for module in model.modules() for part in (module, *vars(module).values())]
    return any(
        hasattr(type(part), attribute)
        or any("__getattr__" in vars(base) for base in type(part).__mro__ if base is not nn.Module)
        for part in held
        if not isinstance(part, Tensor)
    )


_ABSENT = object()


@dataclass(frozen=True)
class _Number:
    names: tuple[str, ...]
    value: Any


def _differing(names: tuple[str, ...], mine: Any, other: Any, depth: int) -> Iterator[_Number | None]:
    """Yield the numbers that differ within two values; None for other differences."""
    if isinstance(mine, int | float | complex) and isinstance(other, int | float | complex):
        if type(mine) is not type(other) or repr(mine) != repr(other):
            yield _Number(names, mine)
        return
    if mine is other:
        return
    own_parts, other_parts = parts_of(mine), parts_of(other)
    if type(mine) is not type(other) or own_parts.keys() != other_parts.keys() or depth == 0:
        yield None
    elif not own_parts:
        if isinstance(mine, Tensor | nn.Module) or repr(mine) != repr(other):
            yield None
    else:
        for name, part in own_parts.items():
            step = (name[1:],) if name.startswith(".") else (name.strip("[]'\""), names[-1])
            yield from _differing((*names, *step), part, other_parts[name], depth - 1)
