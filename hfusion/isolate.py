"""Find the smallest submodules that keep a model from being captured."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hfusion.capture import capture
from hfusion.errors import FusionError
from hfusion.kept import restored
from hfusion.memo import rehearse
from hfusion.opaque import Recorded, opaque

Records = Mapping[str, list[Recorded]]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Records:
    """Run a copy of ``model`` once; for every submodule, the calls it got. Leaves inputs and random state as they were.

    Raises:
        FusionError: forward changes what an array cannot keep per member: Python attributes, parameters, its inputs.
    """
    rehearse(model, args, kwargs)
    twin = copy.deepcopy(model)
    records: dict[str, list[Recorded]] = {path: [] for path, _ in twin.named_modules()}
    hooks = [hook for path, module in twin.named_modules() for hook in _watch(module, records[path])]
    with restored(model), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        twin(*_copied(args), **_copied(dict(kwargs)))
    for hook in hooks:
        hook.remove()
    return records


def _watch(module: nn.Module, calls: list[Recorded]) -> Iterator[RemovableHandle]:
    """Note the calls of ``module``, and whether they write into their inputs.

    Not those inside torch.func's transforms, whose tensors mean nothing outside.
    """
    open_calls: list[list[int]] = []

    def begin(module: nn.Module, given: Any, named: Any) -> None:
        open_calls.append(_versions((given, named)))

    def end(module: nn.Module, given: Any, named: Any, output: Any) -> None:
        writes = _versions((given, named)) != open_calls.pop()
        if not any(map(is_functorch_wrapped_tensor, _tensors((given, named, output)))):
            calls.append(Recorded(given, named, output, writes))

    yield module.register_forward_pre_hook(begin, with_kwargs=True)
    yield module.register_forward_hook(end, with_kwargs=True)


def _versions(values: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(values)]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _copied(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), values)


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
        if call.writes:
            raise FusionError(
                f"{path or 'forward'} can only run in a loop over members, and writes into its input, which members "
                "may share; let it write into a copy"
            )
        odd = [leaf for leaf in pytree.tree_leaves(call.output) if not isinstance(leaf, Tensor | type(None))]
        if odd:
            raise FusionError(
                f"{path or 'forward'} can only run in a loop over members, and gives {_told(odd[0])} beside tensors; "
                "let it give tensors only, in tuples, lists, dicts or classes known to torch.utils._pytree"
            )


def _told(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
