"""Eager fallbacks inside an array: one call of a submodule, run for one member after another.

Each member's code gets copies of its inputs and of all that it may write, and its results are copied into stacks, so
that nothing it does reaches another member or the caller. What a run does that the recorded run of the capture did not
(it writes into an input, gives back memory of it, or a result of another size) raises `Unforeseen`: all of forward then
runs member by member.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.hooks import WHOLE, Island, with_hooks
from hfusion.capture.registered_tensors import holder_of
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import join, running
from hfusion.core.layout import Layout, Listed, member_values, same_value
from hfusion.core.membership import keep_marks
from hfusion.core.memory import is_plain, same_bits, version_of
from hfusion.ops.rule import Call, MemberScalars, RuleTable, Site, Value
from hfusion.ops.saved import GATES_TWICE
from hfusion.passes.functional import OPAQUE

# A member's submodule, and the dict, the name in it and the key of each of its tensors.
_Place: TypeAlias = tuple[nn.Module, Sequence[tuple[Any, str, str]]]

# Stands for a tensor in `OpaqueCall.leaves`. None would not do, since it may be an argument.
TENSOR = object()


class Unforeseen(FusionError):
    """A call does what its recorded run did not, so that all of forward has to run member by member."""


@dataclass(frozen=True)
class Result:
    """Shape, dtype and device of a result in the recorded call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Result:
        return Result(tuple(tensor.shape), tensor.dtype, tensor.device)


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """One call of a submodule in forward.

    Attributes:
        island: the method that is called.
        why: why it runs in a loop.
        leaves: its flat arguments, with `TENSOR` for a tensor.
        fixed, changing: the keys of the submodule's tensors: ``changing`` has the buffers, and parameters that change.
        results: the flat results of one member; values that are no tensors are unchanged.
        changed: the keys of the submodule's tensors that forward changed.
        addresses: whether its code may address memory, so that every tensor needs a storage of its own.
        asks_class: whether its code may tell a parameter from the plain tensor that replaces it in a loop.
        grad: whether autograd is on.
    """

    island: Island
    why: str
    leaves: tuple[Any, ...]
    spec: Any
    fixed: tuple[str, ...]
    changing: tuple[str, ...]
    results: tuple[Any, ...]
    changed: frozenset[str]
    addresses: bool
    asks_class: bool
    grad: bool

    @property
    def path(self) -> str:
        """The name of the method in messages."""
        return str(self.island)

    @property
    def is_whole(self) -> bool:
        """Return whether it is the call of the model's forward itself."""
        return self.island == WHOLE

    @property
    def values(self) -> list[Any]:
        """The results that are no tensors, of one member. Those of the whole forward are new at every call."""
        return [result for result in self.results if not isinstance(result, Result)]

    @cached_property
    def positional(self) -> bool:
        """Return whether the arguments are the leaves, by position."""
        return bool(self.spec == pytree.tree_structure((self.leaves, {})))


calls: WeakValueDictionary[int, OpaqueCall] = WeakValueDictionary()
_numbers = itertools.count()


def numbered(call: OpaqueCall) -> int:
    """Register ``call``, and return the number by which graphs refer to it while it is alive."""
    number = next(_numbers)
    calls[number] = call
    return number


@torch.library.register_fake(OPAQUE)  # type: ignore[untyped-decorator]
def _fake(inputs: Sequence[Tensor], fixed: Any, changing: Any, call: int) -> list[Tensor]:
    results = [result for result in calls[call].results if isinstance(result, Result)]
    return [torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in results]


def rule(site: Site, inputs: list[Value], fixed: list[Value], changing: list[Value], call: int | MemberScalars) -> Call:
    """Run the submodule's own code in a loop over members."""
    numbers = call.values if isinstance(call, MemberScalars) else (call,) * site.members
    first = calls[numbers[0]]
    for key, value in zip(first.changing, changing, strict=True):
        if value.shared and key in first.changed:
            raise FusionError(_shared(first, key))
    rows = [[v if v.shared else v.to(Layout.LISTED) for v in group] for group in (inputs, fixed, changing)]
    text = f"loop over members, {first.island}: {first.why}"
    return site.call(UNBOUND, (numbers, *rows), Layout.STACKED, text, saves=GATES_TWICE, loops=True)


