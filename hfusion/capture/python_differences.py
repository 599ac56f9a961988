"""The Python attributes in which members differ: described for messages, and the numbers among them by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import RegisteredKey, contents, modeless_fingerprint
from hfusion.capture.dynamic_sizes import SizeUse
from hfusion.core.python_values import Compound, IdentityRef, Link

# Number of attributes that a message names, and of characters of a value that it shows.
_MOST, _LETTERS = 3, 60
# What a key names on the way to a number, with the text of a name in a message.
_STEPS = {Link.ATTRIBUTE: ".{}", Link.KEY: "[{}]", Link.INDEX: "[{}]"}
_ITEMS = {Link.ATTRIBUTE: "{}={}", Link.KEY: "{}: {}"}


def differing_attributes(models: Sequence[nn.Module], others: Sequence[nn.Module], names: tuple[str, str]) -> str:
    """Describe the attributes in which each of ``models`` differs from each of ``others``; empty if there are none.

    ``names``: what to call the first model of each group, such as ``("model 0", "model 2")``.
    """
    lines = [*_attributes(models, others, names), *_closures(models[0], others[0], names)]
    more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return ", ".join(lines[:_MOST]) + more


def _attributes(models: Sequence[nn.Module], others: Sequence[nn.Module], names: tuple[str, str]) -> Iterator[str]:
    of_models, of_others = ([contents(model) for model in group] for group in (models, others))
    values, other_values = of_models[0], of_others[0]
    differing = [
        key
        for key in {**values, **other_values}
        if {held.get(key) for held in of_models}.isdisjoint(held.get(key) for held in of_others)
    ]
    for key in sorted(differing, key=lambda key: isinstance(_number(values.get(key)), float)):
        if key not in values or key not in other_values:
            has, lacks = names if key in values else names[::-1]
            yield f"{has} has an attribute {key} that {lacks} lacks"
        else:
            path, a, b = next(_unlike(values[key], other_values[key]))
            where = key + "".join(_STEPS[link].format(name) for link, name in path)
            yield f"{where} is {_shown(a)} in {names[0]} and {_shown(b)} in {names[1]}"


def _unlike(key: Any, other: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield the innermost parts in which two keys of values differ, after the links and names that lead there."""
    if key == other:
        return
    if isinstance(key, Compound) and isinstance(other, Compound) and key.kind == other.kind:
        (places, parts), (other_places, other_parts) = (
            tuple(zip(*k.parts, strict=True)) or ((), ()) for k in (key, other)
        )
        if places == other_places and all(link in _STEPS for link, _ in places):
            for place, part, other_part in zip(places, parts, other_parts, strict=True):
                yield from _unlike(part, other_part, (*path, place))
            return
    yield path, key, other


def _number(key: Any) -> Any:
    """Return the number of which ``key`` is the key; None for the key of anything else."""
    if isinstance(key, Compound) or not (isinstance(key, tuple) and isinstance(key[0], type)):
        return None
    kind = next((kind for kind in (int, float, complex) if issubclass(key[0], kind)), None)
    return None if kind is None else kind(key[1])


def _shown(key: Any) -> str:
    """Return the value of ``key`` as a short text."""
    text = _text(key)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


def _text(key: Any) -> str:
    if isinstance(key, RegisteredKey):
        return key.name
    if isinstance(key, Compound) and isinstance(key.kind, tuple) and key.kind[0] == "function":
        return f"{key.kind[1].co_qualname} (line {key.kind[1].co_firstlineno})"
    if isinstance(key, Compound):
        kind = key.kind[0] if isinstance(key.kind, tuple) else key.kind
        held = ", ".join(_ITEMS.get(link, "{1}").format(name, _text(part)) for (link, name), part in key.parts)
        return f"{getattr(kind, '__qualname__', kind)}({held})"
    held = key[1].held if isinstance(key[1], IdentityRef) else key[1]
    if _number(key) is not None:
        return str(held)
    return repr(held) if isinstance(key[0], type) else getattr(held, "__name__", f"{key[0]} {held}")


def _closures(model: nn.Module, other: nn.Module, names: tuple[str, str]) -> Iterator[str]:
    """Describe functions of classes that were created per model, if their closures hold different values."""
    closures, other_closures = (
        {closure[:2]: closure for closure in modeless_fingerprint(side)[1]} for side in (model, other)
    )
    for (path, name), closure in closures.items():
        if other_closures.get((path, name)) != closure:
            yield f"{name} of module {path or '(root)'} is closed over other values in {names[0]} than in {names[1]}"


def numbers_meet_sizes(uses: Sequence[SizeUse], model: nn.Module, others: Sequence[nn.Module]) -> bool:
    """Return whether code may have combined a number in which ``others`` differ from ``model`` with a size that varies.

    Code of torch takes numbers as they are, that of the user may have computed them.
    """
    if not uses:
        return False
    numbers, names = set[Any](), set[str]()
    values, closed = contents(model), modeless_fingerprint(model)[1:]
    for other in others:
        other_values = contents(other)
        if values.keys() != other_values.keys() or modeless_fingerprint(other)[1:] != closed:
            return True
        unlike = [(key, *parts) for key in values for parts in _unlike(values[key], other_values[key])]
        for key, steps, a, b in unlike:
            if _number(a) is None or _number(b) is None:
                return True
            numbers.add(_number(a))
            # Items have the name of the attribute that they are in.
            names.add([key.rpartition(".")[2], *(step for link, step in steps if link is Link.ATTRIBUTE)][-1])
    return any(
        use.number in numbers
        if use.in_torch
        else not use.attribute or use.attribute in names or _is_computed(model, use.attribute)
        for use in uses
    )


def _is_computed(model: nn.Module, attribute: str) -> bool:
    """Return whether reading ``attribute`` of a module, or of an object in it, may run code, such as a property."""
    held = (part for module in model.modules() for part in (module, *vars(module).values()))
    kinds = {type(part) for part in held if not isinstance(part, Tensor)}
    own_getters = ("__getattr__" in vars(base) for kind in kinds for base in kind.__mro__ if base is not nn.Module)
    return any(hasattr(kind, attribute) for kind in kinds) or any(own_getters)
