"""The Python attributes in which members differ: described for messages, and the numbers among them by name."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import contents, modeless_fingerprint
from hfusion.capture.dynamic_sizes import SizeUse
from hfusion.capture.reachable_code import names_of
from hfusion.core.python_values import Link, parts, safe_repr

# Number of attributes that a message names, and of characters of a value that it shows.
_MOST, _LETTERS = 3, 60
# Nested levels of objects in attributes that messages look into.
_DEPTH = 4
_NUMBERS = (int, float, complex)


def differing_attributes(models: Sequence[nn.Module], others: Sequence[nn.Module], names: tuple[str, str]) -> str:
    """Describe the attributes in which each of ``models`` differs from each of ``others``; empty if there are none.

    ``names``: what to call the first model of each group, such as ``("model 0", "model 2")``.
    """
    lines = [*_attributes(models, others, names), *_closures(models[0], others[0], names)]
    more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return ", ".join(lines[:_MOST]) + more


def _attributes(models: Sequence[nn.Module], others: Sequence[nn.Module], names: tuple[str, str]) -> Iterator[str]:
    model_contents, other_contents = [contents(model) for model in models], [contents(model) for model in others]
    keys = dict.fromkeys(key for attributes in (model_contents[0], other_contents[0]) for key in attributes)
    differing_keys = [
        key
        for key in keys
        if {attributes.get(key) for attributes in model_contents}.isdisjoint(
            attributes.get(key) for attributes in other_contents
        )
    ]
    values, other_values = _values(models[0]), _values(others[0])
    for key in sorted(differing_keys, key=lambda key: isinstance(values.get(key), float)):
        if key not in values or key not in other_values:
            has, lacks = names if key in values else names[::-1]
            yield f"{has} has an attribute {key} that {lacks} lacks"
        else:
            path, a, b = next(_unlike(values[key], other_values[key], _DEPTH), ((), values[key], other_values[key]))
            yield f"{key}{''.join(path)} is {_shown(a)} in {names[0]} and {_shown(b)} in {names[1]}"


def _values(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".strip("."): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
    }


def _unlike(
    value: Any, other: Any, depth: int, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the innermost parts in which two values differ, after the expressions that lead there."""
    if value is other:
        return
    held, other_parts = parts_of(value), parts_of(other)
    if depth and held and type(value) is type(other) and held.keys() == other_parts.keys():
        for name, part in held.items():
            yield from _unlike(part, other_parts[name], depth - 1, (*path, name))
    elif (
        held
        or type(value) is not type(other)
        or isinstance(value, Tensor | nn.Module)
        or safe_repr(value) != safe_repr(other)
    ):
        yield path, value, other


def parts_of(value: Any) -> dict[str, Any]:
    """Return the items and attributes of a value, by the expression that reads them."""
    if isinstance(value, (Tensor, nn.Module, types.FunctionType, type, *_NUMBERS)):
        return {}
    return {
        f".{name}" if link is Link.ATTRIBUTE else f"[{safe_repr(name)}]": part
        for link, name, part in parts(value)
        if link in (Link.ATTRIBUTE, Link.KEY, Link.INDEX)
    }


def _shown(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} (line {value.__code__.co_firstlineno})"
    if isinstance(value, types.BuiltinFunctionType | types.MethodType | type):
        return value.__name__
    text = " ".join(safe_repr(value).split())
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


def _closures(model: nn.Module, other: nn.Module, names: tuple[str, str]) -> Iterator[str]:
    """Describe functions of classes that were created per model, if their closures hold different values."""
    closures, other_closures = (
        {closure[:2]: closure for closure in modeless_fingerprint(side)[1]} for side in (model, other)
    )
    for (path, name), closure in closures.items():
        if other_closures.get((path, name)) != closure:
            yield f"{name} of module {path or '(root)'} is closed over other values in {names[0]} than in {names[1]}"


# Nested levels of containers and objects that are searched.
MAX_DEPTH = 6
# With these, code may read an attribute without naming it.
_READS_ALL = frozenset({"vars", "__dict__", "getattr", "__getattribute__", "attrgetter", "values", "items"})


@dataclass(frozen=True)
class DifferingNumbers:
    """The numbers in attributes in which members differ.

    Attributes:
        path_names: all names on the paths to these numbers: attributes, and keys of mappings.
        last_names: the last attribute of each path.
        values: the numbers of the first member.
        anything: whether members also differ in a value that is no number, or has no name.
    """

    path_names: frozenset[str]
    last_names: frozenset[str]
    values: tuple[Any, ...]
    anything: bool

    @staticmethod
    def of(model: nn.Module, others: Sequence[nn.Module]) -> DifferingNumbers:
        model_contents = contents(model)
        closed = modeless_fingerprint(model)[1:]
        numbers: list[tuple[list[str], str, Any]] = []
        anything = False
        for other in others:
            other_contents = contents(other)
            if model_contents.keys() != other_contents.keys() or modeless_fingerprint(other)[1:] != closed:
                anything = True
                continue
            for key in (key for key in model_contents if model_contents[key] != other_contents[key]):
                path, _, name = key.rpartition(".")
                attribute, other_attribute = (
                    vars(side.get_submodule(path)).get(name, _ABSENT) for side in (model, other)
                )
                for steps, part, other_part in _unlike(attribute, other_attribute, MAX_DEPTH):
                    if isinstance(part, _NUMBERS) and isinstance(other_part, _NUMBERS):
                        names = [name, *(step.strip(".[]'\"") for step in steps)]
                        # Items have the name of the attribute that they are in.
                        last = [name, *(step[1:] for step in steps if step.startswith("."))][-1]
                        numbers.append((names, last, part))
                    else:
                        anything = True
        return DifferingNumbers(
            frozenset(name for names, _, _ in numbers for name in names),
            frozenset(last for _, last, _ in numbers),
            tuple(value for _, _, value in numbers),
            anything,
        )

    def may_stand_in(self, uses: Sequence[SizeUse], model: nn.Module) -> bool:
        """Return whether code may have combined one of these numbers, or a value computed from one, with a size."""
        if self.anything:
            return bool(uses)
        if any(use.number == value for use in uses if use.in_torch for value in self.values):
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
    """Return whether reading ``attribute`` of a module, or of an object in it, may run code, such as a property."""
    held = [part for module in model.modules() for part in (module, *vars(module).values())]
    return any(
        hasattr(type(part), attribute)
        or any("__getattr__" in vars(base) for base in type(part).__mro__ if base is not nn.Module)
        for part in held
        if not isinstance(part, Tensor)
    )


_ABSENT = object()
