"""Attributes and classes that users give to parameters, such as ``p.no_decay = True``: kept on stacks, rows and copies.

torch itself drops the attributes in copy.deepcopy. Optimizers and their param groups are often chosen by them.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor, nn

from hfusion.core.errors import FusionError

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
