"""Capture one member's graph; submodules that cannot be captured become eager fallbacks in it.

A forward that specializes a size that varies runs as a whole member by member: its graph would hold for one size only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from hfusion.capture.eager_fallbacks import culprits, opaque, record
from hfusion.capture.eager_runs import runnable
from hfusion.capture.export import capture
from hfusion.capture.fallback_runtime import OpaqueCall, Result
from hfusion.capture.hooks import WHOLE, Island, islands
from hfusion.capture.observe import Observation, check_state, observe
from hfusion.capture.python_reads import GRADIENT_QUESTIONS
from hfusion.capture.reachable_code import names_of
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.guards import fixed
from hfusion.core.program import Capture, Kind, Slot
from hfusion.passes.functional import OPAQUE

_KNOWS_SIZES = (
    "it needs to know a size that varies, as a Python loop over a length does, so that a graph would hold for one size "
    "only; pad to a few sizes to have it fused"
)
_LOOPS_AND_SIZES = "sizes vary, and a part of it runs as members' own code; pad to a few sizes to have the rest fused"


@dataclass(frozen=True)
class VaryingSizes:
    """The dims that vary, for each leaf of the arguments, and whether they must stay dynamic.

    ``whole``: the reason why result sizes of eager fallbacks cannot be inferred, so that all of forward is one
    fallback.
    """

    dims: Sequence[Collection[int]] = ()
    open: bool = False
    whole: str = ""


def specializes(graph: fx.Graph, slots: Sequence[Slot], dims: Sequence[Collection[int]]) -> bool:
    """Return whether a graph holds for one size only of one of the ``dims`` of its inputs; of 0 and 1 all do."""
    placeholders = graph.find_nodes(op="placeholder")
    examples = [node.meta.get("val") for node, slot in zip(placeholders, slots, strict=True) if slot.kind is Kind.INPUT]
    sizes = [fixed(example.shape[dim]) for example, of_input in zip(examples, dims, strict=True) for dim in of_input]
    return any(size is not None and size > 1 for size in sizes)


@dataclass(frozen=True)
class Member:
    """A model to capture, with its arguments; ``bodies()`` returns the models of all members."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bodies: Callable[[], Sequence[nn.Module]]


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
            if not sizes.open or not specializes(graph.graph, graph.slots, sizes.dims):
                return graph, []
            looped = {WHOLE: _KNOWS_SIZES}
            if not loops:
                raise FusionError(f"forward cannot be captured for all sizes: {_KNOWS_SIZES}")
    try:
        return _with_loops(member, sizes, looped, observed, str(refusal))
    except FusionError as error:
        raise error from refusal


def _with_loops(
    member: Member, sizes: VaryingSizes, looped: Mapping[Island, str], observed: Observation | None, refusal: str
) -> tuple[Capture, list[OpaqueCall]]:
    model, args, kwargs = member.model, member.args, member.kwargs
    if not torch.is_grad_enabled() and not names_of([model]).isdisjoint(GRADIENT_QUESTIONS):
        # A trace is made with gradients, and the stand-in of a looped call cannot be compared with the code.
        looped = {WHOLE: "it reads gradients or their mode, and is called without gradients"}
    if sizes.open and WHOLE not in looped:
        # Sizes of what a submodule gives are known for one size of the inputs.
        looped = {WHOLE: _LOOPS_AND_SIZES}
    if torch.is_inference_mode_enabled():
        # Trial runs compare version counters, which inference tensors do not have.
        with torch.inference_mode(False):
            args, kwargs = copies((args, dict(kwargs)))
            return _with_loops(replace(member, args=args, kwargs=kwargs), sizes, looped, None, refusal)
    if observed is None:
        observed = observe(model, args, kwargs)
        check_state(observed)
    records = record(model, args, kwargs, [WHOLE] if WHOLE in looped else [*islands(model)])
    bodies, modes = member.bodies(), observed.modes
    graphs: dict[frozenset[Island], tuple[Capture, list[OpaqueCall]]] = {}

    def capture_around(stubs: Mapping[Island, str]) -> None:
        with opaque(model, stubs, records, bodies) as calls:
            graph = capture(model, args, kwargs, varying=False, dims=sizes.dims if WHOLE in stubs else ())
        _add_values(graph.graph, calls)
        graphs[frozenset(stubs)] = replace(graph, modes=modes), calls

    fallbacks = culprits(model, records, looped, capture_around, refusal)
    if frozenset(fallbacks) not in graphs:
        capture_around(fallbacks)
    _check_modes(modes, [island.path for island in fallbacks])
    return graphs[frozenset(fallbacks)]


def _add_values(graph: fx.Graph, calls_in_graph: Sequence[OpaqueCall]) -> None:
    """Let the graph of a forward that runs as a whole member by member return its values that are no tensors."""
    for call in calls_in_graph:
        if call.is_whole and call.values:
            (node,) = graph.find_nodes(op="call_function", target=OPAQUE)
            output = next(iter(reversed(graph.nodes)))
            results: list[Any] = list(output.args[0])
            position = len(node.meta["val"])
            node.meta["val"] = [*node.meta["val"], *call.values]
            for index, value in enumerate(call.results):
                if not isinstance(value, Result):
                    with graph.inserting_before(output):
                        results[index] = graph.call_function(operator.getitem, (node, position))
                    results[index].meta["val"] = value
                    position += 1
            output.args = (tuple(results),)


def _check_modes(modes: Mapping[str, bool], looped: Sequence[str]) -> None:
    """Raise FusionError if a fallback at one of the paths ``looped`` contains a module whose mode forward changes."""
    for name in modes:
        if any(not path or name == path or name.startswith(f"{path}.") for path in looped):
            raise FusionError(
                f"forward leaves {name or '(root)'} in another mode (train or eval), and can only run in a loop over "
                "members there, whose modes an array cannot follow; set modes by train and eval"
            )
