"""Batches of different sizes: in one call, padded to the largest size, or by a call for each size.

A call for each size is exact for any forward: members of one size are computed together. The arrays that compute
them are cached by the number and variants of their members, and serve other members of these variants. Their programs
are derived from one capture.

A batch is padded with its own last sample, so that no new values arise, and the results are cut to the members' own.
This needs a proof that forward computes each sample independently (`hfusion.passes.sample_dims`), and is done if it at
most doubles the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.array_editing import Kin, Kinds
from hfusion.array.gathered_rows import part_of
from hfusion.array.per_model import note_call
from hfusion.array.unfused_calls import REFUSALS, call_by_size, call_members, check_ragged
from hfusion.capture.registered_tensors import holder_of, tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import bind
from hfusion.compiler.compiled_program import Compiled, check_members
from hfusion.compiler.fusion_report import FusionReport
from hfusion.core.calls import StackedInput
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.gradient_usage import of_rows as gradients_of_rows
from hfusion.core.member_random import seeds_of_rows
from hfusion.core.program import Kind
from hfusion.core.ragged import Ragged
from hfusion.torch_private.functorch import in_transform

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# How many times the members' own samples a padded batch may have. Small models take the time of their calls, not of
# their samples, and would gain beyond that; large ones would lose.
MOST_SAMPLES = 2

# Maximum number of combinations of sizes for which it is cached whether a program takes them without padding.
MAX_SIZES = 4096

# The entry that says that batches were padded.
_PADDED = "padded"

# Maximum number of arrays of some of the members that are cached for further calls.
MAX_ARRAYS = 64


def size_reports(fused: FusedModule) -> list[FusionReport]:
    """Report how batches of different sizes have run: in the whole array, and in arrays for members of one size."""
    lines = [f"by a call for each size: {why}" for _, why, _ in fused._samples.values() if isinstance(why, str)]
    if _PADDED in fused._samples:
        lines.insert(0, "in one call, filled up to the largest, where that at most doubles the samples")
    lines = [f"batches of different sizes run {line}" for line in dict.fromkeys(lines)]
    return [FusionReport((), (), tuple(lines)), *(array.report() for array in fused._sized.values())]


def run_padded(fused: FusedModule, arguments: Arguments) -> Any:
    """Return the outputs of all members from one padded call, or None if they must be computed by size."""
    sizes = _sizes(arguments)
    if sizes is None or min(sizes) == 0 or len(sizes) * max(sizes) > MOST_SAMPLES * sum(sizes):
        return None
    filled = Arguments(tuple(_filled(leaf, sizes) for leaf in arguments.leaves), arguments.spec)
    kind = fused._modes(filled), filled.loose_key
    if kind in fused._samples:
        return None
    try:
        compiled = fused._program(filled)
    except FusionError as error:
        fused._samples[kind] = None, str(error), {}
        return None
    if id(compiled) not in fused._samples:
        fused._samples[id(compiled)] = compiled, _sample_dims(compiled, arguments), {}
    _, dims, fitting = fused._samples[id(compiled)]
    if sizes not in fitting:
        if len(fitting) == MAX_SIZES:
            fitting.clear()
        pairs = list(zip(arguments.leaves, filled.shapes, strict=True))
        rows = {size: row for row, size in enumerate(sizes)}.values()
        shapes = [[leaf[row].shape if isinstance(leaf, Ragged) else shape for leaf, shape in pairs] for row in rows]
        fitting[sizes] = all(map(compiled.guards, shapes))
    if isinstance(dims, str) or not fitting[sizes]:
        return None
    args, kwargs = (
        (filled.leaves, {}) if isinstance(filled.spec, int) else pytree.tree_unflatten(filled.leaves, filled.spec)
    )
    leaves, spec = pytree.tree_flatten(fused.forward(*args, **kwargs))
    fused._samples[_PADDED] = None, (), {}
    return pytree.tree_unflatten([_cut(leaf, dim, sizes) for leaf, dim in zip(leaves, dims, strict=True)], spec)


def _sample_dims(compiled: Compiled, arguments: Arguments) -> tuple[int | None, ...] | str:
    """Return the dim of samples of each output of a program, None if it depends on no sample; or why it has none."""
    if compiled.opaque:
        return f"{compiled.opaque[0].path or 'forward'} runs as the members' own code"
    if compiled.written or compiled.modes:
        return f"forward changes {min(compiled.written, default='its modes')}"
    if compiled.checks:
        return f"forward checks values at {compiled.checks[0]}"
    if compiled.memory_orders is not None:
        return "forward depends on the strides of its inputs"
    # Only here is sympy needed, which takes long to import.
    from hfusion.passes.sample_dims import output_samples

    slots = zip(compiled.graph.find_nodes(op="placeholder"), compiled.program.slots, strict=True)
    inputs = [(node, int(slot.name)) for node, slot in slots if slot.kind is Kind.INPUT]
    batches = [node for node, position in inputs if isinstance(arguments.leaves[position], Ragged)]
    return output_samples(compiled.graph, batches)


def _sizes(arguments: Arguments) -> tuple[int, ...] | None:
    """Return each member's number of samples; None if ragged arguments disagree on it, or differ in other sizes."""
    sizes = {leaf.sizes for leaf in arguments.ragged}
    alike = all(len({tensor.shape[1:] for tensor in leaf}) == 1 for leaf in arguments.ragged)
    return sizes.pop() if alike and len(sizes) == 1 else None