RULES: RuleTable = {OPAQUE: rule}


def _shared(call: OpaqueCall, key: str) -> str:
    return (
        f"{key} of {call.island} is one object in all members, but every member writes its own value into it; give "
        "each model its own"
    )


@dataclass(frozen=True)
class MembersCode:
    """The function of a program that runs eager fallbacks in ``models``, its members."""

    models: Sequence[nn.Module] = field(compare=False)
    _places: dict[tuple[int, int], _Place] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        # Generated code refers to functions by name.
        vars(self).update(__name__="run", __qualname__="run")

    def __call__(
        self, numbers: Sequence[int], inputs: Sequence[Any], fixed: Sequence[Any], changing: Sequence[Any]
    ) -> list[Any]:
        """Run the eager fallback for one member after another, and stack each result as ``[B, *S]``.

        Those of the whole forward that are no tensors follow, joined by `member_values`.

        Args:
            numbers: ``numbers[b]`` is member b's call in `calls`.
            inputs: tensors that all members share, or `Listed` ones with a tensor per member.
            fixed, changing: the submodule's own tensors, in the same form.

        Raises:
            Unforeseen: a member does what was not recorded when it was captured.
            FusionError: the whole forward does so, and it mixes members; or results cannot be stacked.
        """
        watching = running()
        for x in (*inputs, *fixed, *changing):
            if watching is not None and isinstance(x, Listed):
                watching.took(x)
        first = calls[numbers[0]]
        named = zip((*range(len(inputs)), *first.changing), (*inputs, *changing), strict=True)
        shared = frozenset(name for name, x in named if not isinstance(x, Listed))
        rows, writes = [], list[tuple[Tensor, Tensor]]()
        for member, number in enumerate(numbers):
            groups = (inputs, fixed, changing)
            of_member = [[x[member] if isinstance(x, Listed) else x for x in group] for group in groups]
            call = _BodyCall(calls[number], member, *self._place(number, member), shared, writes)
            rows.append(call.run(*of_member))
        # Last, since autograd does not let one row be read after another was written.
        with torch.no_grad():
            for memory, value in writes:
                memory.copy_(value)
        columns = list(zip(*rows, strict=True))
        return [_stack(first, parts) if isinstance(parts[0], Tensor) else member_values(parts) for parts in columns]

    def _place(self, number: int, member: int) -> _Place:
        if (number, member) not in self._places:
            call = calls[number]
            body = self.models[member].get_submodule(call.island.path)
            holders = tuple(holder_of(body, key) for key in (*call.fixed, *call.changing))
            self._places[number, member] = body, holders
        return self._places[number, member]


UNBOUND = MembersCode(())


def bind_fallbacks(module: fx.GraphModule, member: Callable[[int], nn.Module], members: int) -> None:
    """Let the eager fallbacks of a batched ``module`` run the members' code; ``member(b)`` makes member b."""
    # A program outlives a call in inference mode.
    with torch.inference_mode(False):
        code = MembersCode([member(index) for index in range(members)])
    for node in module.graph.nodes:
        if node.target is UNBOUND:
            node.target, node.meta["lowering"] = code, replace(node.meta["lowering"], fn=code)
    module.recompile()


def _stack(call: OpaqueCall, parts: Sequence[Tensor]) -> Tensor:
    sparse = next((part for part in parts if part.layout is not torch.strided and part.requires_grad), None)
    if sparse is not None:
        raise FusionError(
            f"{call.island} runs in a loop over members and gives a tensor of layout {sparse.layout} that needs a "
            "gradient, which torch cannot take of a stack of such; let it give to_dense()"
        )
    kinds = {(part.shape, part.dtype, part.device) for part in parts}
    if len(kinds) > 1:
        descriptions = ", ".join(f"{tuple(part.shape)} {part.dtype} {part.device}" for part in parts)
        raise FusionError(
            f"{call.island} gave different results for the members: {descriptions}; an array stacks them, so shapes "
            "that depend on values cannot be fused: use a form of fixed size, such as torch.where, and one dtype and "
            "device"
        )
    return join(parts)


