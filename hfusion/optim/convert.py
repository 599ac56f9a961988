"""From B running torch.optim optimizers to a fused one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.core.errors import FusionError
from hfusion.core.membership import member_rows
from hfusion.optim import formulas
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.coupling import AskedParams
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import ParamGroup

# Not what a step computes; the last three are how torch runs it.
_INTERNAL = ("params", "param_names", "differentiable", "foreach", "fused", "capturable")


def fuse(optimizers: Sequence[Optimizer], fused: Any, into: type[FusedOptimizer] | None = None) -> FusedOptimizer:
    """Return a fused optimizer that continues from the state of ``optimizers``.

    Args:
        optimizers: one optimizer of torch.optim per member, of one class, over that member's original parameters, with
            the same param groups. Hyper-parameters, step counts and state may differ. The state is copied.
        fused: the array of these members.
        into: the class of hf.optim to create; by default the one of the same name.

    Raises:
        FusionError: optimizers of several classes, other parameters or other groups.
        ValueError: a value is out of range.
    """
    originals = _checked(optimizers, fused, into)
    cls = into or _counterpart(originals)
    params = dict(fused.named_parameters())
    keys = _aligned_keys(originals, fused, params)
    groups: list[ParamGroup] = []
    for index, names in enumerate(keys):
        member_groups = [original.param_groups[index] for original in originals]
        group: ParamGroup = {"params": AskedParams(params[name] for name in names)}
        groups.append(group)
        if "param_names" in member_groups[0]:
            group["param_names"] = list(member_groups[0]["param_names"])
        for key in member_groups[0]:
            if key in _INTERNAL or (key == "decoupled_weight_decay" and key not in cls.options):
                continue
            _the_same(f"whether group {index} has an option {key!r}", [key in of_member for of_member in member_groups])
            where, options = f"option {key!r} of group {index}", [of_member[key] for of_member in member_groups]
            group[key] = _the_same(where, options) if key in cls.options else _fuse_option(where, options)
    optimizer: FusedOptimizer = cls(groups)
    optimizer.explicit_keys = [_explicit_keys(originals, index) for index in range(len(groups))]
    for group, *member_groups in zip(optimizer.param_groups, *(o.param_groups for o in originals), strict=True):
        for stack, *params_of_members in zip(group["params"], *(g["params"] for g in member_groups), strict=True):
            states: list[dict[str, Tensor]] = []
            for original, param in zip(originals, params_of_members, strict=True):
                values = {k: v for k, v in original.state.get(param, {}).items() if isinstance(v, Tensor | float | int)}
                tensors = {key: torch.as_tensor(value) for key, value in values.items()}
                state = {key: t for key, t in tensors.items() if key in cls.numbers or t.shape == param.shape}
                # SGD and Muon keep no count in torch; here one step means that the momentum buffer has begun.
                states.append({"step": torch.ones((), device="cpu"), **state} if state else {})
            kept = dict.fromkeys(key for state in states for key in state)
            entry = optimizer._state(stack, group, optimizer._settings(group), kept) if kept else {}
            for name in kept:
                rows = [row for row, state in enumerate(states) if name in state]
                column = member_rows(entry[name], membership_of(stack))
                column[rows] = torch.stack([states[row][name] for row in rows]).to(column)
    return optimizer


def _checked(optimizers: Any, fused: Any, into: Any) -> list[Optimizer]:
    """Return the optimizers as a list. Raises FusionError for arguments of other kinds."""
    if not hasattr(fused, "origin"):
        raise FusionError(
            f"hf.optim.fuse expects optimizers and the array of their members, got {type(fused).__name__} for the "
            "array. Call hf.optim.fuse([opt, ...], fused) with what hf.fuse or hf.build returned."
        )
    if not isinstance(optimizers, Iterable) or isinstance(optimizers, str | torch.nn.Module):
        raise FusionError(f"hf.optim.fuse expects a list of one optimizer per member, got {type(optimizers).__name__}")
    if into is not None and not (isinstance(into, type) and issubclass(into, FusedOptimizer)):
        raise FusionError(f"into={into!r}: give a class of hf.optim, such as into=hf.optim.Adam")
    optimizer_list = list(optimizers)
    for member, optimizer in enumerate(optimizer_list):
        if not isinstance(optimizer, Optimizer):
            is_class = isinstance(optimizer, type)
            got = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
            raise FusionError(
                f"optimizer {member} must be an optimizer, got {got}. "
                "Give one per member, such as [torch.optim.Adam(model.parameters()) for model in models]."
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise FusionError(
                f"optimizer {member} has differentiable=True, which a fused optimizer cannot do: set it to False"
            )
    if len(optimizer_list) != len(fused):
        raise FusionError(
            f"{len(optimizer_list)} optimizers for an array of {len(fused)} members: give one per member, in their "
            "order"
        )
    _the_same("the class of the optimizer", [type(optimizer).__name__ for optimizer in optimizer_list])
    return optimizer_list


def _counterpart(optimizers: list[Optimizer]) -> type[FusedOptimizer]:
    """Return the class of hf.optim that does the same. Raises FusionError if there is none."""
    known: dict[str, Any] = {n: cls for n, cls in vars(formulas).items() if getattr(cls, "torch_class", None)}
    kind = type(optimizers[0])
    if kind.__name__ not in known or known[kind.__name__].torch_class is not kind:
        names = ", ".join(f"torch.optim.{name}" for name in sorted(known))
        raise FusionError(
            f"optimizer 0 is {kind.__name__}; supported are {names}; for another one, give the class of hf.optim that "
            "computes the same as into="
        )
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        found: type[FusedOptimizer] = known[kind.__name__]
        return found
    decoupled = [bool(group.get("decoupled_weight_decay")) for opt in optimizers for group in opt.param_groups]
    if len(set(decoupled)) > 1:
        raise FusionError(f"decoupled_weight_decay={decoupled} in the param groups of all optimizers: use one value")
    return formulas.AdamW if decoupled[0] else formulas.Adam


def _aligned_keys(optimizers: list[Optimizer], fused: Any, params: dict[str, torch.nn.Parameter]) -> list[list[str]]:
    """Return the keys of the parameters in each param group. Raises FusionError if the members' groups differ."""
    keys: list[list[list[str]]] = []
    for member, optimizer in enumerate(optimizers):
        keys.append([[] for _ in optimizer.param_groups])
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                where = f"parameter {index} (shape {list(param.shape)}) in group {number} of optimizer {member}"
                origin = fused.origin(param) if isinstance(param, torch.nn.Parameter) else None
                if origin is None:
                    raise FusionError(
                        f"{where} is no original parameter of this array: give optimizers over the models that were "
                        "fused"
                    )
                owner, key = origin
                mark = membership_of(params[key])
                if owner != member and mark.stacked:
                    raise FusionError(
                        f"{where} is {key!r} of member {owner}: give one optimizer per member, in their order"
                    )
                if not mark.stacked and mark.members > 1 and optimizer.state.get(param):
                    raise FusionError(
                        f"parameter {mark.name!r} is one tensor for all members, and {mark.members} optimizers have "
                        "updated it: train it with one optimizer of its own, or freeze it"
                    )
                keys[member][number].append(key)
    _the_same("the number of param groups", [len(groups) for groups in keys])
    for number, names in enumerate(zip(*keys, strict=True)):
        _the_same(f"the list of parameters, in their order, in param group {number}", names)
    return keys[0]


