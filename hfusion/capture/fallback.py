"""Find the smallest submodules that keep a model from being captured."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.addresses import fills_memory
from hfusion.capture.compare import contents, tensors
from hfusion.capture.export import capture
from hfusion.capture.foretell import foretold
from hfusion.capture.opaque import opaque
from hfusion.capture.recorded import Island, Recorded, Records, tensors_in
from hfusion.core.errors import FusionError

# What a call that runs per member may take and give beside tensors: values that are the same for all members.
_ARGUMENTS = (
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

WHOLE = Island("")


def culprits(model: nn.Module, records: Records, looped: Mapping[Island, str]) -> dict[Island, str]:
    """What must run in a loop, each with the reason: the smallest such, and those of ``looped``.

    Raises:
        FusionError: not even the whole forward can run in a loop.
    """
    found = _Search(model, records, looped).culprits(WHOLE)
    if WHOLE in found and (why := _unfit(model, WHOLE, records)) is not None:
        raise FusionError(why)
    return found


@dataclass(frozen=True, eq=False)
class _Search:
    model: nn.Module
    records: Records
    looped: Mapping[Island, str]
    known: dict[Island, dict[Island, str]] = field(default_factory=dict)

    def culprits(self, island: Island) -> dict[Island, str]:
        """Those among ``island`` and what it calls."""
        if island not in self.known:
            # For an island that calls itself in turn.
            self.known[island] = {}
            self.known[island] = self._found(island)
        return self.known[island]

    def _found(self, island: Island) -> dict[Island, str]:
        if island in self.looped:
            return {island: self.looped[island]}
        why = self._refusal(island, {})
        if why is None and not self.looped:
            return {}
        found: dict[Island, str] = {}
        for child in self.records.children(island):
            found |= self.culprits(child)
        if found and island not in found:
            left = self._refusal(island, found)
            if left is None:
                return found
            why = f"{why}; {left}" if why else left
        return {} if why is None else {island: why}

    def _refusal(self, island: Island, stubs: Mapping[Island, str]) -> str | None:
        """Why ``island`` cannot be captured, with the ``stubs`` left out; None if it can."""
        for stub in stubs:
            why = _unfit(self.model, stub, self.records)
            if why is not None:
                return why
        top = self.records.first(island)
        args, kwargs = top.args, top.kwargs
        if top.written:
            # By itself, the call would write into leaves that require grad.
            args, kwargs = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
        twin = copy.deepcopy(self.model)
        with opaque(twin, stubs, self.records, [twin], top):
            module = twin.get_submodule(island.path)
            target = module if island.method == "forward" else _Method(module, island.method)
            try:
                capture(target, args, kwargs, varying=not stubs)
            except FusionError as error:
                return str(error)
        return None


class _Method(nn.Module):
    """A module whose forward is another module's method."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, self.method)(*args, **kwargs)


def _unfit(model: nn.Module, island: Island, records: Records) -> str | None:
    """Why ``island`` cannot run as the members' own code by itself; None if it can."""
    who = f"{island} can only run in a loop over members, and"
    for call, others in records.all_sightings(island):
        for leaf in pytree.tree_leaves(call.output):
            if leaf is not None and not isinstance(leaf, (Tensor, *_RESULTS)):
                return (
                    f"{who} gives {_told(leaf)} beside tensors; let it give tensors only, in tuples, lists, dicts or "
                    f"classes that torch.utils._pytree knows{_registration(leaf)}"
                )
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            if island != WHOLE and leaf is not None and not isinstance(leaf, (Tensor, *_ARGUMENTS)):
                return f"{who} takes {_told(leaf)}, which may hold what is a member's own; give it tensors and numbers"
        if call.addresses and not _own_only(model, island, call):
            return f"{who} addresses memory that it shares with tensors outside; use slices, or give it a copy"
        numbers = [k for k, leaf in enumerate(pytree.tree_leaves((call.args, call.kwargs))) if type(leaf) is int]
        try:
            foretold(island, call, others, numbers)
        except FusionError as error:
            return str(error)
        if island == WHOLE and call.written:
            return f"{who} writes into its input, which members may share; let it write into a copy"
    held = next(_held(model, island), None)
    if held is not None:
        return (
            f"{who} holds {held[1]} in its attribute {held[0]}, where the array cannot put its own tensor; "
            "register it as a parameter, buffer or submodule"
        )
    return None


def _own_only(model: nn.Module, island: Island, call: Recorded) -> bool:
    """Whether what the call was given, and what the island holds, have their memory for themselves."""
    own = [tensor for _, tensor in tensors(model.get_submodule(island.path))]
    given = tensors_in((call.args, call.kwargs)) if island != WHOLE else []
    return all(map(fills_memory, (*given, *own)))


def _held(model: nn.Module, island: Island) -> Iterator[tuple[str, str]]:
    """Plain attributes below ``island`` that hold a tensor of the model, or a module outside; and what they hold."""
    prefix = f"{island.path}." if island.path else ""
    modules = {path for path, _ in model.named_modules()}
    for name, value in contents(model).items():
        if name.startswith(prefix):
            for own in _own(value):
                if own not in modules or not f"{own}.".startswith(prefix):
                    yield name, own or "the whole model"


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
