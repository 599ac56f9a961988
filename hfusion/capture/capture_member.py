"""Capture one member's graph; submodules that cannot be captured become eager fallbacks in it.

Submodules that specialize a size that varies become eager fallbacks, too: their graph would hold for one size only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.eager_fallbacks import culprits
from hfusion.capture.eager_runs import runnable
from hfusion.capture.export import capture
from hfusion.capture.fallback_runtime import OpaqueCall
from hfusion.capture.fallback_tracing import opaque, with_values
from hfusion.capture.method_interception import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.module_call_trace import record
from hfusion.capture.observe import Observation, check_state, observe
from hfusion.capture.python_reads import GRADIENT_QUESTIONS
from hfusion.capture.reachable_code import names_of
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.guards import fixed
from hfusion.core.program import Capture


@dataclass(frozen=True)
class VaryingSizes:
    """The dims that vary, for each leaf of the arguments, and whether they must stay dynamic.

    ``whole``: the reason why result sizes of eager fallbacks cannot be inferred, so that all of forward is one
    fallback.
    """

    dims: Sequence[Collection[int]] = ()
    open: bool = False
    whole: str = ""

    def closed_by(self, captured: Capture, leaves: Sequence[Any]) -> bool:
        """Return whether a capture specialized a dim that varies; dims of size 0 or 1 are not counted."""
        inputs = captured.open_dims
        return any(
            dim not in inputs[k] and leaves[k].shape[dim] > 1
            for k, dims in enumerate(self.dims)
            for dim in dims
            if isinstance(leaves[k], Tensor)
        )


@dataclass(frozen=True)
class Member:
    """A model to capture, with its arguments; ``bodies()`` returns the models of all members."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bodies: Callable[[], Sequence[nn.Module]]

    @property
    def leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, dict(self.kwargs)))


def capture_member(
    member: Member, sizes: VaryingSizes, looped: Mapping[Island, str], loops: bool
) -> tuple[Capture, list[OpaqueCall]]:
    """Return the graph of a member, and its calls that run in a loop over members.

    Args:
        looped: submodules that must run in a loop, with the reasons.
        loops: whether calls may run in a loop; if not, raise instead.

    Raises:
        FusionError: the member cannot be captured; the message gives the reason.
    """
    refusal: FusionError | None = None
    observed: Observation | None = None
    if not looped:
        if runnable(member.model):
            observed = observe(member.model, member.args, member.kwargs)
        try:
            graph = capture(member.model, member.args, member.kwargs, dims=sizes.dims, observed=observed)
        except KeepsState:
            raise
        except FusionError as error:
            if not loops:
                raise
            refusal = error
        else:
            if not sizes.open or not sizes.closed_by(graph, member.leaves):
                return graph, []
            looped = closing(member.model, member.args, member.kwargs, sizes.dims)
            if not loops:
                raise FusionError(
                    f"{next(iter(looped))} cannot be captured for all sizes: {next(iter(looped.values()))}"
                )
    try:
        return _with_loops(member, sizes, looped, observed)
    except FusionError as error:
        raise error from refusal


