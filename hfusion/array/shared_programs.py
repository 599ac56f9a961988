"""Programs that the arrays of many tasks share: models that read the same are captured and checked once.

In one array, members that read the same are one variant, of which a single member is captured. Here the same holds for
the members of different arrays, as long as they are called in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfusion.capture.capture_member import VaryingSizes
from hfusion.compiler.arguments import Arguments, is_tensors
from hfusion.compiler.compiled_program import UNKNOWN, ArraySpec, Compiled
from hfusion.core.fingerprint import read_model, tensors_of
from hfusion.device.backend import active_autocast

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# Maximum number of cached programs.
MAX_PROGRAMS = 64

Make = Callable[[ArraySpec, Arguments, bool, VaryingSizes], Compiled]


@dataclass(eq=False)
class _Shared:
    """A program, and the result of its self-check, empty before it.

    Attributes:
        skeletons: those of the array it was compiled for, kept alive so that no id in the key is reused.
    """

    compiled: Compiled
    skeletons: tuple[nn.Module, ...]
    check: str = ""


_programs: OrderedDict[Any, _Shared] = OrderedDict()


def share_programs(fused: FusedModule) -> None:
    """Let ``fused`` use the programs of earlier arrays whose members read the same, and later ones use its own."""
    compiler = fused._compiler
    if not isinstance(compiler.make_program, partial) or compiler.make_program.func is not _made_once:
        compiler.make_program = partial(_made_once, fused, compiler.make_program)


def check_once(fused: FusedModule, compiled: Compiled, arguments: Arguments) -> None:
    """Run the self-check of a program, unless an array that shares it has run it already. Raises FusionError."""
    shared = next((entry for entry in [*_programs.values()] if entry.compiled is compiled), None)
    if shared is not None and shared.check:
        fused._checks.setdefault(id(compiled), shared.check)
    fused.check(compiled, arguments)
    if shared is not None:
        shared.check = fused._checks.get(id(compiled), "")


def _made_once(
    fused: FusedModule, make: Make, subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes
) -> Compiled:
    key = _key(fused, subject, arguments, sizes)
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key].compiled
    compiled = make(subject, arguments, training, sizes)
    # Programs that run members' own code depend on these very members.
    if key is not None and not compiled.opaque and not subject.looped:
        _programs[key] = _Shared(compiled, fused._array.skeletons)
        if len(_programs) > MAX_PROGRAMS:
            _programs.popitem(last=False)
    return compiled


def _key(fused: FusedModule, subject: ArraySpec, arguments: Arguments, sizes: VaryingSizes) -> Any:
    """Return all that a program depends on, hashable; None where the reads of forward are unknown."""
    array = fused._array
    if subject.looped or sizes != UNKNOWN:
        return None
    values = [leaf for leaf in arguments.leaves if not is_tensors(leaf)]
    states = [read_model(skeleton, *values) for skeleton in array.skeletons]
    if any(state is None or any(True for _ in tensors_of(state)) for state in states):
        return None
    leaves = [leaf.tensor if hasattr(leaf, "tensor") else leaf for leaf in arguments.leaves]
    ties = tuple(next(index for index, other in enumerate(leaves) if other is leaf) for leaf in leaves)
    return (
        tuple(states),
        fused.fingerprint(),
        fused._situations.state,
        tuple(branch.training for branch in fused._branches),
        tuple(
            (name, type(t), t.shape, t.dtype, t.stride(), t.device, t.requires_grad) for name, t in fused.stacks.items()
        ),
        (arguments.key, arguments.strides, ties),
        (subject.device, subject.loops, array.verify),
        (torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()),
        (active_autocast(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    )
