"""Models of one array that differ in some submodules: checks of the differences, and the layout of shared stacks.

A stack ``[B, *T]`` has a row for every member. T is the largest size among the members' tensors in every dim. A
member's tensor is the leading part of its row; the rest of the row is zero, and no member reads it. The row of a member
without the tensor is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hfusion.capture.compare_models import _alike, _class, check_pair
from hfusion.capture.registered_tensors import is_array, tensors, ties
from hfusion.core.errors import FusionError

# The share of the parameters of the smallest model that all must have in common: the others may be deeper.
LEAST_COMMON = 0.5


def check_structures(models: Sequence[nn.Module], numbers: Sequence[int] | None = None) -> None:
    """Raise FusionError if ``models`` differ in more than an array of variants can hold.

    ``numbers``: the numbers of the models in errors, by default their positions.
    """
    numbers = range(len(models)) if numbers is None else numbers
    # One model of each structure.
    firsts = [(numbers[0], models[0])]
    for index, model in zip(numbers[1:], models[1:], strict=True):
        differences = [_difference(first, other, index, model) for first, other in firsts]
        if None in differences:
            continue
        for (_, other), difference in zip(firsts, differences, strict=True):
            _check_variant(other, model, difference)
        firsts.append((index, model))
    if len(firsts) > 1:
        _check_common([model for _, model in firsts], [index for index, _ in firsts])


def _difference(first: int, model: nn.Module, index: int, other: nn.Module) -> FusionError | None:
    try:
        check_pair(model, index, other)
    except FusionError as error:
        return FusionError(str(error).replace("model 0", f"model {first}"))
    return None


def _check_variant(model: nn.Module, other: nn.Module, difference: FusionError | None) -> None:
    """Raise ``difference`` unless two models differ in nothing but their submodules."""
    assert difference is not None
    ours, theirs = (dict(each.named_modules(remove_duplicate=False)) for each in (model, other))
    for path, module in theirs.items():
        # Two classes of one name can only be distinguished by their code.
        kinds = [_class(each) for each in (ours.get(path) or module, module)]
        if len({(kind.__module__, kind.__qualname__) for kind in kinds}) == 1 and not _alike(*kinds):
            raise difference
    nested = any(map(is_array, (*ours.values(), *theirs.values())))
    modes = any(ours[path].training != module.training for path, module in theirs.items() if path in ours)
    if nested or modes or not _alike(_class(model), _class(other)):
        raise difference
    mine, own = dict(tensors(model)), dict(tensors(other))
    if ties(mine) != ties(own):
        raise difference
    for name in mine.keys() & own.keys():
        if _kind(mine[name]) != _kind(own[name]):
            raise difference


def _kind(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that fit into one stack."""
    return isinstance(tensor, nn.Parameter), tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad


def _check_common(models: Sequence[nn.Module], indices: Sequence[int]) -> None:
    """Raise FusionError if models, one of each structure, have little in common, or tensors of different kinds."""
    named = [dict(tensors(model)) for model in models]
    keys = set.intersection(*(set(own) for own in named))
    common = {name for name in keys if len({own[name].shape for own in named}) == 1}
    sizes = [{name: p.numel() for name, p in own.items() if isinstance(p, nn.Parameter)} for own in named]
    shared = sum(size for name, size in sizes[0].items() if name in common)
    smallest = min(sum(own.values()) for own in sizes)
    if shared < LEAST_COMMON * smallest:
        alike = [sum(n for name, n in sizes[0].items() if _shape(own, name) == named[0][name].shape) for own in named]
        least = min(range(1, len(models)), key=alike.__getitem__)
        difference = _difference(indices[0], models[0], indices[least], models[least])
        raise FusionError(
            f"{difference}. Models of several structures need half of their parameters in common, and these have "
            f"{shared} of {smallest} values"
        )
    first: dict[str, tuple[int, Tensor]] = {}
    for index, own in zip(indices, named, strict=True):
        for name, tensor in own.items():
            before, known = first.setdefault(name, (index, tensor))
            if _kind(known) != _kind(tensor):
                raise FusionError(
                    f"{name} is {_describe(known)} in model {before} and {_describe(tensor)} in model {index}; "
                    "let it be of one kind, or give it two names"
                )


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _describe(tensor: Tensor) -> str:
    kind = "a parameter" if isinstance(tensor, nn.Parameter) else "a buffer"
    flag = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{kind} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{flag}"


def row_shapes(models: Sequence[Mapping[str, torch.Size]]) -> dict[str, torch.Size]:
    """Return the row shape of each stack that not all ``models`` fill. ``models``: shapes of tensors by key.

    >>> row_shapes([{"a": torch.Size([2]), "b": torch.Size([3])}, {"a": torch.Size([4])}])
    {'a': torch.Size([4]), 'b': torch.Size([3])}
    """
    found: dict[str, torch.Size] = {}
    for name in dict.fromkeys(name for shapes in models for name in shapes):
        own = [shapes[name] for shapes in models if name in shapes]
        if len(own) < len(models) or any(shape != own[0] for shape in own):
            found[name] = torch.Size(map(max, zip(*own, strict=True)))
    return found


def union_of_modules(models: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, ...]]:
    """Return the modules of ``models`` at each path, parents first and children in the order of all models."""
    found: dict[str, list[nn.Module]] = {}
    for model in models:
        before = ""
        for path, module in model.named_modules(remove_duplicate=False):
            if path not in found:
                found = _inserted(found, path, before)
            found[path].append(module)
            before = path
    return {path: tuple(modules) for path, modules in found.items()}


def _inserted(found: dict[str, list[nn.Module]], path: str, before: str) -> dict[str, list[nn.Module]]:
    """Return ``found`` with an entry for ``path`` after ``before`` and, unless it is below it, its descendants."""
    result: dict[str, list[nn.Module]] = {}
    names = list(found)
    # Behind the descendants that only other models have, unless it is a child itself.
    at = names.index(before) + 1 if before in found else 0
    while at < len(names) and before and names[at].startswith(f"{before}.") and not path.startswith(f"{before}."):
        at += 1
    for name in [*names[:at], path, *names[at:]]:
        result[name] = found.get(name, [])
    return result
