"""Small buffers that forward reads in Python, as ``topk(self.k)`` does: programs hold their values as constants.

A graph is valid for one value of such a number only. So a program is compiled for the values of the members, and the
values are read again at every call: another value leads to another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hfusion.capture.capture_member import VaryingSizes
from hfusion.capture.registered_tensors import is_array
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import UNKNOWN, ArraySpec, Compiled, compile_array
from hfusion.core.errors import FusionError
from hfusion.passes.check import check_array

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# Maximum number of sets of values for which programs are compiled, for one arrangement of members.
MAX_VALUE_SETS = 8
# Maximum number of elements of an integer buffer whose values are read.
MAX_ELEMENTS = 16
# Keys of programs that read no buffer, or leave that to the members' own code.
_NONE, _LEFT_OUT = 0, -1

Values: TypeAlias = tuple[tuple[Any, ...], ...]
"""For each buffer the values of every member, as nested tuples."""


class NumberBuffers:
    """The buffers of an array whose values its programs hold, and a number for each set of values.

    Attributes:
        names: the keys of the buffers.
        refusal: why their values are left to the members' own code from now on; empty if they are not.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.refusal = ""
        self._numbers: dict[Values, int] = {}
        self._sets = 0
        self._omitted = False

    def key(self, fused: FusedModule) -> int:
        """Return the number of the present values, for the keys of programs."""
        if not self.names:
            return _NONE
        values = None if self._omitted or self.refusal else self.values(fused, self.names)
        if values is None:
            return _LEFT_OUT
        number = self._numbers.get(values)
        if number is None:
            self._sets += 1
            if self._sets > MAX_VALUE_SETS:
                self.refusal = (
                    f"{', '.join(self.names)}, which forward reads in Python, had more than {MAX_VALUE_SETS} sets of "
                    "values, and a program holds for one; compute with the tensor, such as by torch.where"
                )
                fused._loops[f"{fused._original}: loop over members: {self.refusal}"] = None
                return _LEFT_OUT
            number = self._numbers[values] = len(self._numbers) + 1
        return number

    def values(self, fused: FusedModule, names: Sequence[str]) -> Values | None:
        """Read the values of the buffers ``names``; None where they cannot be read, as inside of torch.vmap."""
        try:
            return tuple(_member_values(fused, name) for name in names)
        except RuntimeError:
            return None

    def hold(self, names: frozenset[str]) -> bool:
        """Let programs hold the values of ``names`` as well. Return whether a name is new."""
        if names <= set(self.names):
            return False
        self.names = tuple(sorted({*self.names, *names}))
        self._numbers.clear()
        self._sets = 0
        return True

    def restart(self) -> None:
        """Count the sets of values from zero again, as the members have changed."""
        self._sets = 0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context manager: programs leave code that reads the buffers to the members' own code.

        For callers that do not check the values before every call.
        """
        before, self._omitted = self._omitted, True
        try:
            yield
        finally:
            self._omitted = before


def held_values(fused: FusedModule, compiled: Compiled) -> Values:
    """Read the present values of the buffers whose values a program of ``fused`` holds."""
    return tuple(_member_values(fused, name) for name in sorted(compiled.numbers))


def _member_values(fused: FusedModule, name: str) -> tuple[Any, ...]:
    path, _, leaf = name.rpartition(".")
    tensor = fused.get_submodule(path)._buffers[leaf]
    assert tensor is not None
    values = _frozen(tensor.tolist())
    return (values,) * len(fused) if name in fused._array.comparison.shared else values


def _frozen(values: Any) -> Any:
    return tuple(map(_frozen, values)) if isinstance(values, list) else values


def compiler_of(fused: FusedModule) -> Callable[[ArraySpec, Arguments, bool, VaryingSizes], Compiled]:
    """Return the compiler of ``fused``, which uses the values of buffers where forward reads them in Python."""

    def make(subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes = UNKNOWN) -> Compiled:
        buffers = fused._number_buffers
        if buffers.key(fused) > 0:
            constant = _running(fused, buffers.names, subject, arguments, training, sizes)
            return constant or compile_array(subject, arguments, training, sizes)
        compiled = compile_array(subject, arguments, training, sizes)
        if buffers.names or not compiled.opaque or not subject.loops:
            return compiled
        names = _candidates(fused, compiled)
        while names:
            constant = _running(fused, names, subject, arguments, training, sizes)
            if constant is None:
                return compiled
            # Code that runs member by member may write to its buffers, in a branch that was not seen.
            remaining = tuple(name for name in names if not _inside(name, constant))
            if remaining == names:
                return constant
            names = remaining
        return compiled

    return make


def _running(
    fused: FusedModule,
    names: tuple[str, ...],
    subject: ArraySpec,
    arguments: Arguments,
    training: bool,
    sizes: VaryingSizes,
) -> Compiled | None:
    """Return the program of `_with_constants`, or None if members differ in more than numbers or it cannot run.

    It cannot run if a number decides on the size of an output. The members' own code then raises an error about it.
    """
    on_host = all(fused.get_buffer(name).device.type == "cpu" for name in names)
    # Tracers know the values of tensors in host memory; code that also computes with a buffer needs its own device.
    for to_host in (False,) if on_host else (True, False):
        # Suppress any error of members' code that looks for a buffer: without constants it runs unchanged.
        with suppress(Exception):
            compiled = _with_constants(fused, names, subject, arguments, training, sizes, to_host)
            check_array(compiled.program.module, len(fused))
            return compiled
    return None


def _candidates(fused: FusedModule, compiled: Compiled) -> tuple[str, ...]:
    """Return the keys of small buffers that code run member by member may have read, and did not write."""
    written = _written(compiled)
    shared = fused._array.comparison.shared
    # A member that is an array itself keeps its buffers as stacks, which are no attributes.
    nested = tuple(f"{path}." for path, module in fused._array.skeletons[0].named_modules() if is_array(module))
    return tuple(
        name
        for name, tensor in fused.named_buffers()
        if name not in written
        and not name.startswith(nested)
        and _inside(name, compiled)
        and _is_small(tensor if name in shared else tensor[0])
    )


def _written(compiled: Compiled) -> set[str]:
    """Return the keys of tensors that forward has written; of code run member by member, only observed writes."""
    opaque = {f"{call.module_path}.{key}".strip(".") for call in compiled.opaque for key in call.changing}
    written = set(compiled.written - opaque)
    for call in compiled.opaque:
        written |= {f"{call.module_path}.{key}".strip(".") for key in call.assigned | call.changed}
    return written


def _inside(name: str, compiled: Compiled) -> bool:
    """Return whether a tensor belongs to a submodule that runs member by member."""
    return any(not call.module_path or name.startswith(f"{call.module_path}.") for call in compiled.opaque)


def _is_small(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_complex():
        return False
    return tensor.numel() == 1 or (not tensor.is_floating_point() and tensor.numel() <= MAX_ELEMENTS)


def _with_constants(
    fused: FusedModule,
    names: tuple[str, ...],
    subject: ArraySpec,
    arguments: Arguments,
    training: bool,
    sizes: VaryingSizes,
    to_host: bool,
) -> Compiled:
    """Return a program with the buffers ``names`` as constants. Members with other values become other variants.

    to_host: put the constants into host memory, whatever device the buffers are on.
    """
    values = fused._number_buffers.values(fused, names)
    if values is None:
        raise FusionError(f"the values of {', '.join(names)} cannot be read here")
    numbers: dict[Any, int] = {}
    kinds = zip(subject.variants, *values, strict=True)
    variants = tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)

    def member(index: int) -> nn.Module:
        return _constant(subject.member(index), names, to_host)

    compiled = compile_array(replace(subject, variants=variants, member=member), arguments, training, sizes)
    if written := compiled.written & compiled.constants.keys():
        raise FusionError(f"forward writes into {min(written)}, whose value it reads in Python")
    return replace(compiled, numbers=frozenset(names))


@torch.no_grad()
def _constant(model: nn.Module, names: Sequence[str], to_host: bool) -> nn.Module:
    """Replace the buffers ``names`` of ``model`` by copies as attributes, which capture treats as constants."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        holder = model.get_submodule(path)
        tensor = holder._buffers.pop(leaf, None)
        if tensor is not None:
            vars(holder)[leaf] = tensor.detach().to("cpu" if to_host else tensor.device, copy=True)
    return model
