"""A group of one member that is in no array: its model runs in eager torch, and nothing is captured or compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.array.member_functions import MemberFunction
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import check_materialized, tensors
from hfusion.compiler.arguments import row_of_leaf
from hfusion.core.calls import call_arguments, is_stacked
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError
from hfusion.core.membership import Membership, mark, membership
from hfusion.core.step_arguments import check_losses
from hfusion.device.backend import active_autocast, without_autocast
from hfusion.population.evaluation import evaluating_model, with_row
from hfusion.population.group_options import GroupOptions
from hfusion.population.training_group import TrainingGroup


class PlainGroup(TrainingGroup):
    """A group of one member; ``fused`` is its model.

    Its optimizer is one of hf.optim over the parameters of the model, which takes less time for one model than the
    fused optimizers of torch; so its state is that of a row of an array, to the bit.

    Attributes:
        shared: the names of frozen parameters that members of other groups hold, too.
    """

    is_plain = True
    shared: Sequence[str] = ()

    def member(self, row: int) -> nn.Module:
        return self.fused

    read = member

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of a Parameter has lost its mark.
        mark_plain(state["fused"], state["shared"])
        super().__setstate__(state)

    def _prepare(self) -> None:
        self._list_tensors()
        super()._prepare()

    def _make_step(self) -> None:
        self._loss = self._weighted_loss()

    def _call(self, inputs: Any, target: Any, keywords: dict[str, Any], free: Iterable[int]) -> Tensor:
        """Compute loss and gradients by autograd. Raises ValueError for a loss that is no number with a gradient."""
        self.settle()
        self._hold([name for name, tensor in self._tensors.items() if not isinstance(tensor, nn.Parameter)])
        args, kwargs = call_arguments(inputs, keywords)
        if not isinstance(inputs, Tensor) or kwargs:
            args, kwargs = of_row(args), of_row(kwargs)
        if not isinstance(target, Tensor):
            target = of_row(target)
        self.drop_gradients()
        with torch.enable_grad():
            loss = self._loss(self.fused(*args, **kwargs), target)
            check_losses(loss, trains=any(param.requires_grad for param in self.parameters()))
            # As torch advises: an autocast is for forward and loss.
            with without_autocast(active_autocast()):
                if loss.requires_grad:
                    loss.backward()
        losses: Tensor = loss.detach().reshape(1)
        self._finish(losses)
        return losses

    def _list_tensors(self) -> None:
        """Cache the tensors, which a step reads five times: walking the modules each time took half its overhead."""
        self._tensors, self._named = dict(tensors(self.fused)), tuple(self.fused.named_parameters())

    def settle(self) -> None:
        """Raise a FusionError if the model has other parameters than the optimizer; buffers may be replaced."""
        current, known = dict(tensors(self.fused)), self._tensors
        if len(current) == len(known) and all(map(is_, current.values(), known.values())):
            return
        held, known_ids = set(map(id, current.values())), set(map(id, known.values()))
        odd = [
            f"it has another parameter {name}" if name in current else f"it has no parameter {name} any more"
            for name, tensor in known.items()
            if isinstance(tensor, nn.Parameter) and id(tensor) not in held
        ]
        odd += [
            f"the parameter {name} is new"
            for name, tensor in current.items()
            if isinstance(tensor, nn.Parameter) and id(tensor) not in known_ids
        ]
        if odd:
            raise FusionError(
                f"what was done to a plain member of class {self.kind.__name__} does not fit its optimizer: {odd[0]}. "
                "Undo it, or stop the member, change its model and start it again: model = pop.stop(row); ...; "
                "pop.start(row, model)"
            )
        for name, parameter in self.fused.named_parameters():
            mark(parameter, replace(cast(Membership, membership(parameter)), name=name))
        self._list_tensors()

    def parameters(self) -> Iterable[nn.Parameter]:
        return [parameter for _, parameter in self._named]

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._named

    def each(self, fn: MemberFunction, rows: list[int], *args: Any, **kwargs: Any) -> None:
        fn(self.fused, *of_row(args), **of_row(kwargs))

    @property
    def active_rows(self) -> list[int]:
        """The member's row, unless it is frozen or has left, or nothing of it is trained."""
        trains = any(parameter.requires_grad for parameter in self.parameters())
        return [row for row in self.table.live if trains and not bool(self.table["frozen"][row])]


def group_of(models: list[nn.Module], options: GroupOptions, rows: list[int], shared: Collection[int]) -> TrainingGroup:
    """Return a group of copies of ``models``: an array, or a plain group if there is one. Raises FusionError.

    Args:
        rows: for each model, the initial member of the population whose options it has.
        shared: ids of the frozen parameters that members of other groups hold, too. A plain group does not copy them.
    """
    if len(models) > 1:
        return TrainingGroup(fuse(models), options, rows)
    (model,) = models
    check_materialized(model, "the model")
    around = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if id(p) in shared}
    names = [name for name, tensor in tensors(model) if id(tensor) in around]
    copied = module_copy(model, dict(around))
    mark_plain(copied, names)
    group = PlainGroup(copied, options, rows)
    group.shared = names
    return group


def mark_plain(model: nn.Module, shared: Collection[str]) -> None:
    """Mark the tensors of a single model; ``shared``: the names of those that other members hold, too."""
    for name, tensor in tensors(model):
        mark(tensor, Membership(name, 1, stacked=False, standalone=name not in shared))


def member_outputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs, with a leading dim of members, of an array or the model of a plain group."""
    if isinstance(module, FusedModule):
        return module(*args, **kwargs)
    return with_row(module(*of_row(args), **of_row(kwargs)))


def evaluating_members(module: nn.Module) -> AbstractContextManager[None]:
    """Context manager: an array or the model of a plain group is in eval mode."""
    return module.evaluating() if isinstance(module, FusedModule) else evaluating_model(module)


def of_row(value: Any) -> Any:
    """Return nested ``value`` with each stacked tensor replaced by its only row."""
    return pytree.tree_map(lambda leaf: row_of_leaf(leaf, 0), value, is_leaf=is_stacked)
