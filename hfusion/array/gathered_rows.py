"""Some members of an array as a small array around copies of their rows, and back.

Three of a hundred members are thus computed in the time of three. The small array reuses programs of the whole array
without a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.array.array_editing import Kinds, changed_tensors, enter, resize
from hfusion.array.member_module import MemberModule
from hfusion.array.member_views import MembersApart, Views
from hfusion.array.program_reuse import Kin, trust
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import live_rows
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.program_rows import of_rows
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows, freeze_rows, frozen_rows, mark_absent
from hfusion.core.membership import is_own_hook
from hfusion.core.memory import has_address
from hfusion.core.row_indices import write_rows
from hfusion.torch_private.module_hooks import has_global_hooks

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


def part_of(fused: FusedModule, rows: Sequence[int], stack: Callable[[Tensor, Any], Tensor]) -> FusedModule:
    """Return an array of some members, in the modes of ``fused``.

    Args:
        stack: ``stack(whole, rows)`` returns a tensor of it; ``rows`` is None for a tensor that all members share.
    """
    from hfusion.array.module import FusedModule

    array = fused._array
    comparison, variants = array.comparison.of_members(rows)
    skeletons = tuple(array.skeletons[variant] for variant in variants)
    part = replace(array, members=len(rows), skeletons=skeletons, comparison=comparison, origins=WeakIdKeyDictionary())
    for parameter, (member, name) in array.origins.items():
        if member in rows:
            part.origins[parameter] = (list(rows).index(member), name)
    shared = comparison.shared
    stacks_by_id: dict[int, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    for name, whole in fused.stacks.items():
        if name in array.shapes:
            if id(whole) not in stacks_by_id:
                stacks_by_id[id(whole)] = stack(whole, None if name in shared else rows)
            stacks[name] = stacks_by_id[id(whole)]
    fused_part = FusedModule(part, stacks)
    fused_part._is_part = True
    modes = fused.training_by_path()
    for path, module in fused_part.named_modules(remove_duplicate=False):
        module.training = modes[path]
    return fused_part


def copied_rows(stack: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Return a copy of rows of a stack, or a shared tensor (``rows`` is None) without a copy; keeps parameters."""
    copy = stack.detach() if rows is None else stack.detach()[list(rows)]
    return nn.Parameter(copy, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else copy


@dataclass(eq=False)
class GatheredRows:
    """Members ``rows`` of ``whole`` as a separate array.

    Attributes:
        array: holds copies of the rows; a tensor that all members share uses the memory of the whole array's.
        rows: the row of each member of ``array`` in ``whole``. A row may be repeated, to fill up a block.
        modes: the train and eval modes of the members, by path.
    """

    whole: FusedModule
    array: FusedModule
    rows: list[int]
    modes: dict[str, bool]

    _room = staticmethod(copied_rows)

    @classmethod
    def of(cls, whole: FusedModule, rows: Sequence[int]) -> Self:
        """Create an array of members ``rows`` of ``whole``. Raises FusionError, see `load`."""
        gathered = cls(whole, part_of(whole, rows, cls._room), list(rows), {})
        gathered._find_kin(gathered.array._compiler, Kinds.of(gathered.array).contents)
        gathered.load(rows)
        return gathered

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
        self.check_plain()
        self.modes = self._modes_of(rows)
        resized = len(rows) != len(array)
        # If both arrays have the same single skeleton, all members are alike.
        if resized or len(whole._array.skeletons) > 1 or array._array.skeletons != whole._array.skeletons:
            self._load_kinds(rows)
        self.rows = list(rows)
        self._load_tensors(resized)
        for path, branch in array.named_modules(remove_duplicate=False):
            branch.training = self.modes[path]

    def _load_kinds(self, rows: Sequence[int]) -> None:
        """Switch to the variants (scalars, such as dropout p) of members ``rows``."""
        whole, array = self.whole, self.array
        before, contents = Kinds.of(array).contents, Kinds.of(whole).contents
        after = [contents[row] for row in rows]
        if after != before:
            comparison, variants = whole._array.comparison.of_members(rows)
            skeletons = tuple(whole._array.skeletons[variant] for variant in variants)
            smaller = replace(array._array, members=len(rows), skeletons=skeletons, comparison=comparison)
            enter(array, before, after, smaller)
            self._find_kin(array._compiler, after)

    @torch.no_grad()
    def _load_tensors(self, resized: bool) -> None:
        shared = self.array._array.comparison.shared
        index: dict[torch.device, Tensor] = {}
        visited: set[int] = set()
        stacks = dict(tensors(self.whole))
        for name, tensor in tensors(self.array):
            stack = stacks[name]
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(_trains(stack, self.rows))
            if id(tensor) in visited:
                continue
            visited.add(id(tensor))
            if name in shared:
                if tensor.data_ptr() != stack.data_ptr():
                    tensor.data = stack.detach()
                continue
            if stack.device not in index:
                index[stack.device] = torch.tensor(self.rows, device=stack.device)
            rows = stack.detach().index_select(0, index[stack.device])
            if resized:
                tensor.grad = None
                resize(tensor, rows, False)
            else:
                tensor.detach().copy_(rows)
        if resized:
            self.array._mark()

    @torch.no_grad()
    def store(self, count: int) -> None:
        """Write the first ``count`` members into their rows of the whole array.

        Raises:
            FusionError: forward has set train or eval modes.
        """
        self.check_modes()
        array = self.array
        shared = array._array.comparison.shared
        stacks, visited = dict(tensors(self.whole)), set[int]()
        for name, tensor in changed_tensors(array).items():
            if name in shared or id(tensor) in visited:
                continue
            visited.add(id(tensor))
            write_rows(stacks[name].detach(), self.rows[:count], tensor.detach()[:count])

    def check_modes(self) -> None:
        """Raise a FusionError if forward has set train or eval modes."""
        array = self.array
        changed = [path for path, module in array.named_modules() if module.training != self.modes[path]]
        if changed:
            raise FusionError(
                f"forward of {array._original} sets the mode of {changed[0] or 'the model'}, which a step of "
                "some rows cannot hold; step all rows, or set modes before training"
            )

    def check_plain(self) -> None:
        """Raise a FusionError if the whole array has hooks, or tensors whose rows cannot be taken out."""
        whole = self.whole
        for name, tensor in tensors(whole):
            if not has_address(tensor) and not tensor.is_meta:
                raise FusionError(
                    f"{name} must be a tensor whose rows can be taken out, got {type(tensor).__name__}. Step all rows, "
                    "or choose them before fully_shard or whatever replaced it."
                )
            held = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
            if not all(is_own_hook(hook) for hooks in held for hook in (hooks or {}).values()):
                raise FusionError(
                    f"{name} of a fused {whole._original} has a hook, which takes the gradients of all members: step "
                    "all rows, or remove it"
                )
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if has_global_hooks() or any(getattr(module, name) for module in whole.modules() for name in hooks):
            raise FusionError(
                f"a fused {whole._original} has a hook, which takes the outputs of all members: step all rows, or "
                "remove it"
            )

    def _modes_of(self, rows: Sequence[int]) -> dict[str, bool]:
        """The modes of members ``rows``. Raises FusionError where they differ, or where one has hooks."""
        whole = self.whole
        base, split = whole.training_by_path(), whole._split()
        if split is None:
            return base
        members = whole._views.members_by_row
        for row in rows:
            if row in members and (where := members[row].hooked):
                raise FusionError(
                    f"member {row} of a fused {whole._original} has a hook at {where}, and a step of some rows "
                    "computes copies of members, without hooks: step all rows, or remove the hook"
                )
        modes = {row: members[row].training if row in members else base for row in rows}
        other = next((row for row in rows if modes[row] != modes[rows[0]]), None)
        if other is not None:
            raise FusionError(
                f"members {rows[0]} and {other} of a fused {whole._original} are in different modes: step them in "
                "calls of their own, rows=[...] for each mode"
            )
        for name, stack in whole.stacks.items():
            frozen = frozen_rows(stack)
            if frozen is not None and len(frozen[list(rows)].unique()) > 1:
                raise FusionError(
                    f"some of the members {list(rows)} of a fused {whole._original} train {name}, others do not: step "
                    "them in calls of their own, rows=[...] for each kind"
                )
        return dict(modes[rows[0]])

    def _find_kin(self, compiler: Compiler, contents: Sequence[Any]) -> None:
        """Let ``compiler`` derive programs from those of the whole array, if there are any."""
        compiler.opens = self.whole._compiler.opens
        compiler.kin = WholeKin(self.whole, Kin(self.array, compiler, tuple(contents)))


@dataclass(frozen=True, eq=False)
class WholeKin:
    """Derives a program from earlier programs of the gathered rows (``kin``), or from those of the ``whole`` array."""

    whole: FusedModule
    kin: Kin

    def __call__(self, modes: Any, arguments: Arguments) -> Compiled | None:
        related = self.kin(modes, arguments)
        if related is not None:
            return related
        contents = Kinds.of(self.whole).contents
        program = self.whole._compiler.fitting(modes, arguments)
        if program is None or not set(self.kin.contents) <= set(contents):
            return None
        rows = [contents.index(content) for content in self.kin.contents]
        smaller = of_rows(program, rows, self.kin.compiler.subject)
        trust(self.whole, program, self.kin.fused, smaller)
        return smaller


# Blocks of neighbouring members, as arrays in the memory of their rows, to compute one block after another.


class MemberBlock(GatheredRows):
    """Neighbouring members as a separate array, whose tensors are views of their rows.

    Programs are derived from those of the whole array, if there are any. `load` moves the block to as many other
    members.
    """

    # Views of rows have the full row shape, so members must not differ in shapes.

    @staticmethod
    def _room(stack: Tensor, rows: Sequence[int] | None) -> Tensor:
        values = stack.detach() if rows is None else _view(stack, rows)
        return nn.Parameter(values, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else values

    @torch.no_grad()
    def _load_tensors(self, resized: bool) -> None:
        shared, stacks = self.array._array.comparison.shared, dict(tensors(self.whole))
        for name, tensor in tensors(self.array):
            stack = stacks[name]
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(_trains(stack, self.rows))
            tensor.data = stack.detach() if name in shared else _view(stack, self.rows)


def _trains(stack: Tensor, rows: Sequence[int]) -> bool:
    """Return whether members ``rows``, which train the same parameters, train a stack."""
    frozen = frozen_rows(stack)
    return stack.requires_grad and not (frozen is not None and bool(frozen[rows[0]]))


def _view(stack: Tensor, rows: Sequence[int]) -> Tensor:
    return stack.detach()[rows[0] : rows[-1] + 1]


class BlockGradients:
    """Collects the gradients of an array from one block of members after another.

    They are added to the existing gradients of the array.
    """

    def __init__(self, whole: nn.Module) -> None:
        self._params = dict(whole.named_parameters())
        self._names_with_gradient = {name for name, param in self._params.items() if param.grad is not None}
        # By name, a bool tensor [B] that is True for members without a gradient so far.
        self._absent: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, block: MemberBlock) -> None:
        """Move the gradients of ``block`` into the rows of its members; gradients of shared tensors are summed."""
        shared, rows = block.array._array.comparison.shared, slice(block.rows[0], block.rows[-1] + 1)
        for name, param in block.array.named_parameters():
            grad, param.grad = param.grad, None
            if grad is None:
                continue
            whole, absent = self._params[name], absent_rows(grad)
            if name in shared:
                if absent is not None and bool(absent.all()):
                    continue
                whole.grad = grad if whole.grad is None else whole.grad.add_(grad)
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole, memory_format=torch.contiguous_format)
            if name not in self._absent:
                before = absent_rows(whole.grad) if name in self._names_with_gradient else None
                everybody = torch.full((len(whole),), name not in self._names_with_gradient, device="cpu")
                self._absent[name] = everybody if before is None else before.clone()
            if name in self._names_with_gradient:
                whole.grad[rows] += grad
                self._absent[name][rows] &= True if absent is None else absent
            else:
                whole.grad[rows] = grad
                self._absent[name][rows] = False if absent is None else absent
            mark_absent(whole.grad, self._absent[name])


