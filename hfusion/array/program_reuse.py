"""Derive programs for changed members from those of earlier members, without a capture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hfusion.array.array_description import row_copy
from hfusion.capture.operator_trace import OperatorTrace, trace_operators
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.fill_scalars import changes_between, may_be_sizes, sizes_meet_none
from hfusion.compiler.program_rows import of_rows
from hfusion.core.errors import FusionError
from hfusion.passes.fill import Changes, Unexplained, varying

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# Maximum number of cached traces of members.
MAX_TRACES = 64


@dataclass
class TraceCache:
    """The latest traces of an array's members, by their contents without tensors, and by the kind of call."""

    traces: OrderedDict[Any, OperatorTrace | None] = field(default_factory=OrderedDict)

    def trace(
        self, fused: FusedModule, row: int, content: Any, modes: Any, arguments: Arguments
    ) -> OperatorTrace | None:
        """Return the operator trace of the member in ``row``, cached by its ``content``; None if it has none."""
        key = content, modes, arguments.key
        if key not in self.traces:
            args, kwargs = arguments.of_member(row)
            self.traces[key] = trace_operators(_apart(fused, row), args, kwargs)
            if len(self.traces) > MAX_TRACES:
                self.traces.popitem(last=False)
        self.traces.move_to_end(key)
        return self.traces[key]


def _apart(fused: FusedModule, row: int) -> nn.Module:
    """Return a copy of a member in separate memory."""
    shared = fused._array.comparison.shared
    return fused._around(row, {n: row_copy(t, None if n in shared else row) for n, t in fused.stacks.items()})


@dataclass(frozen=True, eq=False)
class Kin:
    """Looks among the programs of an array's earlier members for one that serves the current ones.

    ``contents[b]``: the fingerprint of member b without its tensors.
    """

    fused: FusedModule
    compiler: Compiler
    contents: tuple[Any, ...]

    def __call__(self, modes: Any, arguments: Arguments) -> Compiled | None:
        earlier = [
            (contents, state.compiler)
            for contents, state in reversed(self.fused._states.items())
            if state.compiler is not self.compiler
        ]
        required = set(self.contents)
        for contents, program in self._fitting(
            [pair for pair in earlier if required <= set(pair[0])], modes, arguments
        ):
            derived = of_rows(program, list(map(contents.index, self.contents)), self.compiler.subject)
            trust(self.fused, program, self.fused, derived)
            return derived
        for contents, program in self._fitting(earlier, modes, arguments):
            filled = self._filled(contents, program, modes, arguments)
            if filled is not None:
                return filled
        return None

    def _fitting(
        self, earlier: Sequence[tuple[Sequence[Any], Compiler]], modes: Any, arguments: Arguments
    ) -> Iterator[tuple[Sequence[Any], Compiled]]:
        """Yield the programs of ``earlier`` members for such a call, each with the contents of these members."""
        for contents, compiler in earlier:
            program = compiler.fitting(modes, arguments)
            if program is not None:
                yield contents, program

    def _filled(self, contents: Sequence[Any], program: Compiled, modes: Any, arguments: Arguments) -> Compiled | None:
        """Return ``program`` with the numbers of members that differ from earlier ones; None if that is impossible."""
        row = next((row for row, content in enumerate(self.contents) if content in contents), None)
        if row is None or program.opaque or not program.calls:
            return None
        base_trace = self._trace(row, modes, arguments)
        joining = {content: b for b, content in enumerate(self.contents) if content not in contents}
        traces = {content: self._trace(b, modes, arguments) for content, b in joining.items()}
        if base_trace is None or any(
            trace is None or not base_trace.same_structure(trace) for trace in traces.values()
        ):
            return None
        if program.size_uses:
            models = [self.fused._member(b) for b in joining.values()]
            if not sizes_meet_none(program.size_uses, self.fused._member(row), models):
                return None
        try:
            by_content = {
                c: changes_between(program.calls, base_trace, trace) for c, trace in traces.items() if trace is not None
            }
            if any(may_be_sizes(program.calls, changes) for changes in by_content.values()):
                return None
            base = contents.index(self.contents[row])
            rows = [base if content in joining else contents.index(content) for content in self.contents]
            changes = {b: by_content[content] for b, content in enumerate(self.contents) if content in joining}
            derived = of_rows(program, rows, self.compiler.subject, changes)
        except Unexplained:
            return None
        if _proven(program, changes):
            trust(self.fused, program, self.fused, derived)
            return derived
        try:
            self.fused.check(derived, arguments)
        except FusionError:
            return None
        return derived

    def _trace(self, row: int, modes: Any, arguments: Arguments) -> OperatorTrace | None:
        return self.fused._traces.trace(self.fused, row, self.contents[row], modes, arguments)


def trust(donor: FusedModule, checked: Compiled, array: FusedModule, derived: Compiled) -> None:
    """Let ``derived`` inherit the self-check of ``checked``, its source, if both run every operator alike."""
    # A check with a single member cannot show that members are kept apart.
    enough = checked.program.members >= min(derived.program.members, 2)
    if enough and id(checked) in donor._checks and _operator_lowerings(checked) == _operator_lowerings(derived):
        array._checks[id(derived)] = donor._checks[id(checked)]


def _proven(program: Compiled, changes: Mapping[int, Changes]) -> bool:
    """Return whether members differed before wherever they differ now, so that these values are checked."""
    return all(varying(program.graph, member_changes) for member_changes in changes.values())


def _operator_lowerings(compiled: Compiled) -> list[Any]:
    """Return how each operator runs."""
    return [(node.target, node.meta.get("lowering")) for node in compiled.program.module.graph.nodes]