def _fuse_option(where: str, values: list[Any]) -> Any:
    if isinstance(values[0], (tuple, list)):
        return tuple(_fuse_option(where, list(column)) for column in zip(*values, strict=True))
    if isinstance(values[0], Tensor) or (isinstance(values[0], (int, float)) and not isinstance(values[0], bool)):
        return torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")
    return _the_same(where, values)


def _the_same(where: str, values: Sequence[Any]) -> Any:
    """Return the value that all members have. Raises FusionError if they differ."""
    for member, value in enumerate(values):
        if value != values[0]:
            raise FusionError(
                f"{where} is {value!r} for member {member} and {values[0]!r} for member 0: it must be the same"
            )
    return values[0]


def _explicit_keys(optimizers: Sequence[Optimizer], index: int) -> frozenset[str]:
    """Return the options in which a param group of torch differs from other groups and from the defaults.

    torch does not store which options a group was given itself.
    """
    explicit = set()
    for optimizer in optimizers:
        for key, default in optimizer.defaults.items():
            # A scheduler of torch has changed the rate of all groups since.
            values = [group.get(f"initial_{key}", group.get(key)) for group in optimizer.param_groups]
            if values[index] != default and any(value != values[index] for value in values):
                explicit.add(key)
    return frozenset(explicit)
