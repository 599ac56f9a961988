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
    modules, other_modules = (dict(side.named_modules(remove_duplicate=False)) for side in (model, other))
    for path, module in other_modules.items():
        # Two classes of one name can only be distinguished by their code.
        kinds = [_class(side) for side in (modules.get(path) or module, module)]
        if len({(kind.__module__, kind.__qualname__) for kind in kinds}) == 1 and not _alike(*kinds):
            raise difference
    nested = any(map(is_array, (*modules.values(), *other_modules.values())))
    modes = any(modules[path].training != module.training for path, module in other_modules.items() if path in modules)
    if nested or modes or not _alike(_class(model), _class(other)):
        raise difference
    named, other_named = dict(tensors(model)), dict(tensors(other))
    if ties(named) != ties(other_named):
        raise difference
    for name in named.keys() & other_named.keys():
        if _kind(named[name]) != _kind(other_named[name]):
            raise difference


def _kind(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that fit into one stack."""
    return isinstance(tensor, nn.Parameter), tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad


def _check_common(models: Sequence[nn.Module], indices: Sequence[int]) -> None:
    """Raise FusionError if models, one of each structure, have little in common, or tensors of different kinds."""
    named = [dict(tensors(model)) for model in models]
    keys = set.intersection(*(set(entries) for entries in named))
    common = {name for name in keys if len({entries[name].shape for entries in named}) == 1}
    sizes = [{name: p.numel() for name, p in entries.items() if isinstance(p, nn.Parameter)} for entries in named]
    shared = sum(size for name, size in sizes[0].items() if name in common)
    smallest = min(sum(entries.values()) for entries in sizes)
    if shared < LEAST_COMMON * smallest:
        alike = [
            sum(n for name, n in sizes[0].items() if _shape(entries, name) == named[0][name].shape) for entries in named
        ]
        least = min(range(1, len(models)), key=alike.__getitem__)
        difference = _difference(indices[0], models[0], indices[least], models[least])
        raise FusionError(
            f"{difference}. Models of several structures need half of their parameters in common, and these have "
            f"{shared} of {smallest} values"
        )
    first: dict[str, tuple[int, Tensor]] = {}
    for index, entries in zip(indices, named, strict=True):
        for name, tensor in entries.items():
            first_index, first_tensor = first.setdefault(name, (index, tensor))
            if _kind(first_tensor) != _kind(tensor):
                raise FusionError(
                    f"{name} is {_describe(first_tensor)} in model {first_index} and {_describe(tensor)} in model "
                    f"{index}; let it be of one kind, or give it two names"
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
    padded_shapes: dict[str, torch.Size] = {}
    for name in dict.fromkeys(name for shapes in models for name in shapes):
        tensor_shapes = [shapes[name] for shapes in models if name in shapes]
        if len(tensor_shapes) < len(models) or any(shape != tensor_shapes[0] for shape in tensor_shapes):
            padded_shapes[name] = torch.Size(map(max, zip(*tensor_shapes, strict=True)))
    return padded_shapes


def union_of_modules(models: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, ...]]:
    """Return the modules of ``models`` at each path, parents first and children in the order of all models."""
    modules_by_path: dict[str, list[nn.Module]] = {}
    for model in models:
        previous = ""
        for path, module in model.named_modules(remove_duplicate=False):
            if path not in modules_by_path:
                modules_by_path = _inserted(modules_by_path, path, previous)
            modules_by_path[path].append(module)
            previous = path
    return {path: tuple(modules) for path, modules in modules_by_path.items()}


def _inserted(modules: dict[str, list[nn.Module]], path: str, previous: str) -> dict[str, list[nn.Module]]:
    """Return ``modules`` with an entry for ``path`` after ``previous`` and, unless it is below it, its descendants."""
    result: dict[str, list[nn.Module]] = {}
    names = list(modules)
    # Behind the descendants that only other models have, unless it is a child itself.
    k = names.index(previous) + 1 if previous in modules else 0
    while k < len(names) and previous and names[k].startswith(f"{previous}.") and not path.startswith(f"{previous}."):
        k += 1
    for name in [*names[:k], path, *names[k:]]:
        result[name] = modules.get(name, [])
    return result
