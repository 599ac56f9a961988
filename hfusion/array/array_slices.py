"""A slice ``fused[1:3]`` as an array of neighbouring members, which are the same objects as in the whole array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfusion.array.gathered_rows import part_of
from hfusion.array.member_module import RowView
from hfusion.array.member_views import Views
from hfusion.array.members_apart import MembersApart
from hfusion.capture.skeleton import live_rows
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import freeze_rows, frozen_rows
from hfusion.core.memory import has_address

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


def slice_of(fused: FusedModule, rows: slice, chosen: range) -> FusedModule:
    """Return the slice of members ``chosen``, whose stacks are live views of their rows; cached while referenced."""
    cached = fused._views.slices.get(chosen)
    if cached is not None:
        return cached
    part = part_of(fused, chosen, lambda stack, members: live_rows(stack, None if members is None else rows))
    part._views = SliceViews(part, fused, chosen)
    fused._views.slices[chosen] = part
    return part


class SliceViews(Views):
    """The members of a slice, which are members of the ``whole`` array."""

    def __init__(self, part: FusedModule, whole: FusedModule, rows: range) -> None:
        super().__init__(part)
        self._whole, self._chosen = whole, rows
        for row in rows:
            whole[row]
        # Stacks that were cut to smaller sizes of these members are copies, so they are left out.
        self._joined = [name for name, stack in part.stacks.items() if _is_view(stack, self._in_whole(part, name))]
        self.note(part)

    def _in_whole(self, fused: FusedModule, name: str) -> Tensor:
        """Return the rows of the whole array's stack ``name`` that belong to the slice."""
        rows = None if name in fused._array.comparison.shared else slice(self._chosen.start, self._chosen.stop)
        return live_rows(self._whole.stacks[name], rows).detach()

    def follow(self, fused: FusedModule) -> None:
        """Copy tensors that replaced the slice's into the whole array, and make them views of it again.

        A slice that was moved to another dtype or device becomes an independent array.
        """
        for name in self._joined:
            stack, rows = fused.stacks[name], self._in_whole(fused, name)
            if _is_view(stack, rows):
                continue
            if (stack.shape, stack.dtype, stack.device) != (rows.shape, rows.dtype, rows.device):
                self._whole._views.slices.pop(self._chosen, None)
                fused._views = Views(fused)
                return
            rows.copy_(stack.detach())
            stack.data = rows
        super().follow(fused)

    @property
    def members_by_row(self) -> dict[int, RowView]:
        """The members by their rows in the slice."""
        return {index: self._whole._views.members[row] for index, row in enumerate(self._chosen)}

    def __bool__(self) -> bool:
        return True

    def get(self, fused: FusedModule, row: int) -> nn.Module:
        """Member ``row`` of the slice."""
        return self._whole[self._chosen[row]]

    def update(self, fused: FusedModule) -> None:
        """Apply changes made to members, see `Views`."""
        from hfusion.array.array_editing import Kinds, enter

        if self._array_changed(fused):
            self.follow(fused)
            self._pass_on(fused)
        whole = self._whole
        whole._split()
        before, after = Kinds.of(fused), Kinds.of(whole)
        contents = [after.contents[row] for row in self._chosen]
        if contents != before.contents:
            comparison, variants = whole._array.comparison.of_members(self._chosen)
            skeletons = tuple(whole._array.skeletons[variant] for variant in variants)
            enter(fused, before.contents, contents, replace(fused._array, skeletons=skeletons, comparison=comparison))
        for name, stack in fused.stacks.items():
            whole_stack = whole.stacks[name]
            if stack.requires_grad != whole_stack.requires_grad and name not in fused._array.comparison.shared:
                stack.requires_grad_(whole_stack.requires_grad)
            frozen = frozen_rows(whole_stack)
            freeze_rows(stack, None if frozen is None else frozen[list(self._chosen)])
        self.note(fused)

    def heed(self, fused: FusedModule, calling: bool = False) -> MembersApart | None:
        """Apply changes as `update` does. Raises FusionError if members then differ in modes or have hooks."""
        self.update(fused)
        whole, members = self._whole, self.members_by_row
        modes = {index: member.training for index, member in members.items()}
        hooked = {index: where for index, member in members.items() if (where := member.hooked)}
        if hooked or any(member_modes != modes[0] for member_modes in modes.values()):
            raise FusionError(
                f"members {list(self._chosen)} of a fused {fused._original} cannot be computed together: "
                f"{whole._views.split.why if whole._views.split is not None else hooked}; call the whole array, or "
                "the members by themselves: fused[i](...)"
            )
        for path, branch in fused.named_modules(remove_duplicate=False):
            branch.training = modes[0][path]
        self.note(fused)
        return None

    def locate_members(self, fused: FusedModule) -> tuple[FusedModule, Sequence[int]]:
        """Return the whole array, and the rows of the members there."""
        return self._whole, self._chosen

    def rearranged(self, fused: FusedModule, sources: Sequence[Any], members: int) -> None:
        """Turn the slice into an independent array."""
        self._whole._views.slices.pop(self._chosen, None)
        fused._views = Views(fused)


def _is_view(stack: Tensor, rows: Tensor) -> bool:
    return has_address(stack) and stack.shape == rows.shape and stack.data_ptr() == rows.data_ptr()


def chosen_rows(rows: slice, members: int) -> range:
    """Return the rows of a slice. Raises ValueError if its step is not 1, IndexError if it is empty."""
    chosen = range(*rows.indices(members))
    if chosen.step != 1:
        raise ValueError(
            f"a slice of an array with step {chosen.step}: it must be 1, so that the stacks are contiguous; "
            "hf.fuse([fused[i] for i in ...]) copies any members"
        )
    if not chosen:
        raise IndexError(f"{rows} takes none of the {members} members of the array, which are 0 to {members - 1}")
    return chosen
