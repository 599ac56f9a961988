"""A program bound to the tensors of a module, which are looked up at every call, so that they may be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.fallback_runtime import Unforeseen
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.gradient_usage import watched
from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Slot
from hfusion.passes.side_effects import FailedCheck

# Where a tensor that may be replaced is looked up: a mapping, and the key in it.
Location: TypeAlias = tuple[Mapping[str, Any], str]


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program, and the locations of the tensors that it takes before its inputs.

    ``failed``: in a step with checks, the entry "members" shows for which members a check of forward failed.
    """

    compiled: Compiled
    locations: tuple[Location, ...]
    failed: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(compiled: Compiled, owner: nn.Module) -> BoundProgram:
        """Bind a program to the tensors of ``owner``."""
        slots = compiled.program.slots
        return BoundProgram(
            compiled, tuple(_location(slot, owner, compiled) for slot in slots if slot.kind is not Kind.INPUT)
        )

    @property
    def looped_calls(self) -> int:
        """The number of calls of single members' operators in the program."""
        program = self.compiled.program
        nodes = program.module.graph.nodes
        loops = [n for n in nodes if n.meta.get("layout") is Layout.LISTED and not n.meta.get("transition")]
        return program.members * len(loops)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the tensors in ``locations``."""
        program = self.compiled.program
        pairs = zip(program.slots, program.layouts, strict=True)
        return tuple(layout for slot, layout in pairs if slot.kind is not Kind.INPUT)


def bind(compiled: Compiled, owner: nn.Module) -> Callable[[list[Any]], Any]:
    """Return the program as a function of its inputs; its tensors are looked up in ``owner`` at every call.

    Calls thus use the new tensors after ``owner`` was converted or loaded.
    """
    locations = BoundProgram.of(compiled, owner).locations
    run, spec = compiled.program.run, compiled.program.out_spec
    if compiled.opaque:
        run = watched(run)
    single = spec.is_leaf()
    if compiled.infers_results or compiled.checks:
        run = _undone(run, compiled)

    def call(inputs: list[Any]) -> Any:
        outputs = run(*[holder[name] for holder, name in locations], *inputs)
        return outputs[0] if single else pytree.tree_unflatten(outputs, spec)

    return call


def _undone(run: Callable[..., Any], compiled: Compiled) -> Callable[..., Any]:
    """Return ``run`` with written tensors restored if results were inferred wrongly, or if a check fails."""
    written = [k for k, slot in enumerate(compiled.program.slots) if slot.name in compiled.written]

    def call(*values: Any) -> Any:
        snapshots = [(values[k].detach(), values[k].detach().clone()) for k in written]
        try:
            return run(*values)
        except (Unforeseen, FailedCheck):
            for tensor, saved in snapshots:
                tensor.copy_(saved)
            raise

    return call


def _location(slot: Slot, owner: nn.Module, compiled: Compiled) -> Location:
    if slot.kind is Kind.CONSTANT:
        return compiled.constants, slot.name
    path, _, leaf = slot.name.rpartition(".")
    module = owner.get_submodule(path)
    return (module._parameters if slot.kind is Kind.PARAMETER else module._buffers), leaf
