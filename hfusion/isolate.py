"""Find the smallest submodules that keep a model from being captured."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture import capture
from hfusion.errors import FusionError
from hfusion.opaque import Recorded, opaque

Records = Mapping[str, list[Recorded]]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Records:
    """Run a copy of ``model`` once; for every submodule, the calls it got. Leaves the random state as it was."""
    twin = copy.deepcopy(model)
    records: dict[str, list[Recorded]] = {path: [] for path, _ in twin.named_modules()}

    def note(path: str) -> Any:
        def hook(module: nn.Module, given: Any, named: Any, output: Any) -> None:
            records[path].append(Recorded(given, named, output))

        return hook

    for path, module in twin.named_modules():
        module.register_forward_hook(note(path), with_kwargs=True)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        twin(*args, **kwargs)
    return records


def culprits(model: nn.Module, records: Records, path: str = "") -> dict[str, str]:
    """The submodules, from ``path`` down, that must run in a loop: path to reason. Empty if all can be captured."""
    why = _refusal(model, records, path, {})
    if why is None:
        return {}
    found: dict[str, str] = {}
    for name, _ in model.get_submodule(path).named_children():
        child = f"{path}.{name}" if path else name
        if records.get(child):
            found |= culprits(model, records, child)
    if found and _refusal(model, records, path, found) is None:
        return found
    _check_results(path, records)
    return {path: why}


def _refusal(model: nn.Module, records: Records, path: str, stubs: dict[str, str]) -> str | None:
    """Why the submodule at ``path`` cannot be captured, with the submodules ``stubs`` left out; None if it can."""
    call = records[path][0]
    twin = copy.deepcopy(model)
    with opaque(twin, stubs, records, [twin]):
        try:
            capture(twin.get_submodule(path), call.args, call.kwargs, varying=not stubs)
        except FusionError as error:
            return str(error)
    return None


def _check_results(path: str, records: Records) -> None:
    for call in records[path]:
        odd = [leaf for leaf in pytree.tree_leaves(call.output) if not isinstance(leaf, Tensor | type(None))]
        if odd:
            raise FusionError(
                f"{path or 'forward'} can only run in a loop over members, and gives {odd[0]!r} beside tensors; "
                "let it give tensors only"
            )
