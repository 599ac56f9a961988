"""Eager fallbacks inside an array: one call of a submodule, run for one member after another.

Each member's call gets tensors with versions and a history of their own in the memory of the array, so that changes
are detected, and reach neither another member nor the caller's tensors. A write into an input is refused when it
happens, unless the capture recorded it and nothing else uses the input: then each member gets a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from hfusion.capture.address_access import own_leaves, own_memory, own_rows
from hfusion.capture.hooks import with_hooks
from hfusion.capture.registered_tensors import holder_of
from hfusion.capture.tensor_references import Reference
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import join, running
from hfusion.core.layout import Listed, member_values, same_value
from hfusion.core.memory import is_plain, overlap, same_values
from hfusion.core.parameter_attributes import keep_marks

# Placeholders in `OpaqueCall.leaves`. None would not do, since it may be an argument.
TENSOR = object()
SIZE = object()


class OtherSizes(FusionError):
    """A result has another size than was inferred, or another value; the array has to be captured for it."""


@dataclass(frozen=True)
class InputSize:
    """The size of dim ``dim`` of input ``index``; for a negative index, the size argument number ``-1 - index``."""

    index: int
    dim: int


@dataclass(frozen=True)
class Result:
    """Shape, dtype and device of a result; with ``free`` any sizes are accepted."""

    shape: tuple[int | InputSize, ...]
    dtype: torch.dtype
    device: torch.device
    free: bool = False

    def sizes(self, inputs: Sequence[Tensor], sizes: Sequence[Any]) -> list[Any]:
        """Return the sizes of the result for these ``inputs`` and these varying ``sizes`` among the arguments."""

        def size(part: int | InputSize) -> Any:
            if not isinstance(part, InputSize):
                return part
            return sizes[-1 - part.index] if part.index < 0 else inputs[part.index].shape[part.dim]

        return [size(part) for part in self.shape]


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """One call of a submodule in forward.

    Attributes:
        path, module_path, method: its name in messages, the path of the submodule, and the method that is called.
        leaves: its flat arguments, with `TENSOR` for a tensor and `SIZE` for a size that varies.
        fixed, changing: the keys of the submodule's tensors: ``changing`` has the buffers, and parameters that change.
        results: the flat results of one member; values that are no tensors are unchanged.
        contiguous: for each input, whether it was contiguous.
        written: the positions of the inputs that it writes into.
        assigned, changed: the keys of the buffers that it replaces, and of its own tensors that forward changed.
        addresses, draws: whether it accesses raw addresses of tensors, and draws random numbers.
        grad, attached: whether autograd is on; whether it is off and some result needs a gradient nevertheless.
        bodies: every member's submodule.
        references: the plain attributes in which each body holds its own tensors a second time.
        orders: the memory order of each input's dims, if the code may read strides; None for an input that is no
            permutation of a contiguous tensor.
        open_sizes: whether a size of an input varies, so that sizes of results are inferred.
    """

    path: str
    module_path: str
    method: str
    why: str
    leaves: tuple[Any, ...]
    spec: Any
    fixed: tuple[str, ...]
    changing: tuple[str, ...]
    results: tuple[Any, ...]
    contiguous: tuple[bool, ...]
    written: frozenset[int]
    assigned: frozenset[str]
    changed: frozenset[str]
    addresses: bool
    draws: bool
    grad: bool
    attached: bool
    bodies: tuple[nn.Module, ...]
    references: tuple[tuple[Reference, ...], ...] = ()
    orders: tuple[tuple[int, ...] | None, ...] = ()
    open_sizes: bool = False
    _holders: dict[int, tuple[tuple[Any, str, str], ...]] = field(default_factory=dict, init=False)

    def holders(self, member: int) -> tuple[tuple[Any, str, str], ...]:
        """Return the dict, the name in it and the key of each own tensor of a member's submodule, fixed ones first."""
        if member not in self._holders:
            self._holders[member] = tuple(holder_of(self.bodies[member], key) for key in (*self.fixed, *self.changing))
        return self._holders[member]

    @property
    def is_whole(self) -> bool:
        """Return whether it is the call of the model's forward itself."""
        return not self.module_path and self.method == "forward"

    @property
    def values(self) -> list[Any]:
        """The results that are no tensors, of one member. Those of the whole forward are new at every call."""
        return [result for result in self.results if not isinstance(result, Result)]

    @cached_property
    def positional(self) -> bool:
        """Return whether the arguments are the leaves, by position."""
        return bool(self.spec == pytree.tree_structure((self.leaves, {})))


