"""Batches of different sizes: in one call, padded to the largest size, or by a call for each size.

A call for each size is exact for any forward: members of one size are computed together. The arrays that compute
them are cached by the number and variants of their members, and serve other members of these variants. Their programs
are derived from one capture.

A batch is padded with its own last sample, so that no new values arise, and the results are cut to the members' own.
This needs a proof that forward computes each sample independently (`hfusion.passes.sample_dims`), is checked once
against calls by size, and is done if it at most doubles the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.array.array_editing import Kin, Kinds
from hfusion.array.gathered_rows import part_of
from hfusion.array.per_model import note_call
from hfusion.array.unfused_calls import REFUSALS, call_by_size, call_members, check_ragged
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import bind
from hfusion.compiler.compiled_program import Compiled, check_members
from hfusion.compiler.fusion_report import FusionReport
from hfusion.compiler.verify import GRADIENTS, TIGHT, allowed_differences, fixed_projection, relative_difference
from hfusion.core.calls import StackedInput
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.gradient_usage import of_rows as gradients_of_rows
from hfusion.core.member_random import seeds_of_rows
from hfusion.core.program import Kind
from hfusion.core.ragged import Ragged
from hfusion.device.backend import active_autocast
from hfusion.torch_private.functorch import in_transform

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# Computes the members of the given rows, with one call for each batch size.
BySize = Callable[[Sequence[int]], Any]


@dataclass(eq=False)
class Padding:
    """The analysis of a program for padded batches.

    Attributes:
        compiled: the program.
        dims: for each output, the dim of samples; None for one that depends on no sample.
        refused: the reason why batches stay divided by size; empty if none is known.
        checked: the values of ``torch.is_grad_enabled()`` for which it was compared with calls by size.
    """

    compiled: Compiled
    dims: tuple[int | None, ...] = ()
    refused: str = ""
    checked: set[bool] = field(default_factory=set)

    @staticmethod
    def of(fused: FusedModule, compiled: Compiled, arguments: Arguments) -> Padding:
        """Analyze a program for arguments of which some are ragged."""
        if compiled.opaque:
            return Padding(compiled, refused=f"{compiled.opaque[0].path or 'forward'} runs as the members' own code")
        if compiled.written or compiled.modes:
            changed = min(compiled.written, default="its modes")
            return Padding(compiled, refused=f"forward changes {changed}")
        if compiled.checks:
            return Padding(compiled, refused=f"forward checks values at {compiled.checks[0]}")
        if compiled.memory_orders is not None:
            return Padding(compiled, refused="forward depends on the strides of its inputs")
        # Only here is sympy needed, which takes long to import.
        from hfusion.passes.sample_dims import output_samples

        dims = output_samples(compiled.graph, _batches(compiled, arguments))
        if isinstance(dims, str):
            return Padding(compiled, refused=dims)
        return Padding(compiled, dims)

    def serves(self, arguments: Arguments, sizes: Sequence[int]) -> bool:
        """True if the program's guards hold for the batches without padding, and padding does not add too many."""
        rows = {size: row for row, size in enumerate(sizes)}.values()
        few = len(sizes) * max(sizes) <= MOST_SAMPLES * sum(sizes)
        return few and all(self.compiled.guards(arguments.of_rows([row]).shapes) for row in rows)


# How many times the members' own samples a padded batch may have. Small models take the time of their calls, not of
# their samples, and would gain beyond that; large ones would lose.
MOST_SAMPLES = 2

_paddings: WeakKeyDictionary[FusedModule, dict[int, Padding]] = WeakKeyDictionary()
_refused: WeakKeyDictionary[FusedModule, dict[Any, str]] = WeakKeyDictionary()


def size_lines(fused: FusedModule) -> tuple[str, ...]:
    """Return lines that report how batches of different sizes have run."""
    paddings = _paddings.get(fused, {}).values()
    lines = [f"by a call for each size: {padding.refused}" for padding in paddings if padding.refused]
    lines += [f"by a call for each size: {why}" for why in _refused.get(fused, {}).values()]
    if any(padding.checked for padding in paddings if not padding.refused):
        lines.insert(0, "in one call, filled up to the largest, where that at most doubles the samples")
    return tuple(f"batches of different sizes run {line}" for line in dict.fromkeys(lines))


