"""Some members of an array as a small array around copies or views of their rows.

Three of a hundred members are thus computed in the time of three, and a large array block by block. The small array
reuses programs of the whole array without a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hfusion.array.array_editing import Array, Kin, changed_tensors, check_movable, enter, resize
from hfusion.array.member_views import HOOKS, Views, check_together
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.compiler import Compiler
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows, frozen_rows, mark_absent
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import is_own_hook
from hfusion.torch_private.module_hooks import has_global_hooks

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


def part_of(fused: FusedModule, rows: Sequence[int], live: bool) -> FusedModule:
    """Return an array of some members, in the modes of ``fused``.

    Args:
        live: whether its tensors are views of the rows, which are neighbours then, instead of copies.
    """
    from hfusion.array.module import FusedModule

    array = fused._array
    stacks_by_id: dict[int, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    for name, whole in fused.stacks.items():
        if name in array.shapes:
            if id(whole) not in stacks_by_id:
                values = whole.detach()
                if name not in array.comparison.shared:
                    values = _view(whole, rows) if live else values[list(rows)]
                is_parameter = isinstance(whole, nn.Parameter)
                stacks_by_id[id(whole)] = nn.Parameter(values, whole.requires_grad) if is_parameter else values
            stacks[name] = stacks_by_id[id(whole)]
    fused_part = FusedModule(_array_of(fused, rows), stacks)
    fused_part._is_part = True
    modes = fused.training_by_path()
    for path, module in fused_part.named_modules(remove_duplicate=False):
        module.training = modes[path]
    return fused_part


def slice_of(fused: FusedModule, chosen: slice) -> FusedModule:
    """Return an array of neighbouring members around the memory of their rows; see `FusedModule.__getitem__`."""
    rows = range(len(fused))[chosen]
    if rows.step != 1:
        raise ValueError(f"a slice of members with step {rows.step}: the step must be 1")
    if not rows:
        raise IndexError(f"{chosen} takes none of the {len(fused)} members")
    check_together(fused, "a slice")
    part = part_of(fused, rows, live=True)
    for parameter, (member, name) in fused._origins.items():
        if member in rows:
            part._origins[parameter] = (rows.index(member), name)
    return part


def check_unhooked(whole: FusedModule) -> None:
    """Raise a FusionError if an array has hooks, which expect all members, or tensors whose rows cannot be moved."""
    hooked = ""
    check_movable(whole, "Step all rows, or choose them")
    for name, tensor in tensors(whole):
        held = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        if not all(is_own_hook(hook) for hooks in held for hook in (hooks or {}).values()):
            hooked = f"{name} of a fused {whole._original} has a hook, which takes the gradients of all members"
    if has_global_hooks() or any(getattr(module, name) for module in whole.modules() for name in HOOKS):
        hooked = f"a fused {whole._original} has a hook, which takes the outputs of all members"
    if hooked:
        raise FusionError(f"{hooked}: step all rows, or remove it")


class GatheredRows:
    """Members ``rows`` of ``whole`` as a separate array, whose programs are derived from those of the whole array.

    Attributes:
        array: holds copies of the rows; a tensor that all members share uses the memory of the whole array's.
        rows: the row of each member of ``array`` in ``whole``. A row may be repeated, to fill up a block.
        live: the rows are neighbours, and ``array`` holds views of them instead of copies.
        modes: the train and eval modes of the members, by path.

    Raises:
        FusionError: see `load`.
    """

    def __init__(self, whole: FusedModule, rows: Sequence[int], live: bool = False) -> None:
        self.whole, self.array, self.live = whole, part_of(whole, rows, live), live
        self._find_kin()
        self.load(rows)

    def fits(self) -> bool:
        """Return whether the array still has the tensors, dtypes and devices that this was made for."""
        current, expected = dict(tensors(self.array)), dict(tensors(self.whole))
        return current.keys() == expected.keys() and all(
            (t.dtype, t.device, t.dim()) == (expected[name].dtype, expected[name].device, expected[name].dim())
            for name, t in current.items()
        )

    def load(self, rows: Sequence[int]) -> None:
        """Load the present tensors, scalars and modes of members ``rows`` into the array.

        Raises:
            FusionError: members with hooks or in different modes, or an array whose tensors are not plain.
        """
        whole, array = self.whole, self.array
        check_unhooked(whole)
        self.modes = self._modes_of(rows)
        resized = len(rows) != len(array)
        # If both arrays have the same single skeleton, all members are alike.
        if resized or len(whole._array.skeletons) > 1 or array._array.skeletons != whole._array.skeletons:
            part = _array_of(whole, rows)
            if part.contents != array._array.contents:
                enter(array, part.contents, part)
                self._find_kin()
        self.rows = list(rows)
        if array._views.members:
            # Calls that ran member by member had the modules of other members.
            array._views = Views()
        self._load_tensors(resized)
        for path, branch in array.named_modules(remove_duplicate=False):
            branch.training = self.modes[path]

    @torch.no_grad()
    def _load_tensors(self, resized: bool) -> None:
        shared, stacks = self.array._array.comparison.shared, dict(tensors(self.whole))
        copied = {} if self.live else {n: t.detach() for n, t in stacks.items() if n not in shared}
        taken = MemberTable(len(self.whole), copied).take(self.rows)
        visited: set[int] = set()
        for name, tensor in tensors(self.array):
            stack = stacks[name]
            if isinstance(tensor, nn.Parameter):
                frozen = frozen_rows(stack)
                tensor.requires_grad_(stack.requires_grad and not (frozen is not None and bool(frozen[self.rows[0]])))
            if name in shared:
                if tensor.data_ptr() != stack.data_ptr():
                    tensor.data = stack.detach()
            elif self.live:
                tensor.data = _view(stack, self.rows)
            elif id(tensor) not in visited:
                visited.add(id(tensor))
                if resized:
                    tensor.grad = None
                    resize(tensor, taken[name], False)
                else:
                    tensor.detach().copy_(taken[name])
        if resized:
            self.array._mark()

    def store(self, count: int) -> None:
        """Write the first ``count`` members into their rows of the whole array.

        Raises:
            FusionError: forward has set train or eval modes.
        """
        self.check_modes()
        shared, stacks = self.array._array.comparison.shared, dict(tensors(self.whole))
        changed = {n: t.detach() for n, t in changed_tensors(self.array).items() if n not in shared}
        table = MemberTable(len(self.whole), {name: stacks[name].detach() for name in changed})
        table.put(self.rows[:count], MemberTable(len(self.array), changed))

    @torch.no_grad()
    def move_gradients(self) -> None:
        """Add the gradients of the members, which are neighbours, to their rows; those of shared tensors are summed."""
        shared, params = self.array._array.comparison.shared, dict(self.whole.named_parameters())
        rows = slice(self.rows[0], self.rows[-1] + 1)
        for name, param in self.array.named_parameters():
            grad, param.grad = param.grad, None
            whole, absent = params[name], None if grad is None else absent_rows(grad)
            if grad is None or (name in shared and absent is not None and bool(absent.all())):
                continue
            if name in shared:
                whole.grad = grad if whole.grad is None else whole.grad.add_(grad)
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole, memory_format=torch.contiguous_format)
                mark_absent(whole.grad, torch.ones(len(whole), dtype=torch.bool, device="cpu"))
            before = absent_rows(whole.grad)
            if before is not None and before[rows].all():
                whole.grad[rows] = grad
            else:
                whole.grad[rows] += grad
            if before is not None:
                missing = before.clone()
                missing[rows] &= torch.zeros(len(grad), dtype=torch.bool, device="cpu") if absent is None else absent
                mark_absent(whole.grad, missing)

    def check_modes(self) -> None:
        """Raise a FusionError if forward has set train or eval modes."""
        array = self.array
        changed = [path for path, module in array.named_modules() if module.training != self.modes[path]]
        if changed:
            raise FusionError(
                f"forward of {array._original} sets the mode of {changed[0] or 'the model'}, which a step of "
                "some rows cannot hold; step all rows, or set modes before training"
            )

    def _modes_of(self, rows: Sequence[int]) -> dict[str, bool]:
        """The modes of members ``rows``. Raises FusionError where they differ, or where one has hooks."""
        whole = self.whole
        base, split = whole.training_by_path(), whole._split()
        if not split:
            return base
        members = whole._views.members
        frozen = [flags for stack in whole.stacks.values() if (flags := frozen_rows(stack)) is not None]
        modes = [members[row].training if row in members else base for row in rows]
        alike = all(own == modes[0] for own in modes) and all(len(f[list(rows)].unique()) == 1 for f in frozen)
        if not alike or any(row in members and members[row].hooked for row in rows):
            raise FusionError(
                f"members {list(rows)} of a fused {whole._original} cannot be computed together: {split}. Step members "
                "of equal modes and flags in calls of their own, rows=[...], and members with hooks with all rows"
            )
        return dict(modes[0])

    def _find_kin(self) -> None:
        """Derive programs from those of the whole array, if there are any."""
        compiler: Compiler = self.array._compiler
        compiler.opens = self.whole._compiler.opens
        compiler.kin = Kin(self.array, compiler, self.array._array.contents, self.whole)


def _array_of(fused: FusedModule, rows: Sequence[int]) -> Array:
    contents = fused._array.contents
    return fused._array.of_contents([contents[row] for row in rows], {})


def _view(stack: Tensor, rows: Sequence[int]) -> Tensor:
    return stack.detach()[rows[0] : rows[-1] + 1]