@dataclass(frozen=True, eq=False)
class _BodyCall:
    """One call for one member.

    Attributes:
        body: the member's submodule.
        holders: the dict, the name in it and the key of each tensor of ``body``, fixed ones first.
        shared: the positions of inputs, and the keys of changing tensors, that are one object in all members.
        writes: gets the tensors of the array that the call changes, each with its new value.
    """

    call: OpaqueCall
    member: int
    body: nn.Module
    holders: Sequence[tuple[Any, str, str]]
    shared: frozenset[int | str]
    writes: list[tuple[Tensor, Tensor]]

    @property
    def label(self) -> str:
        return f"{self.call.island} of model {self.member}"

    def error(self, text: str) -> FusionError:
        return (FusionError if self.call.is_whole else Unforeseen)(f"{self.label} {text}")

    def run(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], changing: Sequence[Tensor]) -> list[Any]:
        """Return the tensors among the results; those of the whole forward that are no tensors follow."""
        call = self.call
        given, kept = zip(*map(self._copied_in, range(len(rows)), rows), strict=True) if rows else ((), ())
        versions = list(map(version_of, given))
        arguments = iter(given)
        leaves = [next(arguments) if leaf is TENSOR else leaf for leaf in call.leaves]
        args, kwargs = (leaves, {}) if call.positional else pytree.tree_unflatten(leaves, call.spec)
        with self._filled(fixed, changing) as own, torch.set_grad_enabled(call.grad and torch.is_grad_enabled()):
            output = self._called(args, kwargs)
        for x, copy, row, version in zip(given, kept, rows, versions, strict=True):
            if version_of(x) != version or not _unchanged(x, copy):
                if x is row:
                    x.data.copy_(copy.detach())
                raise self.error(
                    f"runs in a loop over members and writes into its input of shape {tuple(copy.shape)}, which others "
                    "see, too (the caller, other members, or what follows); let it write into a copy"
                )
        results = self._results(output)
        if not call.is_whole and share_memory(results, [*given, *own]):
            raise self.error("gives back its input, a tensor of its own or one tensor twice, or a view of it")
        # A gradient is a row of a stack, and derivatives of functions that address memory, which code may call by any
        # name, take it for the beginning of its storage.
        for result in results:
            if result.grad_fn is not None:
                result.register_hook(lambda grad: None if grad is None else grad.clone())
        values = [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, Tensor)] if call.is_whole else []
        return [*results, *values]

    def _copied_in(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a contiguous copy of an input, and the input itself, to compare them afterwards.

        The whole forward gets the caller's tensor, and the copy comes second, where its code may see the difference.
        """
        if x.layout is not torch.strided:
            return _copy(x), x
        if not self.call.is_whole:
            return _as_leaf(x.clone(memory_format=torch.contiguous_format), x), x
        copied = _copy(x)
        seen = copied.stride() != x.stride() or (self.call.addresses and index in self.shared)
        return (x, copied) if seen else (copied, x)

    @contextmanager
    def _filled(self, fixed: Sequence[Tensor], changing: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Context manager: put the member's tensors into its submodule, and note in ``writes`` what has changed.

        Tensors that may change are copies. The array's tensors stay in the submodule afterwards: a checkpoint runs it
        again in backward. Yields the tensors in it.
        """
        call = self.call
        copied: dict[Any, Tensor] = {}
        own = [*(map(_copy, fixed) if call.addresses else _leaves(fixed)), *(_copy_once(x, copied) for x in changing)]
        slots = []
        for (holder, name, key), tensor, row in zip(self.holders, own, (*fixed, *changing), strict=True):
            # Detached now, since forward may move the tensor to other memory.
            slots.append((holder, name, key, tensor, row, row.detach()))
            before = holder[name]
            if vars(before) or type(tensor) is not Tensor:
                # The class and attributes that the tensor had: ``tensor`` is used in this call, ``row`` after it.
                keep_marks(tensor, keep_marks(row, before))
            holder[name] = tensor
        try:
            yield own
        finally:
            for holder, name, key, tensor, row, memory in slots:
                after, holder[name] = holder.get(name), row
                # A parameter may move to other memory with equal values, as in an RNN.
                if not (after is tensor and _is_at(tensor, memory)):
                    self._write_back(key, memory, after)

    def _write_back(self, key: str, memory: Tensor, after: Any) -> None:
        """Let ``after`` become the value of ``memory``, the tensor ``key`` of the array, unless they are equal."""
        kinds = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in (memory, after)]
        if kinds[0] == kinds[1] and is_plain(after) and _unchanged(after, memory):
            return
        if key in self.shared:
            raise FusionError(_shared(self.call, key))
        if kinds[0] != kinds[1] or isinstance(after, nn.Parameter):
            raise FusionError(
                f"{self.label} assigns {key}, but not a buffer of the same shape, dtype and device; write into it"
            )
        # What is not known to change may be saved for backward by other members.
        self.writes.append((memory if key in self.call.changing else memory.data, after.detach()))

    def _called(self, args: Any, kwargs: Any) -> Any:
        name = self.call.island.method
        method = getattr(self.body, name)
        try:
            return (with_hooks(self.body, method) if name == "forward" else method)(*args, **kwargs)
        except RuntimeError as error:
            # In the loop, parameters are rows of stacks, whose requires_grad torch does not let change.
            if "can only change requires_grad flags of leaf" not in str(error):
                raise
            raise FusionError(
                f"{self.label} switches requires_grad of a parameter or another tensor while it runs, where an array "
                "has one stack for all members; detach() what shall get no gradient there"
            ) from error

    def _results(self, output: Any) -> list[Tensor]:
        """Return the tensors among the results, checked against those of the capture."""
        leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
        expected = self.call.results
        if len(leaves) != len(expected):
            raise self.error(f"gave {len(leaves)} results, and {len(expected)} when it was captured")
        for leaf, result in zip(leaves, expected, strict=True):
            is_tensor = isinstance(result, Result)
            if isinstance(leaf, Tensor) != is_tensor or not (self.call.is_whole or _as_recorded(leaf, result)):
                raise self.error(
                    f"gave {value_text(leaf)} where it gave {value_text(result)} when it was captured; results that "
                    f"depend on values must be tensors of one shape. It runs member by member, since {self.call.why}"
                )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _as_recorded(leaf: Any, result: Any) -> bool:
    return leaf.shape == result.shape if isinstance(leaf, Tensor) else same_value(leaf, result)