def run_padded(fused: FusedModule, arguments: Arguments, by_size: BySize) -> Any:
    """Return the outputs of all members from one padded call, or None if they must be computed by size."""
    sizes = _sizes(arguments)
    if sizes is None or min(sizes) == 0:
        return None
    key = fused._modes(arguments), arguments.of_rows([0]).loose_key
    if key in _refused.setdefault(fused, {}):
        return None
    filled = Arguments(tuple(_filled(leaf, sizes) for leaf in arguments.leaves), arguments.spec)
    try:
        compiled = fused._program(filled)
    except FusionError as error:
        _refused[fused][key] = str(error)
        return None
    paddings = _paddings.setdefault(fused, {})
    padding = paddings.get(id(compiled))
    if padding is None or padding.compiled is not compiled:
        _drop_unused(fused, paddings)
        padding = paddings[id(compiled)] = Padding.of(fused, compiled, arguments)
    if padding.refused or not padding.serves(arguments, sizes):
        return None
    if torch.is_grad_enabled() not in padding.checked:
        padding.checked.add(torch.is_grad_enabled())
        padding.refused = _disagreement(fused, padding, filled, sizes, by_size) if fused._array.verify else ""
        if padding.refused:
            return None
    return _run(fused, padding, filled, sizes)


def _drop_unused(fused: FusedModule, paddings: dict[int, Padding]) -> None:
    """Forget programs that the array has dropped."""
    families = [family for compiler in fused._compilers() for family in compiler.families.values()]
    program_ids = {id(compiled) for family in families for compiled in family}
    for number in paddings.keys() - program_ids:
        del paddings[number]


def _run(fused: FusedModule, padding: Padding, filled: Arguments, sizes: Sequence[int]) -> Any:
    args, kwargs = (
        (filled.leaves, {}) if isinstance(filled.spec, int) else pytree.tree_unflatten(filled.leaves, filled.spec)
    )
    leaves, spec = pytree.tree_flatten(fused.forward(*args, **kwargs))
    cut = [_cut(leaf, dim, sizes) for leaf, dim in zip(leaves, padding.dims, strict=True)]
    return pytree.tree_unflatten(cut, spec)


def _batches(compiled: Compiled, arguments: Arguments) -> list[fx.Node]:
    """Return the placeholders of a program for ragged arguments."""
    slots = zip(compiled.graph.find_nodes(op="placeholder"), compiled.program.slots, strict=True)
    inputs = [(node, int(slot.name)) for node, slot in slots if slot.kind is Kind.INPUT]
    return [node for node, position in inputs if isinstance(arguments.leaves[position], Ragged)]


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


def _disagreement(
    fused: FusedModule, padding: Padding, filled: Arguments, sizes: Sequence[int], by_size: BySize
) -> str:
    """Compare members of the smallest and largest size with calls by size. Return a difference found, or ''."""
    rows = sorted({sizes.index(min(sizes)), sizes.index(max(sizes))})
    parameters = {name: p for name, p in fused.named_parameters() if p.requires_grad}
    padded = [_rows_of(leaf, rows) for leaf in pytree.tree_leaves(_run(fused, padding, filled, sizes))]
    expected = [[*leaf] if isinstance(leaf, Tensor | Ragged) else leaf for leaf in pytree.tree_leaves(by_size(rows))]
    allowed = allowed_differences(padding.compiled, fused.stacks)
    rounded = [TIGHT.get(dtype, 1e-2) for _, dtype in active_autocast() or ()]
    pairs = zip(_outcome(padded, parameters), _outcome(expected, parameters), strict=True)
    compared = [(name, a, b) for (name, a), (_, b) in pairs]
    norms = [float(b.double().norm()) for name, _, b in compared if name in parameters]
    floor = 1e-4 * max(filter(math.isfinite, norms), default=0.0)
    for name, a, b in compared:
        looser = GRADIENTS if name in parameters else 1.0
        difference = relative_difference(a, b, floor if name in parameters else 0.0)
        if difference > looser * max(allowed.get(b.dtype, 1e-2), *rounded, 0.0):
            label = f"the gradient of {name}" if name in parameters else name
            return f"filled up, {label} differs by {difference:.1e} relative"
    return ""


