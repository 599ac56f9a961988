"""The Python numbers in which members differ, by the names under which code reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hfusion.capture.attribute_values import contents, modeless_fingerprint
from hfusion.capture.differences import parts_of
from hfusion.capture.size_uses import SizeUse
from hfusion.capture.variable_guards import names_of

# Containers and objects in one another that are looked into.
MAX_DEPTH = 6
# With these, code may read an attribute without naming it.
_READS_ALL = frozenset({"vars", "__dict__", "getattr", "__getattribute__", "attrgetter", "values", "items"})


@dataclass(frozen=True)
class DifferingNumbers:
    """Attributes:
    path_names: all names on the way to such numbers: attributes, and keys of mappings.
    last_names: of each the name that stands last.
    values: those of the first member.
    anything: members differ in what is no number, or has no name.
    """

    path_names: frozenset[str]
    last_names: frozenset[str]
    values: tuple[Any, ...]
    anything: bool

    @staticmethod
    def of(model: nn.Module, others: Sequence[nn.Module]) -> DifferingNumbers:
        here = contents(model)
        closed = modeless_fingerprint(model)[1:]
        numbers: list[_Number | None] = []
        for other in others:
            there = contents(other)
            if here.keys() != there.keys() or modeless_fingerprint(other)[1:] != closed:
                numbers.append(None)
                continue
            for key in (key for key in here if here[key] != there[key]):
                path, _, name = key.rpartition(".")
                mine, theirs = (vars(m.get_submodule(path)).get(name, _ABSENT) for m in (model, other))
                numbers += _differing((name,), mine, theirs, MAX_DEPTH)
        known = [number for number in numbers if number is not None]
        return DifferingNumbers(
            frozenset(name for number in known for name in number.names),
            frozenset(number.names[-1] for number in known),
            tuple(number.value for number in known),
            None in numbers,
        )

    def may_stand_in(self, uses: Sequence[SizeUse], model: nn.Module) -> bool:
        """Whether one of these numbers may be one that met a size, or that was computed of."""
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
    """Whether code may run where ``attribute`` is read of a module, or of an object in one."""
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
    """The numbers that differ within two values; None for what differs otherwise."""
    if isinstance(mine, int | float | complex) and isinstance(other, int | float | complex):
        if type(mine) is not type(other) or repr(mine) != repr(other):
            yield _Number(names, mine)
        return
    if mine is other:
        return
    here, there = parts_of(mine), parts_of(other)
    if type(mine) is not type(other) or here.keys() != there.keys() or depth == 0:
        yield None
    elif not here:
        if isinstance(mine, Tensor | nn.Module) or repr(mine) != repr(other):
            yield None
    else:
        for name, part in here.items():
            step = (name[1:],) if name.startswith(".") else (name.strip("[]'\""), names[-1])
            yield from _differing((*names, *step), part, there[name], depth - 1)