def value_text(value: Any) -> str:
    """Return a short text for a message: the shape of a tensor, a plain value, or the type of another one."""
    if isinstance(value, Tensor | Result):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _as_leaf(copied: Tensor, tensor: Tensor) -> Tensor:
    # While gradients are off, forward may switch them on.
    return copied if torch.is_grad_enabled() else copied.requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    return _as_leaf(tensor.clone(), tensor)


def _copy_once(tensor: Tensor, copied: dict[Any, Tensor]) -> Tensor:
    """Return a copy of ``tensor``; one tensor with two names stays one."""
    key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if is_plain(tensor) and tensor.numel() else id(tensor)
    if key not in copied:
        copied[key] = _copy(tensor)
    return copied[key]


def _leaves(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``weights``, or, while gradients are off, detached leaves of them."""
    if torch.is_grad_enabled():
        return weights
    leaves: dict[int, Tensor] = {}
    return [leaves.setdefault(id(w), _as_leaf(w.detach(), w)) for w in weights]


def _unchanged(tensor: Tensor, before: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; those without plain memory count as equal."""
    return not (is_plain(tensor) and is_plain(before)) or same_bits(tensor, before)


def _is_at(tensor: Tensor, memory: Tensor) -> bool:
    """Return whether ``tensor`` has not moved from ``memory``, or has no memory, and no new version."""
    if is_plain(tensor):
        return tensor.data_ptr() == memory.data_ptr()
    return version_of(tensor) == version_of(memory)


def share_memory(results: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Return whether one of ``results`` shares memory with one of ``sources`` or with another result."""
    taken = {x.untyped_storage()._cdata for x in sources if _has_memory(x)}
    for result in filter(_has_memory, results):
        storage = result.untyped_storage()._cdata
        if storage in taken:
            return True
        taken.add(storage)
    return False


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0
