"""Steps of plain members in a fork of this process: losses, gradients and updates, in memory that both share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.core.calls import StackedInput, is_stacked, take_entries
from hfusion.core.memory import is_plain
from hfusion.core.python_values import SCALARS
from hfusion.population.group_step import seeded
from hfusion.population.plain_member import PlainMember, PlainStep
from hfusion.population.shared_arena import SharedArena, arena_bytes


@dataclass(frozen=True)
class SharedLeaf:
    """A tensor of the arguments in an arena; ``stacked``: it has a row for each member."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stacked: bool


@dataclass(frozen=True)
class StepRequest:
    """Compute the loss and the gradients of one member, and make its update.

    ``member_index``: index of the member among those of the process; ``entry``: its index in stacked arguments.
    ``arguments``: inputs and target, with a `SharedLeaf` for each tensor; None: those of the previous request.
    ``draws``: the random number that the step drew. ``updates``: whether to make the update if all is finite.
    ``vectors``: new values of hyper-parameters; None if the fork has them already.
    """

    member_index: int
    entry: int
    arguments: Any
    draws: int
    updates: bool
    vectors: tuple[list[float], ...] | None


@dataclass(frozen=True)
class ComputedStep:
    """The result of a member's step.

    ``has_gradient``: whether each parameter has one; ``random_state``: torch's state afterwards, if the step drew.
    """

    loss: float
    dtype: torch.dtype
    has_gradient: tuple[bool, ...]
    random_state: bytes | None
    is_updated: bool
    seconds: float


@dataclass(frozen=True, eq=False)
class RemoteMember:
    """A plain member as its processes see it.

    Attributes:
        key: determines its random numbers.
        vectors: the hyper-parameters that an update reads.
        gradients: where its gradients are written, in the order of its parameters.
        progress: 1 while a process makes its update, and 2 from then on until the next step.
    """

    key: int
    member: PlainMember
    vectors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    progress: Tensor

    @property
    def step(self) -> PlainStep:
        return cast(PlainStep, self.member._step)


def argument_bytes(arguments: Any) -> int:
    """Return the maximum number of bytes of an arena that the tensors in ``arguments`` take."""
    leaves = pytree.tree_leaves(arguments, is_leaf=is_stacked)
    held = (leaf.tensor if isinstance(leaf, StackedInput) else leaf for leaf in leaves)
    return sum(arena_bytes(leaf) for leaf in held if isinstance(leaf, Tensor))


def may_be_placed(arguments: Any) -> bool:
    """Return whether all that is in ``arguments`` can be copied to an arena, or sent as it is."""
    return all(map(_may_be_placed, pytree.tree_leaves(arguments, is_leaf=is_stacked)))


def _may_be_placed(leaf: Any) -> bool:
    value = leaf.tensor if isinstance(leaf, StackedInput) else leaf
    if type(value) is not Tensor:
        return isinstance(value, SCALARS)
    return is_plain(value) and value.device.type == "cpu" and not value.requires_grad


def placed(arena: SharedArena, arguments: Any) -> Any:
    """Copy ``arguments`` to an arena, and return them as a `StepRequest` has them; None if they are too large."""
    arena.clear()
    try:
        return pytree.tree_map(lambda leaf: _placed(arena, leaf), arguments, is_leaf=is_stacked)
    except MemoryError:
        return None


def _placed(arena: SharedArena, leaf: Any) -> Any:
    value = leaf.tensor if isinstance(leaf, StackedInput) else leaf
    if not isinstance(value, Tensor):
        return value
    stacked = isinstance(leaf, StackedInput)
    return SharedLeaf(arena.put(value), value.dtype, tuple(value.shape), value.stride(), stacked)


def answers(
    members: Sequence[RemoteMember], arena: SharedArena, is_orphan: Callable[[], bool]
) -> Callable[[StepRequest], ComputedStep | None]:
    """Return a function that computes steps in a fork. It returns None for a step that the parent must compute."""
    for member in members:
        # The step itself makes no update: each request says whether to make one.
        member.step.update = _nothing

    checked: set[int] = set()
    arguments: tuple[Any, Any] = (None, None)

    def answer(request: StepRequest) -> ComputedStep | None:
        nonlocal arguments
        if request.arguments is not None:
            arguments = pytree.tree_map(lambda leaf: _read(arena, leaf), request.arguments)
        inputs, target = (take_entries(value, [request.entry]) for value in arguments)
        member = members[request.member_index]
        if request.vectors is not None:
            for vector, values in zip(member.vectors, request.vectors, strict=True):
                vector.copy_(torch.tensor(values, dtype=vector.dtype, device=vector.device).reshape(vector.shape))
        before = None if request.member_index in checked else modeless_fingerprint(member.step.model)
        checked.add(request.member_index)
        return _computed(member, request, inputs, target, before)

    return answer


def _nothing(losses: Tensor) -> None:
    pass


def _read(arena: SharedArena, leaf: Any) -> Any:
    if not isinstance(leaf, SharedLeaf):
        return leaf
    tensor = arena.at(leaf.start, leaf.dtype, leaf.shape, leaf.stride)
    return StackedInput(tensor) if leaf.stacked else tensor


def _computed(member: RemoteMember, request: StepRequest, inputs: Any, target: Any, before: Any) -> ComputedStep | None:
    """Compute a step; None if it fails. ``before``: the model's fingerprint, if changes of it are to be detected."""
    state = seeded("cpu", request.draws, member.key)
    torch.set_rng_state(state)
    began = time.perf_counter()
    try:
        losses = member.step(inputs, target)
    except Exception:
        # The parent computes the step again, and raises the same error.
        return None
    if before is not None and modeless_fingerprint(member.step.model) != before:
        # The parent would not see what forward has changed in this process.
        return None
    pairs = [
        (parameter.grad, shared) for parameter, shared in zip(member.step.parameters, member.gradients, strict=True)
    ]
    if any(g is not None and (g.layout is not torch.strided or g.dtype != shared.dtype) for g, shared in pairs):
        return None
    after = torch.get_rng_state()
    random_state = None if torch.equal(after, state) else after.numpy().tobytes()
    is_updated = request.updates and member.member.are_healthy(losses)
    if is_updated:
        member.progress.fill_(1)
        member.member.make_update()
        member.progress.fill_(2)
    for grad, shared in pairs:
        if grad is not None:
            # Copied after the update, which may have clipped it.
            shared.copy_(grad)
    has_gradient = [grad is not None for grad, _ in pairs]
    seconds = time.perf_counter() - began
    return ComputedStep(float(losses), losses.dtype, tuple(has_gradient), random_state, is_updated, seconds)
