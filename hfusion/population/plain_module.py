"""A single model in plain torch with the interface of an array."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.methods import method_names
from hfusion.capture.registered_tensors import check_materialized, holder_of, tensors
from hfusion.compiler.arguments import row_of_leaf
from hfusion.core.calls import is_stacked
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError
from hfusion.core.membership import Membership, mark, membership


class _NoViews:
    """The views of an array's members; the model of a plain module is the member itself."""

    def __init__(self) -> None:
        self.members: dict[int, Any] = {}

    def update(self, module: PlainModule) -> None:
        """Copy parameters that the user has replaced into the trained ones."""
        module.settle()


class PlainModule:
    """A copy of ``model`` with the interface of a `FusedModule` of one member; its own code runs, nothing is captured.

    Args:
        model: the model to copy; it is not changed.
        shared: ids of the frozen parameters that other members hold, too. Their memory is shared, not copied.
    """

    def __init__(self, model: nn.Module, shared: Collection[int] = ()) -> None:
        check_materialized(model, "the model")
        around = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if id(p) in shared}
        bases = set(map(id, around.values()))
        self.model = module_copy(model, dict(around))
        self._original = type(model).__name__
        self._views = _NoViews()
        self._on_program: Callable[[Any], object] = lambda program: None
        for name, tensor in tensors(self.model):
            mark(tensor, Membership(name, 1, stacked=False, standalone=id(tensor) not in bases))
        self._list_tensors()

    def _list_tensors(self) -> None:
        """Cache the tensors: a step reads them five times, and walking the modules took half its overhead."""
        self._named = tuple(self.model.named_parameters())
        self._all_names = tuple(self.model.named_parameters(remove_duplicate=False))
        self._buffers = tuple(self.model.named_buffers())
        self._tables = ModuleTables(self.model)

    def settle(self) -> None:
        """Copy parameters that the user has replaced into the original ones, which the optimizer trains.

        Raises:
            FusionError: a shape, dtype or device differs, a parameter is new or missing, or it is shared.
        """
        if self._tables.is_unchanged():
            return
        trained = dict(self._all_names)
        trained_ids = set(map(id, trained.values()))
        for name, replacement in list(self.model.named_parameters(remove_duplicate=False)):
            if id(replacement) not in trained_ids:
                self._take_over(trained.get(name), name, replacement)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        named_ids = set(map(id, named.values()))
        for name, parameter in trained.items():
            if id(parameter) not in named_ids:
                raise self._unfit(f"it has no parameter {name} any more")
        for name, parameter in self.model.named_parameters():
            mark(parameter, replace(cast(Membership, membership(parameter)), name=name))
        self._list_tensors()

    def _take_over(self, held: nn.Parameter | None, name: str, replacement: nn.Parameter) -> None:
        """Copy ``replacement`` into ``held``, which the model then holds; ``replacement`` becomes an alias of it."""
        if held is None:
            raise self._unfit(f"the parameter {name} is new, and the optimizer does not have it")
        table, key, _ = holder_of(self.model, name)
        if table[key] is held:
            # This name is tied to a parameter that was copied already.
            return
        for attribute in ("shape", "dtype", "device"):
            old_value, new_value = getattr(held, attribute), getattr(replacement, attribute)
            if old_value != new_value:
                raise self._unfit(f"{attribute} of the parameter {name} is {new_value}, and was {old_value}")
        if is_shared(held):
            raise self._unfit(f"the parameter {name} is shared with other members, and was replaced in this one")
        with torch.no_grad():
            held.copy_(replacement)
        held.requires_grad_(replacement.requires_grad)
        held.grad, replacement.data = replacement.grad, held.data
        for module in self.model.modules():
            for other, value in module._parameters.items():
                if value is replacement:
                    module._parameters[other] = held

    def _unfit(self, why: str) -> FusionError:
        return FusionError(
            f"what was done to a plain member of class {self._original} does not fit its optimizer: {why}. Undo it, or "
            "stop the member, change its model and start it again: model = pop.stop(row); ...; pop.start(row, model)"
        )

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> nn.Module:
        if row not in (0, -1):
            raise IndexError(f"member {row} of one")
        return self.model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "model" not in vars(self) or name not in method_names(self.model):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        def method(*args: Any, **kwargs: Any) -> Any:
            return with_row(getattr(self.model, name)(*of_row(args), **of_row(kwargs)))

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the member with a leading dim of 1."""
        return with_row(self.model(*of_row(args), **of_row(kwargs)))

    def __getstate__(self) -> dict[str, Any]:
        frozen = [name for name, tensor in tensors(self.model) if is_shared(tensor)]
        return {"model": self.model, "frozen": frozen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model, self._original, self._views = state["model"], type(state["model"]).__name__, _NoViews()
        self._on_program = lambda program: None
        # A copy of a Parameter has lost its mark.
        for name, tensor in tensors(self.model):
            mark(tensor, Membership(name, 1, stacked=False, standalone=name not in state["frozen"]))
        self._list_tensors()

    def copied(self) -> nn.Module:
        """Return a copy of the model that shares the frozen parameters that other members have, too."""
        return module_copy(self.model, {id(p): p for p in self.model.parameters() if is_shared(p)})

    def _member(self, row: int) -> nn.Module:
        return self[row]

    def _compilers(self) -> list[Any]:
        return []

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._named)

    def buffers(self) -> Iterator[Tensor]:
        return self.model.buffers()

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        self.settle()
        return iter(self._named if remove_duplicate else self._all_names)

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        self.settle()
        return iter(self._buffers) if remove_duplicate else self.model.named_buffers(remove_duplicate=False)

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    def zero_grad(self) -> None:
        for _, parameter in self._named:
            parameter.grad = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: the model is in eval mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def is_shared(tensor: Tensor) -> bool:
    """Return whether a tensor of a plain module is one that other members hold, too."""
    tensor_mark = membership(tensor)
    return tensor_mark is not None and not tensor_mark.is_own


def of_row(value: Any) -> Any:
    """Return nested ``value`` with each stacked tensor replaced by its only row."""
    return pytree.tree_map(lambda leaf: row_of_leaf(leaf, 0), value, is_leaf=is_stacked)


def with_row(value: Any) -> Any:
    """Return nested ``value`` with a leading dim of 1 added to every tensor."""
    if isinstance(value, torch.Tensor):
        return value.unsqueeze(0)
    return pytree.tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, value)


# A cheap check that the modules of a model hold the same parameters, buffers and submodules as before.


class ModuleTables:
    """The parameters, buffers and submodules of all modules of ``model``, as they are when this is made.

    `is_unchanged` compares the objects, not their values, in some microseconds: for checks in every step.
    """

    def __init__(self, model: nn.Module) -> None:
        names = ("_parameters", "_buffers", "_modules")
        self._tables = [getattr(module, name) for module in model.modules() for name in names]
        self._sizes = list(map(len, self._tables))
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))

    def is_unchanged(self) -> bool:
        """Return whether every module holds the same objects as before."""
        return self._sizes == list(map(len, self._tables)) and all(
            map(is_, chain.from_iterable(map(dict.values, self._tables)), self._held)
        )
