"""What is attached to tensors: marks of an array of models, and attributes and classes that users give to parameters.

A parameter or buffer of a fused module is either the stack of the members' tensors, ``[B, *shape]``, or one tensor
that all members share. The mark travels with the tensor, so that optimizers and clipping need only the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from hfusion.core.errors import FusionError

_MARK = "_hfusion_membership"
_OWN_HOOK = "_hfusion_own_hook"
_POST_ACCUMULATE = "_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"
# The tables of a tensor's hooks, and the methods that register them.
_TENSOR_HOOKS = ("_backward_hooks", "register_hook"), _POST_ACCUMULATE

T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True)
class Membership:
    """The mark of a fused module's tensor: ``name`` is its key in the state dict, ``members`` is B.

    ``stacked``: the first dimension is the member; otherwise the tensor is one object for all members. ``padded``:
    members' tensors may be smaller than a row, padded with zeros. ``standalone``: the tensor is of a single model
    outside of arrays; ``members`` is 1, and there is no dimension for it.
    """

    name: str
    members: int
    stacked: bool
    padded: bool = False
    standalone: bool = False

    @property
    def is_own(self) -> bool:
        """True if the tensor holds separate values for each member."""
        return self.stacked or self.standalone


def member_rows(tensor: Tensor, mark: Membership) -> Tensor:
    """Return a tensor, or its state or gradient, as ``[B, *shape]``; B is 1 if one model or all members own it."""
    return tensor if mark.stacked else tensor.unsqueeze(0)


def mark(tensor: T, membership: Membership) -> T:
    """Attach ``membership`` to ``tensor`` and return the tensor."""
    setattr(tensor, _MARK, membership)
    return tensor


def unmark(tensor: Tensor) -> None:
    """Remove the mark of a tensor, if it has one."""
    vars(tensor).pop(_MARK, None)


def membership(tensor: Tensor) -> Membership | None:
    """The mark of a fused module's tensor; None for any other tensor."""
    value = getattr(tensor, _MARK, None)
    return value if isinstance(value, Membership) else None


def has_rows(tensor: Tensor) -> bool:
    """Return whether the first dimension of a tensor is the member."""
    mark = membership(tensor)
    return mark is not None and mark.stacked


# A remedy to pass to `check_whole_stack`.
TAKE_BEFORE = "take members, fused[i] and fused.unfuse(), before fully_shard"


def check_whole_stack(tensor: Tensor, remedy: str) -> None:
    """Raise a FusionError for a stack of which a rank holds a piece only, as `fully_shard` leaves it (a DTensor)."""
    if hasattr(tensor, "placements"):
        mark = membership(tensor)
        label = f"a tensor of shape {list(tensor.shape)}" if mark is None else repr(mark.name)
        raise FusionError(
            f"{label} is of class {type(tensor.detach()).__name__}, of which each rank holds a piece: {remedy}; or "
            "give each rank members of its own, hf.fuse(models[hf.rows(len(models))]), and do not shard what they train"
        )


def is_per_member(tensor: Tensor) -> bool:
    """Return whether a tensor holds separate values for each member, or belongs to a model outside of arrays."""
    mark = membership(tensor)
    return mark is not None and mark.is_own


def own_hook(hook: Any) -> Any:
    """Mark a hook as registered by an array on its members, not by the user, and return it."""
    setattr(hook, _OWN_HOOK, True)
    return hook


def is_own_hook(hook: object) -> bool:
    """Return whether a hook was marked by `own_hook`."""
    return hasattr(hook, _OWN_HOOK)


def copy_tensor_hooks(model: nn.Module, copied: nn.Module) -> None:
    """Register the user's hooks of the parameters of ``model`` on its copy."""
    copies = dict(copied.named_parameters(remove_duplicate=False))
    for name, tensor in model.named_parameters():
        for table, register in _TENSOR_HOOKS if copies[name].requires_grad else ():
            for hook in (getattr(tensor, table) or {}).values():
                if not is_own_hook(hook):
                    getattr(copies[name], register)(hook)


# Attributes and classes that users give to parameters, such as ``p.no_decay = True``: kept on stacks, rows and copies.
#
# torch itself drops the attributes in copy.deepcopy. Optimizers and their param groups are often chosen by them.

