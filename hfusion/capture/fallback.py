"""Find the smallest submodules that keep a model from being captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_values import contents
from hfusion.capture.call_trace import Records
from hfusion.capture.export import capture
from hfusion.capture.fitness import ARGUMENTS, Fitness
from hfusion.capture.intercept import WHOLE, Island
from hfusion.capture.named import tensors
from hfusion.capture.opaque import opaque
from hfusion.capture.survey import survey
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError


def culprits(
    model: nn.Module,
    records: Records,
    looped: Mapping[Island, str],
    capture_around: Callable[[Mapping[Island, str]], None],
) -> dict[Island, str]:
    """What must run in a loop, each with the reason: the smallest such, and those of ``looped``.

    Args:
        capture_around: captures the whole model with the islands left out; raises where that fails.

    Few traces of the whole model find what raises while it is traced, however much that is. Only what is refused
    later, for another result than that of the code, is searched for island by island, once for all that are alike.

    Raises:
        FusionError: not even the whole forward can run in a loop.
    """
    search = _Search(model, records, Fitness(model, records), capture_around, looped)
    # Without any in a loop, it has been refused already.
    found = dict(looped) or search.surveyed()
    while WHOLE not in found and search.refusal(WHOLE, found) is not None:
        search = replace(search, given=found, known={})
        more = search.surveyed()
        found = found | more if more else search.culprits(WHOLE)
        if not more:
            break
    if WHOLE not in found:
        return found
    if (why := search.fitness.unfit(WHOLE)) is not None:
        raise FusionError(why)
    return {WHOLE: found[WHOLE]}


@dataclass(frozen=True, eq=False)
class _Search:
    """Captures islands by themselves; ``given`` are known to run in a loop.

    ``known`` are those found below an island, ``verdicts`` are for an island and all that are like it.
    """

    model: nn.Module
    records: Records
    fitness: Fitness
    capture_around: Callable[[Mapping[Island, str]], None]
    given: Mapping[Island, str]
    known: dict[Island, dict[Island, str]] = field(default_factory=dict)
    verdicts: dict[Any, str | None] = field(default_factory=dict)

    def surveyed(self) -> dict[Island, str]:
        """What raises in a trace with the ``given`` left out, beside these."""
        found = survey(self.model, self.records, self.given, self.fitness)
        # What stands in for others may itself be the reason why the whole fails.
        return {island: why for island, why in found.items() if island != WHOLE} or found

    def culprits(self, island: Island) -> dict[Island, str]:
        """Those among ``island`` and what it calls."""
        if island not in self.known:
            # For an island that calls itself in turn.
            self.known[island] = {}
            self.known[island] = self._found(island)
        return self.known[island]

    def _found(self, island: Island) -> dict[Island, str]:
        if island in self.given:
            return {island: self.given[island]}
        if not self._runs_alone(island):
            # What is around it tells whether those that it calls are all.
            return {stub: why for child in self.records.children(island) for stub, why in self.culprits(child).items()}
        below = self.records.below(island)
        inner = {stub: why for stub, why in self.given.items() if stub in below}
        why = self.refusal(island, inner)
        if why is None:
            return inner
        found: dict[Island, str] = {}
        for child in self.records.children(island):
            found |= self.culprits(child)
        if found.keys() != inner.keys() and island not in found:
            left = self.refusal(island, found)
            if left is None:
                return found
            why = f"{why}; {left}"
        return {island: why}

    def _runs_alone(self, island: Island) -> bool:
        """Whether a trial run can have the arguments of ``island``: an object may have changed since, or change."""
        call = self.records.first(island)
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        return island == WHOLE or all(leaf is None or isinstance(leaf, (Tensor, *ARGUMENTS)) for leaf in leaves)

    def refusal(self, island: Island, stubs: Mapping[Island, str]) -> str | None:
        """Why ``island`` cannot be captured, with the ``stubs`` left out; None if it can."""
        for stub in stubs:
            if (why := self.fitness.unfit(stub)) is not None:
                return why
        key = self._likeness(island, stubs)
        if key not in self.verdicts:
            self.verdicts[key] = self._refusal(island, stubs)
        return self.verdicts[key]

    def _refusal(self, island: Island, stubs: Mapping[Island, str]) -> str | None:
        try:
            if island == WHOLE:
                self.capture_around(stubs)
            else:
                self._capture_alone(island, stubs)
        except FusionError as error:
            return str(error)
        except Exception as error:
            return f"it cannot be run by itself: {type(error).__name__}: {error}"
        return None

    def _capture_alone(self, island: Island, stubs: Mapping[Island, str]) -> None:
        top = self.records.first(island)
        args, kwargs = top.args, top.kwargs
        if top.written:
            # By itself, the call would write into leaves that require grad.
            args, kwargs = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
        twin = module_copy(self.model)
        with opaque(twin, stubs, self.records, [twin], top):
            module = twin.get_submodule(island.path)
            target = module if island.method == "forward" else _MethodAsModule(module, island.method)
            capture(target, args, kwargs, varying=False)

    def _likeness(self, island: Island, stubs: Mapping[Island, str]) -> Any:
        """Equal for islands of which one can be captured if another can: but for the values of tensors, one case."""
        prefix = f"{island.path}." if island.path else ""
        paths = frozenset((stub.path.removeprefix(prefix), stub.method) for stub in stubs)
        if not all(stub.path.startswith(prefix) for stub in stubs):
            return island, frozenset(stubs)
        module, call = self.model.get_submodule(island.path), self.records.first(island)
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        if not all(leaf is None or isinstance(leaf, (Tensor, *ARGUMENTS)) for leaf in leaves):
            return island, frozenset(stubs)
        try:
            held = tuple(contents(module).items())
        except FusionError:
            return island, frozenset(stubs)
        parts = tuple((path, type(part), part.training) for path, part in module.named_modules())
        own = tuple((name, _kind(tensor)) for name, tensor in tensors(module))
        given = tuple(_kind(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        return island.method, parts, own, held, given, spec, call.written, paths


def _kind(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


class _MethodAsModule(nn.Module):
    """A module whose forward is another module's method."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, self.method)(*args, **kwargs)