calls: WeakValueDictionary[int, OpaqueCall] = WeakValueDictionary()


def run(
    numbers: Sequence[int],
    inputs: Sequence[Any],
    fixed: Sequence[Any],
    changing: Sequence[Any],
    apart: Sequence[int],
    alive: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    """Run the eager fallback for one member after another, and stack each result as ``[B, *S]``.

    Those of the whole forward that are no tensors follow, joined by `member_values`.

    Args:
        numbers: ``numbers[b]`` is member b's call in `calls`.
        inputs: tensors that all members share, or `Listed` ones with a tensor per member.
        fixed, changing: the submodule's own tensors, in the same form.
        apart: flat pairs of positions (result, source) of tensors that must share no memory.
        alive: positions among inputs and changing that must not change.
        sizes: numbers among the arguments that vary.

    Raises:
        FusionError: a member does something that was not recorded when it was captured, and that mixes members.
    """
    members, watching = len(numbers), running()
    for x in (*inputs, *fixed, *changing):
        if watching is not None and isinstance(x, Listed):
            watching.took(x)
    first = calls[numbers[0]]
    arguments = inputs
    if first.addresses:
        # Only tensors per member are copied; tensors that all members share stay in their memory.
        arguments = [Listed([own_memory(row) for row in x]) if isinstance(x, Listed) else x for x in inputs]
    rows_of = [own_rows(x, members) for x in (*arguments, *changing)]
    memory = [x if isinstance(x, Listed) else Listed([x] * members) for x in (*inputs, *changing)]
    shared = [x for x in alive if not isinstance([*inputs, *changing][x], Listed)]
    rows = []
    with _unchanged([memory[x][0] for x in shared], f"{first.path} of a model"):
        for member, number in enumerate(numbers):
            call = calls[number]
            watched = [memory[x][member] for x in alive if x not in shared]
            weights = own_leaves([x[member] if isinstance(x, Listed) else x for x in fixed])
            with _unchanged(watched, f"{call.path} of model {member}"):
                rows.append(_run_member(call, member, [x[member] for x in rows_of], weights, apart, alive, sizes))
            for aliases, row in list(zip(rows_of, memory, strict=True))[len(inputs) :]:
                _tell_version(aliases[member], row[member])
    columns = list(zip(*rows, strict=True))
    return [_stack(first, parts) if isinstance(parts[0], Tensor) else member_values(parts) for parts in columns]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# The version counter of a new `_alias`.
_FRESH = 1


def _tell_version(row: Tensor, memory: Tensor) -> None:
    """Bump the version counter of ``memory`` after a write through ``row``."""
    if row is not memory and _version(row) > _FRESH and not memory.is_inference():
        increment_version(memory)


@contextmanager
def _unchanged(tensors: Sequence[Tensor], label: str) -> Iterator[None]:
    """Context manager: restore the values of ``tensors`` and raise FusionError if they have changed in any way."""
    copies = [tensor.detach().clone() for tensor in tensors]
    changed: list[Tensor] = []
    try:
        yield
    finally:
        for tensor, before in zip(tensors, copies, strict=True):
            if not _same_bits(tensor.detach(), before):
                changed.append(before)
                with torch.inference_mode(tensor.is_inference()):
                    tensor.data.copy_(before)
    if changed:
        raise FusionError(_writes(label, changed[0]))


def _writes(label: str, tensor: Tensor) -> str:
    return (
        f"{label} runs in a loop over members and writes into its input of shape {tuple(tensor.shape)}, which others "
        "see, too (the caller, other members, or what follows); let it write into a copy"
    )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(before: Tensor, after: Tensor) -> bool:
    """Compare bit by bit, so that NaN equals NaN; tensors without plain memory count as equal."""
    if not is_plain(before):
        return True
    before, after = (torch.view_as_real(x) if x.is_complex() else x for x in (before, after))
    bits = _BITS[before.element_size()]
    return torch.equal(before.view(bits), after.view(bits))


def _run_member(
    call: OpaqueCall,
    member: int,
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor],
    apart: Sequence[int],
    alive: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    count = len(tensors) - len(call.changing)
    inputs = [_prepared(call, index, x) for index, x in enumerate(tensors[:count])]
    held = [*inputs, *tensors[count:]]
    versions = [_version(x) for x in held]
    arguments, numbers = iter(inputs), iter(sizes)
    leaves = [_next(leaf, arguments, numbers) for leaf in call.leaves]
    args, kwargs = (leaves, {}) if call.positional else pytree.tree_unflatten(leaves, call.spec)
    registered = dict(zip((*call.fixed, *call.changing), (*weights, *tensors[count:]), strict=True))
    with _filled(call, member, registered) as body, torch.set_grad_enabled(call.grad and torch.is_grad_enabled()):
        output = _called(call, member, body, args, kwargs)
    results = _results(call, member, output, inputs, sizes)
    for index in [*range(count), *(index for index in alive if index >= count)]:
        if _version(held[index]) != versions[index] and index not in call.written:
            raise FusionError(_writes(f"{call.path} of model {member}", held[index]))
    _check_apart(call, member, results, [*inputs, *registered.values()], apart)
    values = [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, Tensor)] if call.is_whole else []
    return [*(map(own_memory, results) if call.addresses else results), *values]