def _filled(leaf: Any, sizes: Sequence[int]) -> Any:
    """Pad a ragged argument to ``[B, N, ...]`` by repeating each last sample. Other leaves are returned unchanged."""
    if not isinstance(leaf, Ragged):
        return leaf
    device = leaf[0].device
    counts = torch.tensor(sizes, device=device).unsqueeze(1)
    positions = torch.arange(max(sizes), device=device).minimum(counts - 1)
    return StackedInput(torch.cat(tuple(leaf))[counts.cumsum(0) - counts + positions])


def _cut(leaf: Any, dim: int | None, sizes: Sequence[int]) -> Any:
    if dim is None:
        return leaf
    return Ragged(row.narrow(dim, 0, size) for row, size in zip(leaf.unbind(), sizes, strict=True))


def run_ragged(fused: FusedModule, arguments: Arguments) -> Any:
    """Return the outputs of all members for arguments of which some are ragged."""
    check_ragged(len(fused), arguments)
    if in_transform():
        raise FusionError(
            f"a fused {fused._original} is called inside of torch.func with batches of different sizes "
            f"({arguments.ragged[0]}), which no transform takes; give batches of one size, or transform the members"
        )
    outputs = run_padded(fused, arguments)
    if outputs is None:
        check_members(len(fused), arguments)
        outputs = call_by_size(arguments, range(len(fused)), partial(_run_rows, fused))
        note_call(fused)
    return outputs


def _run_rows(fused: FusedModule, rows: list[int], arguments: Arguments) -> Any:
    """Return the outputs of members ``rows``, whose batches have one size, computed as an array of these members."""
    variants, stacks, shared = fused._array.comparison.variants, dict(tensors(fused)), fused._array.comparison.shared
    index = {device: torch.tensor(rows, device=device) for device in {t.device for t in stacks.values()}}
    rows_by_id = {id(t): t.index_select(0, index[t.device]) for name, t in stacks.items() if name not in shared}
    held = {name: rows_by_id.get(id(stack), stack) for name, stack in stacks.items()}
    # Code that runs member by member may store state on members, so the array with a program of it serves only them.
    for key in (tuple(variants[row] for row in rows), ("rows", *rows)):
        array = _sized(fused, key, rows)
        with holding(array, held):
            compiled = _checked(array, rows, arguments)
            if compiled.opaque and key[:1] != ("rows",):
                continue
            with gradients_of_rows(rows), seeds_of_rows(rows):
                try:
                    outputs = bind(compiled, array, len(rows))(arguments.values)
                except REFUSALS as error:
                    call_members([fused._member(row) for row in rows], arguments, error)
                    array._compiler.distrust(array._modes(arguments), arguments, compiled, str(error))
                    compiled = _checked(array, rows, arguments)
                    outputs = bind(compiled, array, len(rows))(arguments.values)
        break
    with torch.no_grad():
        for name in compiled.written - shared:
            stacks[name].detach()[rows] = held[name].detach()
    return outputs


def _checked(array: FusedModule, rows: Sequence[int], arguments: Arguments) -> Compiled:
    """Return the program of members ``rows`` for a call, captured and checked with the current values."""
    try:
        compiled = array._program(arguments)
        array._check_once(compiled, arguments)
    except ForwardsDiffer as error:
        raise error.of_rows(rows) from error
    if compiled.modes:
        raise FusionError(
            f"forward of {array._original} sets train and eval modes, and batches have different sizes; set the "
            "modes before the call, by train() or eval() of the array"
        )
    return compiled


@contextmanager
def holding(array: nn.Module, replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: replace tensors of ``array`` by ``replacements``, by key, and restore them."""
    places = [(*holder_of(array, name)[:2], tensor) for name, tensor in replacements.items()]
    replaced = [(table, leaf, table[leaf]) for table, leaf, _ in places]
    try:
        for table, leaf, tensor in places:
            table[leaf] = tensor
        yield
    finally:
        for table, leaf, tensor in replaced:
            table[leaf] = tensor


def _weightless(stack: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Return a tensor for ``rows`` of a stack that takes no memory, or a shared tensor (``rows`` is None) itself."""
    values = stack.detach() if rows is None else stack.detach().new_zeros(()).expand(len(rows), *stack.shape[1:])
    return nn.Parameter(values, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else values


def _sized(fused: FusedModule, key: Any, rows: list[int]) -> FusedModule:
    arrays = fused._sized
    kinds = tuple((tensor.dtype, tensor.device) for tensor in fused.stacks.values())
    modes, trained = fused.training_by_path(), {name: p.requires_grad for name, p in fused.named_parameters()}
    key = (fused._number, key, tuple(modes.values()), kinds, tuple(trained.values()))
    array = arrays.pop(key, None)
    if array is None:
        array = part_of(fused, rows, _weightless)
        contents = tuple(Kinds.of(array).contents)
        array._compiler.kin = Kin(array, array._compiler, contents, partial(_related, fused))
    arrays[key] = array
    while len(arrays) > MAX_ARRAYS:
        del arrays[next(iter(arrays))]
    for path, branch in array.named_modules():
        branch.training = modes[path]
    for name, parameter in array.named_parameters():
        parameter.requires_grad_(trained[name])
    return array


def _related(fused: FusedModule) -> list[FusedModule]:
    """Return the whole array, and its arrays for members of one size."""
    return [fused, *(array for (number, *_), array in fused._sized.items() if number == fused._number)]
