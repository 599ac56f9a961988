"""Warnings about shapes that a loss broadcasts: those a single model would get, and one for unstacked targets."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import is_stacked
from hfusion.device.generators import draws_kept
from hfusion.torch_private.functorch import outside_transforms, unwrapped
from hfusion.torch_private.tracer_warnings import noted

# ``stacklevel`` of the code that calls a `per_model` function.
_DEPTH = 6


def warn_of_unstacked(name: str, arguments: Arguments, members: int) -> None:
    """Warn if an argument has shape ``[B, *S]`` and a member's output ``S``: every member sees the whole argument."""
    outputs = _outputs(arguments)
    for leaf in _plain(arguments):
        shape = tuple(leaf.shape)
        if shape[:1] == (members,) and shape[1:] in outputs and shape not in outputs:
            warnings.warn(
                f"an argument of {name} has shape {list(shape)}, a member's output {list(shape[1:])}, and every one of "
                f"the {members} members is given the whole argument; if it holds one target for each, give "
                "hf.stacked(target)",
                stacklevel=_DEPTH,
            )


@contextmanager
def hinting(arguments: Arguments, members: int) -> Iterator[None]:
    """Context manager: add a note to errors if an argument may hold a row for each member, but was not stacked."""
    try:
        yield
    except Exception as error:
        outputs = _outputs(arguments)
        for leaf in _plain(arguments):
            shape = tuple(leaf.shape)
            if shape[:1] == (members,) and any(output[: len(shape) - 1] == shape[1:] for output in outputs):
                error.add_note(
                    f"every one of the {members} members is given the whole argument of shape {list(shape)}; if it "
                    "holds one target for each, give hf.stacked(target)"
                )
        raise


def _outputs(arguments: Arguments) -> set[tuple[int, ...]]:
    """Return the shapes of stacked inputs per member, without scalars (weights) unless the first argument has one."""
    args, _ = arguments.of_member(0)
    firsts = {tuple(leaf.shape) for leaf in pytree.tree_leaves(args[:1]) if isinstance(leaf, Tensor)}
    shapes = {tuple(leaf.tensor.shape[1:]) for leaf in arguments.leaves if is_stacked(leaf)}
    return shapes if () in firsts else shapes - {()}


def _plain(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor)]


def warn_as_alone(function: Callable[..., Any], arguments: Arguments) -> None:
    """Issue the warnings of ``function`` where a member's output and another argument have sizes that broadcast.

    ``function`` is called with copies of the values of the first member, as it may check values before it warns.
    """
    with outside_transforms():
        args, kwargs = arguments.mapped(unwrapped).of_member(0)
        if not _broadcasts(pytree.tree_leaves(args[:1]), pytree.tree_leaves((args[1:], kwargs))):
            return
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        with noted(UserWarning) as texts, draws_kept(), torch.no_grad():
            function(*args, **kwargs)
    for text in texts:
        warnings.warn(text, stacklevel=_DEPTH)


def _broadcasts(outputs: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether a tensor in ``outputs`` and one in ``others`` differ in shape, but broadcast."""
    return any(
        isinstance(output, Tensor) and isinstance(other, Tensor) and _fits(output.shape, other.shape)
        for output, other in itertools.product(outputs, others)
    )


def _fits(shape: torch.Size, other: torch.Size) -> bool:
    sizes = list(zip(reversed(shape), reversed(other), strict=False))
    # A scalar broadcasts with everything, as intended.
    return shape != other and bool(sizes) and all(a == b or 1 in (a, b) for a, b in sizes)