# A slice ``fused[1:3]`` as an array of neighbouring members, which are the same objects as in the whole array.


def slice_of(fused: FusedModule, rows: slice, chosen: range) -> FusedModule:
    """Return the slice of members ``chosen``, whose stacks are live views of their rows; cached while referenced."""
    cached = fused._views.slices.get(chosen)
    if cached is not None:
        return cached
    part = part_of(fused, chosen, lambda stack, members: live_rows(stack, None if members is None else rows))
    part._views, part._is_part = SliceViews(part, fused, chosen), fused._is_part
    fused._views.slices[chosen] = part
    return part


class SliceViews(Views):
    """The members of a slice, which are members of the ``whole`` array."""

    def __init__(self, part: FusedModule, whole: FusedModule, rows: range) -> None:
        super().__init__(part)
        self._whole, self._chosen, self.exposed = whole, rows, True
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
    def members_by_row(self) -> dict[int, MemberModule]:
        """The members by their rows in the slice."""
        return {index: self._whole._views.members[row] for index, row in enumerate(self._chosen)}

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
            frozen = frozen_rows(whole_stack)
            rows = None if frozen is None else frozen[list(self._chosen)]
            trained = whole_stack.requires_grad and not (rows is not None and bool(rows.all()))
            if stack.requires_grad != trained and name not in fused._array.comparison.shared:
                stack.requires_grad_(trained)
            freeze_rows(stack, rows if trained else None)
        self.note(fused)

    def heed(self, fused: FusedModule, calling: bool = False) -> MembersApart | None:
        """Apply changes as `update` does. Raises FusionError if members then differ in modes or have hooks."""
        self.update(fused)
        whole, members = self._whole, self.members_by_row
        modes = {index: member.training for index, member in members.items()}
        apart = any(member.hooked or modes[index] != modes[0] for index, member in members.items())
        if whole._views.split is not None and (apart or any(frozen_rows(s) is not None for s in fused.stacks.values())):
            raise FusionError(
                f"members {list(self._chosen)} of a fused {fused._original} cannot be computed together: "
                f"{whole._views.split.why}. Call the whole array, or the members by themselves: fused[i](...)"
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