def _rows_of(leaf: Any, rows: Sequence[int]) -> Any:
    return [leaf[row] for row in rows] if isinstance(leaf, Tensor | Ragged) else leaf


def _outcome(outputs: Sequence[Any], parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the outputs, and the gradients of a fixed projection of them, with their names."""
    tensors = [tensor for output in outputs if isinstance(output, list) for tensor in output]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    results = [(f"output {k}", tensor.detach()) for k, tensor in enumerate(floating)]
    total = sum((fixed_projection(t) for t in floating if t.requires_grad), start=torch.zeros((), device="cpu"))
    if parameters and total.requires_grad:
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters, gradients, parameters.values(), strict=True)
        results += [(n, torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g) for n, g, p in pairs]
    return results


# Maximum number of arrays of some of the members that are cached for further calls.
MAX_ARRAYS = 64


_arrays: WeakKeyDictionary[FusedModule, dict[Any, FusedModule]] = WeakKeyDictionary()


def size_reports(fused: FusedModule) -> list[FusionReport]:
    """Report how batches of different sizes have run: in the whole array, and in arrays for members of one size."""
    arrays = [array.report() for array in _arrays.get(fused, {}).values()]
    return [FusionReport((), (), size_lines(fused)), *arrays]


def run_ragged(fused: FusedModule, arguments: Arguments) -> Any:
    """Return the outputs of all members for arguments of which some are ragged."""
    check_ragged(len(fused), arguments)
    if in_transform():
        raise FusionError(
            f"a fused {fused._original} is called inside of torch.func with batches of different sizes "
            f"({arguments.ragged[0]}), which no transform takes; give batches of one size, or transform the members"
        )
    outputs = run_padded(fused, arguments, partial(_run_by_size, fused, arguments))
    if outputs is None:
        outputs = _run_by_size(fused, arguments, range(len(fused)))
        note_call(fused)
    return outputs


def _run_by_size(fused: FusedModule, arguments: Arguments, rows: Sequence[int]) -> Any:
    """Compute members ``rows`` with one call for each size, and join the results in the members' order."""
    check_members(len(fused), arguments)
    return call_by_size(arguments, rows, partial(_run_rows, fused))


def _run_rows(fused: FusedModule, rows: list[int], arguments: Arguments) -> Any:
    """Return the outputs of members ``rows``, whose batches have one size, computed as an array of these members."""
    variants, stacks, shared = fused._array.comparison.variants, dict(tensors(fused)), fused._array.comparison.shared
    index = {device: torch.tensor(rows, device=device) for device in {t.device for t in stacks.values()}}
    rows_by_id = {id(t): t.index_select(0, index[t.device]) for name, t in stacks.items() if name not in shared}
    held = {name: rows_by_id.get(id(stack), stack) for name, stack in stacks.items()}
    # Code that runs member by member may store state on members, so the array with a program of it serves only them.
    for key in (tuple(variants[row] for row in rows), ("rows", *rows)):
        array = _sized(fused, key, rows)
        with holding(dict(array.named_modules(remove_duplicate=False)), held):
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
def holding(modules: Mapping[str, nn.Module], replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: replace tensors of ``modules`` (by path) by ``replacements`` (by key), and restore them."""
    replaced = []
    for name, tensor in replacements.items():
        path, _, leaf = name.rpartition(".")
        table: Any = modules[path]._parameters if leaf in modules[path]._parameters else modules[path]._buffers
        replaced.append((table, leaf, table[leaf]))
        table[leaf] = tensor
    try:
        yield
    finally:
        for table, leaf, tensor in reversed(replaced):
            table[leaf] = tensor


def _weightless(stack: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Return a tensor for ``rows`` of a stack that takes no memory, or a shared tensor (``rows`` is None) itself."""
    values = stack.detach() if rows is None else stack.detach().new_zeros(()).expand(len(rows), *stack.shape[1:])
    return nn.Parameter(values, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else values


def _sized(fused: FusedModule, key: Any, rows: list[int]) -> FusedModule:
    arrays = _arrays.setdefault(fused, {})
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
    return [fused, *(array for (number, *_), array in _arrays.get(fused, {}).items() if number == fused._number)]
