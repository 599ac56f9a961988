"""Batches of different sizes: in one call, filled up to the largest, or by a call for each size.

A call for each size is exact for any forward: members of one size are computed together. The arrays that compute
them are cached by the number and variants of their members, and serve other members of these variants. Their programs
are derived from one capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hfusion.array.function_program_cache import note_call
from hfusion.array.padded import run_padded, size_lines
from hfusion.array.program_reuse import trust
from hfusion.array.ragged_rows import check_ragged, rows_by_size
from hfusion.array.split_by_mode import MemberGroup, Split, copied_rows, flags_read, part_of
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.compiler.fusion_report import FusionReport
from hfusion.compiler.program_rows import of_rows
from hfusion.core.errors import FusionError
from hfusion.torch_private.functorch import in_transform

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# Maximum number of arrays of some of the members that are cached for further calls.
MAX_ARRAYS = 64


@dataclass(frozen=True, eq=False)
class SizedArray:
    """A cached array for any members of the whole array that have the variants ``pattern``."""

    pattern: tuple[int, ...]
    array: FusedModule


_arrays: WeakKeyDictionary[FusedModule, dict[Any, SizedArray]] = WeakKeyDictionary()


def size_reports(fused: FusedModule) -> list[FusionReport]:
    """Report how batches of different sizes have run: in the whole array, and in arrays for members of one size."""
    arrays = [sized.array.report() for sized in _arrays.get(fused, {}).values()]
    return [FusionReport((), (), size_lines(fused)), *arrays]


def by_size(fused: FusedModule, arguments: Arguments) -> SizeGroups:
    """Return how an array computes arguments of which some are ragged."""
    check_ragged(len(fused), arguments)
    if in_transform():
        raise FusionError(
            f"a fused {fused._original} is called inside of torch.func with batches of different sizes "
            f"({arguments.ragged[0]}), which no transform takes; give batches of one size, or transform the members"
        )
    return SizeGroups(fused._split())


@dataclass(frozen=True)
class SizeGroups:
    """Members divided by size, after ``split`` has divided them by modes and hooks."""

    split: Split | None

    def run(self, fused: FusedModule, arguments: Arguments) -> Any:
        """Return the outputs of all members."""
        if self.split is None:
            outputs = run_padded(fused, arguments, partial(self._by_size, fused, arguments))
            if outputs is not None:
                return outputs
        outputs = self._by_size(fused, arguments, range(len(fused)))
        note_call(fused)
        return outputs

    def _by_size(self, fused: FusedModule, arguments: Arguments, rows: Sequence[int]) -> Any:
        """Compute members ``rows`` (all members, if they are split by modes) with one call for each size."""
        split = self.split
        if split is None:
            flags = flags_read(fused)
            divided = [(list(rows), fused.training_by_path(), flags[0] if flags else {})]
        else:
            divided = [(list(group.rows), *_modes_and_trained(group.array)) for group in split.groups]
        groups = [
            _group(fused, size_rows, modes, trained, arguments)
            for members, modes, trained in divided
            for size_rows in rows_by_size(arguments, members)
        ]
        hooked_members, why = ({}, "") if split is None else (split.hooked_members, split.why)
        return Split(None, tuple(groups), hooked_members, why or "batches have different sizes").run(fused, arguments)


def _modes_and_trained(array: FusedModule) -> tuple[dict[str, bool], dict[str, bool]]:
    return array.training_by_path(), {name: p.requires_grad for name, p in array.named_parameters()}


def _group(
    fused: FusedModule, rows: list[int], modes: dict[str, bool], trained: dict[str, bool], arguments: Arguments
) -> MemberGroup:
    """Return members ``rows``, whose batches have one size, as an array in ``modes``."""
    variants = fused._array.comparison.variants
    pattern = tuple(variants[row] for row in rows)
    group = MemberGroup(tuple(rows), _sized(fused, pattern, rows, modes, trained))
    if group.ready(fused, arguments.of_rows(rows)).opaque:
        # Code that runs member by member may store state on members, so this array serves only these rows.
        return MemberGroup(tuple(rows), _sized(fused, ("rows", *rows), rows, modes, trained))
    return group


def _sized(
    fused: FusedModule, key: Any, rows: list[int], modes: dict[str, bool], trained: dict[str, bool]
) -> FusedModule:
    arrays = _arrays.setdefault(fused, {})
    kinds = tuple((tensor.dtype, tensor.device) for tensor in fused.stacks.values())
    flags = tuple(trained.get(name, p.requires_grad) for name, p in fused.named_parameters())
    key = (fused._number, key, tuple(modes.values()), kinds, flags)
    sized = arrays.pop(key, None)
    if sized is None:
        variants = fused._array.comparison.variants
        sized = SizedArray(tuple(variants[row] for row in rows), part_of(fused, rows, copied_rows))
        sized.array._compiler.kin = _RelatedPrograms(fused, sized)
    arrays[key] = sized
    while len(arrays) > MAX_ARRAYS:
        del arrays[next(iter(arrays))]
    for path, branch in sized.array.named_modules():
        branch.training = modes[path]
    for (_, parameter), flag in zip(sized.array.named_parameters(), flags, strict=True):
        parameter.requires_grad_(flag)
    return sized.array


@dataclass(frozen=True, eq=False)
class _RelatedPrograms:
    """Derives a program for ``sized`` from those of the whole array, or of its arrays for members of one size."""

    fused: FusedModule
    sized: SizedArray

    def __call__(self, modes: Any, arguments: Arguments) -> Compiled | None:
        for pattern, donor in self._donors():
            array = self.sized.array
            if (
                donor is array
                or _modes_and_trained(donor) != _modes_and_trained(array)
                or not set(self.sized.pattern) <= set(pattern)
            ):
                continue
            program = donor._compiler.fitting(donor._modes(arguments), arguments)
            if program is not None and not program.opaque:
                derived = of_rows(program, [pattern.index(v) for v in self.sized.pattern], array._compiler.subject)
                trust(donor, program, array, derived)
                return derived
        return None

    def _donors(self) -> Iterator[tuple[tuple[int, ...], FusedModule]]:
        yield self.fused._array.comparison.variants, self.fused
        for (number, *_), sized in [*_arrays.get(self.fused, {}).items()]:
            if number == self.fused._number:
                yield sized.pattern, sized.array