# Attributes of tensors that belong to this package and to Dynamo.
_PRIVATE = ("_hfusion_", "_dynamo_")
# Attribute of a stack: the values that `mark_stack` has set on it.
_OURS = "_hfusion_marks"


class DifferingMark:
    """The value of an attribute of a stack on which its members do not agree. Using it raises a FusionError."""

    def __init__(self, name: str, parameter: str) -> None:
        self._text = f"the members have different values of {name!r} on their parameter {parameter!r}"

    def _refuse(self, *args: Any) -> Any:
        raise FusionError(
            f"{self._text}, and the array's stack was asked for one: ask the members', fused[b], or let "
            "hf.optim.groups(fused, rule) ask each member's"
        )

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look for special methods, which must not raise a FusionError.
        if name.startswith("__") or name == "_text":
            raise AttributeError(name)
        return self._refuse()

    def __repr__(self) -> str:
        return f"<{self._text}>" if "_text" in vars(self) else super().__repr__()

    __bool__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __int__ = __float__ = __add__ = __radd__ = __mul__ = __rmul__ = __contains__ = __hash__ = _refuse


def marks(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that a user has given to ``tensor``; none for a subclass, which keeps its data there."""
    held = vars(tensor)
    if not held or not (type(tensor) is Tensor or isinstance(tensor, nn.Parameter)):
        return {}
    # nn.Buffer sets two.
    of_buffers = ("_is_buffer", "persistent") if "_is_buffer" in held else ()
    return {name: value for name, value in held.items() if name not in of_buffers and not name.startswith(_PRIVATE)}


def user_class(parameter: Tensor) -> type[nn.Parameter] | None:
    """Return the class of ``parameter`` if it is a user's subclass of nn.Parameter that leaves its operators alone."""
    # A member's parameter has a class of its own, made from the user's.
    kind: Any = getattr(type(parameter), "_hfusion_kind", type(parameter))
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        return None
    plain = kind.__torch_function__ is nn.Parameter.__torch_function__
    same_memory = kind.__basicsize__ == nn.Parameter.__basicsize__
    plain = plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return kind if plain and same_memory else None


def keep_marks(copied: Tensor, original: Tensor, memo: dict[int, Any] | None = None) -> Tensor:
    """Give ``copied``, a parameter as nn.Parameter makes them, the class and the attributes of ``original``.

    memo: the memo of copy.deepcopy, to copy the values with; None: the values are not copied.
    """
    kind = user_class(original)
    if kind is not None and type(copied) is nn.Parameter:
        copied.__class__ = kind
    values = marks(original)
    if values:
        vars(copied).update(values if memo is None else copy.deepcopy(values, memo))
    return copied


def mark_stack(stack: Tensor, name: str, rows: Sequence[Tensor], equal_attributes: Container[str]) -> None:
    """Give a stack the class and attributes on which its members agree, and a `DifferingMark` for the others.

    rows: a parameter of each variant of members. equal_attributes: attributes with equal values in all members, as
    ``name``, a dot and the attribute. Attributes that the user has given to the stack stay.
    """
    classes = {user_class(row) for row in rows}
    if type(stack) is nn.Parameter and len(classes) == 1 and (kind := classes.pop()) is not None:
        stack.__class__ = kind
    values = [marks(row) for row in rows]
    stack_marks: dict[str, Any] = getattr(stack, _OURS, {})
    for key in dict.fromkeys(key for row_marks in values for key in row_marks):
        if key not in vars(stack) or (key in stack_marks and vars(stack)[key] is stack_marks[key]):
            # References to tensors or modules of a model are different objects in each member.
            agreed = f"{name}.{key}" in equal_attributes and not isinstance(values[0][key], Tensor | nn.Module)
            stack_marks[key] = values[0][key] if agreed else DifferingMark(key, name)
            setattr(stack, key, stack_marks[key])
    for key in [key for key in stack_marks if not any(key in row_marks for row_marks in values)]:
        if vars(stack).get(key) is stack_marks.pop(key):
            delattr(stack, key)
    if stack_marks:
        setattr(stack, _OURS, stack_marks)
