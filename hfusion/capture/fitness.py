"""Whether a submodule can run as the members' own code by itself, in a loop over members."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.addresses import fills_memory
from hfusion.capture.attribute_values import contents
from hfusion.capture.attribute_writes import names_used
from hfusion.capture.call_trace import RecordedCall, Records, tensors_in
from hfusion.capture.intercept import WHOLE, Island
from hfusion.capture.named import tensors
from hfusion.capture.references import references

# What a call that runs per member may take and give beside tensors: values that are the same for all members.
ARGUMENTS = (
    str,
    int,
    float,
    complex,
    bytes,
    enum.Enum,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_RESULTS = (str, int)


@dataclass(frozen=True, eq=False)
class Fitness:
    """Which islands of ``model``, whose calls are ``records``, can run by themselves."""

    model: nn.Module
    records: Records
    _known: dict[Island, str | None] = field(default_factory=dict)

    def unfit(self, island: Island) -> str | None:
        """Why ``island`` cannot; None if it can."""
        if island not in self._known:
            self._known[island] = self._unfit(island)
        return self._known[island]

    def _unfit(self, island: Island) -> str | None:
        who = f"{island} can only run in a loop over members, and"
        if island in self.records.failed:
            return f"{who} raises an error, which forward catches; let it ask before it calls"
        for call in self.records.of(island):
            for leaf in pytree.tree_leaves(call.output):
                if leaf is not None and not isinstance(leaf, (Tensor, *_RESULTS)):
                    return (
                        f"{who} gives {_told(leaf)} beside tensors; let it give tensors only, in tuples, lists, dicts "
                        f"or classes that torch.utils._pytree knows{_registration(leaf)}"
                    )
            if call.addresses and not self._own_only(island, call):
                return f"{who} addresses memory that it shares with tensors outside; use slices, or give it a copy"
            if call.altered and island != WHOLE:
                return f"{who} changes a list, dict or object among its arguments; return what it adds"
            for leaf in pytree.tree_leaves((call.args, call.kwargs)):
                if island != WHOLE and leaf is not None and not isinstance(leaf, (Tensor, *ARGUMENTS)):
                    return (
                        f"{who} takes {_told(leaf)}, which may hold what is a member's own; give it tensors and numbers"
                    )
            if island == WHOLE and call.written:
                return f"{who} writes into its input, which members may share; let it write into a copy"
        if island != WHOLE and (shared := self.records.state.shared(island)) is not None:
            return (
                f"{who} has Python state in its attribute {shared} that changes outside of it, or can be read there, "
                "while forward runs; give it as an argument, and return it"
            )
        held = next(self._held(island), None)
        if held is None:
            return None
        return (
            f"{who} holds {held[1]} in its attribute {held[0]}, where the array cannot put its own tensor; "
            "register it as a parameter, buffer or submodule"
        )

    def _own_only(self, island: Island, call: RecordedCall) -> bool:
        """Whether what the call was given, and what the island holds, have their memory for themselves."""
        own = [tensor for _, tensor in tensors(self.model.get_submodule(island.path))]
        given = tensors_in((call.args, call.kwargs)) if island != WHOLE else []
        return all(map(fills_memory, (*given, *own)))

    def _held(self, island: Island) -> Iterator[tuple[str, str]]:
        """Plain attributes below ``island`` with a tensor of the model that cannot be replaced, or a module outside.

        Those that forward does not name are left out. Yields with each what it holds.
        """
        prefix = f"{island.path}." if island.path else ""
        module, ids = self.model.get_submodule(island.path), {name: id(t) for name, t in tensors(self.model)}
        replaced = {
            (f"{prefix}{reference.path}.{reference.steps[0]}".replace("..", ".").strip("."), ids[f"{prefix}{name}"])
            for reference in references(module, self._used)
            for name in reference.names
        }
        for name, value in self._contents.items():
            if name.startswith(prefix) and name.rpartition(".")[2] in self._used:
                for own in _own(value):
                    inside = f"{own}.".startswith(prefix) if own in self._paths else (name, ids[own]) in replaced
                    if not inside:
                        yield name, own or "the whole model"

    @cached_property
    def _used(self) -> frozenset[str]:
        return names_used(self.model)

    @cached_property
    def _contents(self) -> dict[str, Any]:
        return contents(self.model)

    @cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(path for path, _ in self.model.named_modules())


def _own(value: Any) -> Iterator[str]:
    """The model's own tensors and modules in a value that `contents` gave."""
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == "own":
            yield value[1]
        else:
            for part in value:
                yield from _own(part)


def _registration(value: Any) -> str:
    name = type(value).__name__
    return f": torch.export.register_dataclass({name}) makes it know {name}" if is_dataclass(value) else ""


def _told(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