def _called(call: OpaqueCall, member: int, body: nn.Module, args: Any, kwargs: Any) -> Any:
    try:
        method = getattr(body, call.method)
        return (with_hooks(body, method) if call.method == "forward" else method)(*args, **kwargs)
    except RuntimeError as error:
        # In the loop, parameters are rows of stacks, whose requires_grad torch does not let change.
        if "can only change requires_grad flags of leaf" not in str(error):
            raise
        raise FusionError(
            f"{call.path or 'forward'} of model {member} switches requires_grad of a parameter or another tensor while "
            "it runs, where an array has one stack for all members; detach() what shall get no gradient there"
        ) from error


def _next(leaf: Any, inputs: Iterator[Tensor], sizes: Iterator[int]) -> Any:
    if leaf is TENSOR:
        return next(inputs)
    return next(sizes) if leaf is SIZE else leaf


def _prepared(call: OpaqueCall, index: int, x: Tensor) -> Tensor:
    """Return an input for a member's code: a copy if the code writes into it, else with the recorded memory order."""
    if index in call.written:
        return x.clone(memory_format=torch.contiguous_format if call.contiguous[index] else torch.preserve_format)
    if call.is_whole:
        # The whole forward gets the caller's tensor as it is.
        return x
    order = call.orders[index] if call.orders else None
    if order is not None:
        return x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
    return x.contiguous() if call.contiguous[index] else x


def _results(
    call: OpaqueCall, member: int, output: Any, inputs: Sequence[Tensor], sizes: Sequence[int]
) -> list[Tensor]:
    """Return the tensors among the results, checked against those of the capture."""
    label = f"{call.path} of model {member}"
    leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    if len(leaves) != len(call.results):
        raise FusionError(f"{label} gave {len(leaves)} results, and {len(call.results)} when it was captured")
    for leaf, expected in zip(leaves, call.results, strict=True):
        if not isinstance(expected, Result):
            if isinstance(leaf, Tensor) or not (call.is_whole or same_value(leaf, expected)):
                # All of forward runs member by member then.
                raise (FusionError if call.is_whole else OtherSizes)(
                    f"{label} gave {_describe(leaf)} where it gave {_describe(expected)} when it was captured; "
                    "results that depend on values must be tensors"
                )
        else:
            _check_shape(call, label, leaf, expected, expected.sizes(inputs, sizes))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _check_shape(call: OpaqueCall, label: str, leaf: Any, expected: Result, shape: list[int]) -> None:
    alike = isinstance(leaf, Tensor) and leaf.dim() == len(shape)
    if alike and (expected.free or list(leaf.shape) == shape):
        return
    description = f"a result of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else _describe(leaf)
    raise (OtherSizes if alike and call.open_sizes else FusionError)(
        f"{label} gave {description}, where it gave {tuple(shape)} when it was captured; shapes that depend on "
        f"values cannot be fused. It runs member by member, since {call.why}"
    )