def _with_loops(
    member: Member, sizes: VaryingSizes, looped: Mapping[Island, str], observed: Observation | None
) -> tuple[Capture, list[OpaqueCall]]:
    model, args, kwargs = member.model, member.args, member.kwargs
    if not torch.is_grad_enabled() and not names_of([model]).isdisjoint(GRADIENT_QUESTIONS):
        # A trace is made with gradients, and the stand-in of a looped call cannot be compared with the code.
        looped = {WHOLE: "it reads gradients or their mode, and is called without gradients"}
    if torch.is_inference_mode_enabled():
        # Trial runs compare version counters, which inference tensors do not have.
        with torch.inference_mode(False):
            args, kwargs = copies((args, dict(kwargs)))
            return _with_loops(replace(member, args=args, kwargs=kwargs), sizes, looped, None)
    if observed is None:
        observed = observe(model, args, kwargs)
        check_state(observed)
    records = record(model, args, kwargs, observed.modes, [WHOLE] if WHOLE in looped else [*islands(model)])
    bodies = member.bodies()
    graphs: dict[frozenset[Island], tuple[Capture, list[OpaqueCall]]] = {}

    def capture_around(stubs: Mapping[Island, str]) -> None:
        with opaque(model, stubs, records, bodies) as calls:
            graph = capture(model, args, kwargs, varying=False, dims=sizes.dims)
        with_values(graph.graph, calls)
        graphs[frozenset(stubs)] = replace(graph, modes=records.modes), calls

    while True:
        fallbacks = culprits(model, records, looped, capture_around)
        _check_modes(records.modes, [island.path for island in fallbacks])
        if frozenset(fallbacks) not in graphs:
            capture_around(fallbacks)
        graph, calls = graphs[frozenset(fallbacks)]
        if not sizes.open or not sizes.closed_by(graph, member.leaves) or WHOLE in fallbacks:
            return graph, calls
        with opaque(model, fallbacks, records, bodies):
            specializing = closing(model, args, kwargs, sizes.dims)
        looped = (
            {**fallbacks, **specializing}
            if specializing.keys() - fallbacks.keys()
            else {WHOLE: next(iter(specializing.values()))}
        )


def _check_modes(modes: Mapping[str, bool], looped: Sequence[str]) -> None:
    """Raise FusionError if a fallback at one of the paths ``looped`` contains a module whose mode forward changes."""
    for name in modes:
        if any(not path or name == path or name.startswith(f"{path}.") for path in looped):
            raise FusionError(
                f"forward leaves {name or '(root)'} in another mode (train or eval), and can only run in a loop over "
                "members there, whose modes an array cannot follow; set modes by train and eval"
            )


def closing(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Sequence[Collection[int]]
) -> dict[Island, str]:
    """Return the submodules whose trace specializes one of the ``dims`` of the argument leaves, with the reasons."""
    watch = _SizeWatch()
    # The trace may fail: only the specialized sizes that were noted until then are used.
    with intercepted(model, islands(model), watch.call), suppress(FusionError):
        capture(model, args, kwargs, varying=False, dims=dims)
    return watch.reasons or {Island(""): _why("a size that varies")}


@dataclass(eq=False)
class _SizeWatch:
    """Finds the submodules that specialize sizes.

    Attributes:
        sizes: the symbolic sizes of forward's arguments.
        specialized: the indices of the sizes that are fixed to one value.
        reasons: the submodules that fixed a size, with the reasons.
        inside: the submodules that are being called, outermost first.
    """

    sizes: list[Any] = field(default_factory=list)
    specialized: set[int] = field(default_factory=set)
    reasons: dict[Island, str] = field(default_factory=dict)
    inside: list[Island] = field(default_factory=list)

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``, and look for specialized sizes before and after."""
        if self.inside:
            self._look(self.inside[-1])
        else:
            self._record_sizes((args, kwargs))
        self.inside.append(method.island)
        try:
            result = method.original(*args, **kwargs)
            self._look(method.island)
        except Exception:
            if self.sizes and not self.reasons:
                self.reasons[method.island] = _why("a size that varies")
            raise
        finally:
            self.inside.pop()
        return result

    def _record_sizes(self, arguments: Any) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self.sizes = [size for x in inputs for size in x.shape if isinstance(size, torch.SymInt)]
        self.specialized = {k for k, size in enumerate(self.sizes) if fixed(size) is not None}

    def _look(self, island: Island) -> None:
        """Note ``island``, which the trace is in, if a size was specialized since the last call of this method."""
        closed = {k for k, size in enumerate(self.sizes) if k not in self.specialized and fixed(size) is not None}
        if closed:
            self.specialized |= closed
            self.reasons.setdefault(island, _why(f"a size that varies ({fixed(self.sizes[min(closed)])} now)"))


def _why(size_description: str) -> str:
    return (
        f"it needs to know {size_description}, as a Python loop over a length does, so that a graph would hold "
        "for one size only; pad to a few sizes to have it fused"
    )
