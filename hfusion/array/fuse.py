"""Create an array from existing models (`fuse`), or from a function that makes one model at a time (`build`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hfusion.array.array_editing import Array, empty_stack
from hfusion.array.module import FusedModule
from hfusion.capture.attribute_fingerprint import fingerprint
from hfusion.capture.compare_models import Comparison, Sharing, check_alone, check_list, check_pair, compare
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import skeleton
from hfusion.core.errors import FusionError
from hfusion.core.member_table import is_row
from hfusion.device.backend import draws_kept, keep_large_blocks
from hfusion.torch_private.export_state import uncompiled


def fuse(models: Sequence[nn.Module], *, verify: bool = True) -> FusedModule:
    """Return one module that computes and trains all ``models``, each exactly as if alone.

    Args:
        models: B modules of one structure: the same classes of submodules, and tensors of the same shapes. They are
            not changed; their tensors are copied. A frozen parameter that is the same object in all models is used
            without a copy. A tensor that only some models share gets a row for each member. Of models wrapped by
            torch.compile, the modules inside are fused. `hfusion.Population` takes models of several structures.
        verify: compare the outputs and gradients of the members with their original code, on a few samples of the
            first training batch of every signature.

    Returns:
        A module with stacked parameters; capture happens at the first call.

    Raises:
        FusionError: the models differ in more than scalars, or have features that a fused array cannot honour.

    Example:
        >>> fused = fuse([nn.Linear(3, 2) for _ in range(4)])
        >>> fused(torch.ones(5, 3)).shape  # every member sees the same input
        torch.Size([4, 5, 2])
    """
    check_list(models)
    models = [uncompiled(model) for model in models]
    comparison = compare(models)
    keep_large_blocks(len(models) * _largest(models[0]))
    firsts = map(comparison.variants.index, range(max(comparison.variants) + 1))
    skeletons = tuple(skeleton(index, models[index]) for index in firsts)
    stacks = _room(models[0], len(models), comparison.shared)
    for index, model in enumerate(models[1:], start=1):
        _fill(stacks, index, model, comparison.shared)
    fused = FusedModule(Array(len(models), skeletons, comparison, verify), stacks)
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            fused._origins.setdefault(parameter, (index, name))
    return fused


def _largest(model: nn.Module) -> int:
    """Return the size in bytes of the largest parameter."""
    return max((parameter.nbytes for parameter in model.parameters()), default=0)


def build(make_model: Callable[[], nn.Module], seeds: Sequence[int], *, verify: bool = True) -> FusedModule:
    """Construct the members one at a time, directly in the stack: at most two exist in addition to the array.

    Args:
        make_model: returns a new model; called once per seed after ``torch.manual_seed(seed)``. The caller's random
            state is restored.
        seeds: one per member.
        verify: as in `fuse`.

    Raises:
        FusionError: no seeds, or models that cannot be fused with the first.
        ValueError: a seed is no whole number.

    Example:
        >>> len(build(lambda: nn.Linear(3, 2), seeds=range(4)))
        4
    """
    if not hasattr(seeds, "__len__"):
        raise FusionError(f"seeds is {seeds!r}: give one seed per member, such as range({seeds!r})")
    if len(seeds) == 0:
        raise FusionError("build got no seeds; give it one seed per member")
    if wrong := [seed for seed in seeds if not is_row(seed)]:
        raise ValueError(f"seeds has {wrong[0]!r}: give whole numbers")
    first = _create_model(make_model, 0, seeds[0], None)
    keep_large_blocks(len(seeds) * _largest(first))
    skeletons, variants = [skeleton(0, first)], [0]
    prints = {fingerprint(first): 0}
    sharing = Sharing()
    sharing.add(0, first)
    stacks: dict[str, Tensor] = {}
    for index, seed in enumerate(seeds[1:], start=1):
        model = _create_model(make_model, index, seed, first)
        check_pair(first, index, model)
        before = sharing.keys
        sharing.add(index, model)
        if index == 1:
            stacks = _room(first, len(seeds), sharing.keys)
        else:
            _part(stacks, before - sharing.keys, index, len(seeds))
        _fill(stacks, index, model, sharing.keys)
        variants.append(prints.setdefault(fingerprint(model), len(prints)))
        if variants[-1] == len(skeletons):
            skeletons.append(skeleton(index, model))
    stacks = stacks or _room(first, 1, sharing.keys)
    comparison = Comparison(tuple(variants), sharing.keys, sharing.partly, frozenset(sharing.common))
    return FusedModule(Array(len(seeds), tuple(skeletons), comparison, verify), stacks)


def _part(stacks: dict[str, Tensor], names: frozenset[str], index: int, members: int) -> None:
    """Give each member a row of the tensors ``names``, which the models before ``index`` share."""
    stacks_by_id: dict[int, Tensor] = {}
    for name in sorted(names):
        tensor = stacks[name]
        if id(tensor) not in stacks_by_id:
            stacks_by_id[id(tensor)] = stack = empty_stack(tensor, members)
            stack.detach()[:index].copy_(tensor.detach())
        stacks[name] = stacks_by_id[id(tensor)]


def _create_model(make_model: Callable[[], nn.Module], index: int, seed: int, first: nn.Module | None) -> nn.Module:
    """Return a new model that can be a member. Raises FusionError."""
    with draws_kept():
        torch.manual_seed(seed)
        model: nn.Module = uncompiled(make_model())
    if not isinstance(model, nn.Module):
        raise FusionError(f"make_model gave {type(model).__name__} for seed {index}, not a torch.nn.Module")
    if model is first:
        raise FusionError(f"make_model gave one object for seeds 0 and {index}; let it make a new model on every call")
    check_alone(index, model)
    return model


def _room(first: nn.Module, members: int, shared: frozenset[str]) -> dict[str, Tensor]:
    """Return stacks that hold the first member, with memory for the others."""
    stacks_by_id: dict[int, Tensor] = {}
    stacks = {}
    for name, tensor in tensors(first):
        if id(tensor) not in stacks_by_id:
            if name not in shared:
                stacks_by_id[id(tensor)] = empty_stack(tensor, members)
            elif isinstance(tensor, nn.Parameter):
                # A frozen parameter stays in the models' own memory.
                data = tensor.detach().clone() if tensor.requires_grad else tensor.detach()
                stacks_by_id[id(tensor)] = nn.Parameter(data, requires_grad=tensor.requires_grad)
            else:
                stacks_by_id[id(tensor)] = tensor.detach().clone()
        stacks[name] = stacks_by_id[id(tensor)]
    _fill(stacks, 0, first, shared)
    return stacks


def _fill(stacks: dict[str, Tensor], index: int, model: nn.Module, shared: frozenset[str]) -> None:
    for name, tensor in tensors(model):
        if name not in shared:
            stacks[name].detach()[index].copy_(tensor.detach())