def _describe(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _check_apart(
    call: OpaqueCall, member: int, results: Sequence[Tensor], sources: Sequence[Tensor], apart: Sequence[int]
) -> None:
    tensors = [*sources, *results]
    for k, source in zip(apart[::2], apart[1::2], strict=True):
        if overlap(results[k], tensors[source]):
            result = "one tensor twice" if source >= len(sources) else "its input or a tensor of its own"
            raise FusionError(
                f"{call.path} of model {member} gives back {result}, or a view of it, which is changed in place later; "
                "when it was captured it did not: give back a copy"
            )


def _stack(call: OpaqueCall, parts: Sequence[Tensor]) -> Tensor:
    sparse = next((part for part in parts if part.layout is not torch.strided and part.requires_grad), None)
    if sparse is not None:
        raise FusionError(
            f"{call.path} runs in a loop over members and gives a tensor of layout {sparse.layout} that needs a "
            "gradient, which torch cannot take of a stack of such; let it give to_dense()"
        )
    kinds = {(part.shape, part.dtype, part.device) for part in parts}
    if len(kinds) > 1:
        descriptions = ", ".join(f"{tuple(part.shape)} {part.dtype} {part.device}" for part in parts)
        raise FusionError(
            f"{call.path} gave different results for the members: {descriptions}; an array stacks them, so shapes that "
            "depend on values cannot be fused: use a form of fixed size, such as torch.where, and one dtype and device"
        )
    return join(parts)


@contextmanager
def _filled(call: OpaqueCall, member: int, registered: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Context manager: put the tensors ``registered`` into the member's submodule, and copy replaced buffers into them.

    The tensors stay in the submodule afterwards: a checkpoint runs the body again in backward.
    """
    body = call.bodies[member]
    slots = []
    substitutes: dict[int, Tensor] = {}
    changing = frozenset(call.changing)
    for (holder, name, key), tensor in zip(call.holders(member), registered.values(), strict=True):
        # Code that replaces a buffer leaves the old one unchanged, for backward.
        substitute = own_memory(tensor) if call.addresses or key in call.assigned else tensor
        # Detached now, since forward may move the tensor to other memory.
        slots.append((holder, name, key, substitute, _version(substitute) if key in changing else 0, tensor.detach()))
        before = holder[name]
        if vars(before) or type(substitute) is not Tensor:
            # The class and attributes that the tensor had: ``substitute`` is used in this call, ``tensor`` after it.
            keep_marks(substitute, keep_marks(tensor, before))
        substitutes[id(before)] = substitute
        holder[name] = substitute
    _put(call, member, substitutes)
    try:
        yield body
    finally:
        for holder, name, key, substitute, version, memory in slots:
            after = holder.get(name)
            holder[name] = registered[key]
            if after is substitute and after.data_ptr() == memory.data_ptr():
                continue
            # A parameter may move to other memory with equal values, as in an RNN.
            if after is not substitute or key in changing or not same_values(after, memory):
                bump_version = after is not substitute or (key in changing and _version(after) != version)
                _write_back(f"{call.path} of model {member} assigns {key}", memory, after, bump_version)
        if call.references:
            _put(call, member, {id(substitute): registered[key] for _, _, key, substitute, *_ in slots})


def _put(call: OpaqueCall, member: int, substitutes: Mapping[int, Tensor]) -> None:
    for reference in call.references[member] if call.references else ():
        reference.put(call.bodies[member], substitutes)


def _write_back(description: str, memory: Tensor, after: Any, bump_version: bool) -> None:
    """Copy ``after`` into ``memory``; the version counter of ``memory`` is bumped only if ``bump_version``."""
    kinds = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in (memory, after)]
    if kinds[0] != kinds[1] or isinstance(after, nn.Parameter):
        raise FusionError(f"{description}, but not a buffer of the same shape, dtype and device; write into it")
    with torch.no_grad():
        (memory if bump_version else memory.data).copy_(after.detach())
