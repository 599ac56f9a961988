"""Turns the values that a space returns for a trial into a model, its hyper-parameters and other choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from hfusion.capture.compare_models import check_alone
from hfusion.device.generators import draws_kept
from hfusion.optim import FusedOptimizer
from hfusion.optim.hyper import member_vector
from hfusion.optim.lr_scheduler import PerMember
from hfusion.tune.chosen_optimizer import MakeOptimizer, optimizer_of, sample_optimizer
from hfusion.tune.loaders import same_values
from hfusion.tune.value_routing import (
    LOADER,
    LOSS,
    MAKE_MODEL,
    OPTIMIZER,
    SCHEDULER,
    SWEEP,
    SWEEP_NAMES,
    Receiver,
    route,
)

if TYPE_CHECKING:
    from optuna import Trial

# Added to errors about choices that a stored study cannot represent.
_NAMES = (
    "a study on disk keeps choices that are None, bool, int, float or str: suggest a name, and look it up, as in "
    "{'relu': nn.ReLU, 'tanh': nn.Tanh}[trial.suggest_categorical('act', ['relu', 'tanh'])]"
)

Space: TypeAlias = "Callable[[Trial], Mapping[str, Any]]"
MakeModel: TypeAlias = Callable[..., nn.Module]
MakeScheduler: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class ArrayChoices:
    """Choices that all trials of an array share.

    Attributes:
        optimizer: a function that makes the optimizer from parameters.
        options: options of the optimizer, such as nesterov.
        loader: arguments of the function that makes the loader.
        loss: keyword arguments of the loss.
        accumulate: minibatches per update.
        clips: whether gradients are clipped; each trial has its own maximum norm.
    """

    optimizer: MakeOptimizer
    options: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clips: bool = False

    def matches(self, other: ArrayChoices) -> bool:
        """Return whether trials with these choices and trials with ``other`` can share an array."""
        return same_values(vars(self), vars(other))


@dataclass(frozen=True, eq=False)
class Suggestion:
    """A trial's choices, by the function that takes them.

    Attributes:
        hypers: hyper-parameters of the optimizer for this trial.
        choices: the choices that all trials of its array share.
        model_arguments: arguments of make_model.
        scheduler: arguments of the function that makes its scheduler.
        epochs: the number of epochs to train.
        clip_norm: the maximum norm of its gradients; None if its array does not clip.
    """

    hypers: dict[str, Any]
    choices: ArrayChoices
    model_arguments: dict[str, Any]
    epochs: int
    scheduler: dict[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None

    def same_but_for_numbers(self, other: Suggestion) -> bool:
        """Return whether ``other`` is equal except for the optimizer's hyper-parameters and ``clip_norm``."""
        values, other_values = (
            (suggestion.model_arguments, suggestion.scheduler, suggestion.epochs) for suggestion in (self, other)
        )
        return self.choices.matches(other.choices) and same_values(values, other_values)


@dataclass(frozen=True, eq=False)
class ModelMaker:
    """Makes the models of trials, on a device."""

    make_model: MakeModel
    device: torch.device

    def model(self, number: int, suggestion: Suggestion) -> nn.Module:
        """Make a trial's model after ``torch.manual_seed(number)``. Raises FusionError if it cannot be fused."""
        with draws_kept():
            torch.manual_seed(number)
            model = self.make_model(**suggestion.model_arguments)
        if not isinstance(model, nn.Module):
            raise ValueError(f"make_model gave {type(model).__name__} for trial {number}: return an nn.Module")
        if not any(param.requires_grad for param in model.parameters()):
            raise ValueError(
                f"make_model gave {type(model).__name__} for trial {number} without a parameter that requires grad: "
                "there is nothing to train; leave requires_grad of some parameter True"
            )
        check_alone(0, model)
        return model.to(self.device)


@dataclass(frozen=True, eq=False)
class TrialModel:
    """A trial and its model. The model is not pickled: other processes make it again."""

    number: int
    suggestion: Suggestion
    maker: ModelMaker

    @cached_property
    def model(self) -> nn.Module:
        """The model, made on first access. Raises the same errors as `ModelMaker.model`."""
        return self.maker.model(self.number, self.suggestion)

    @property
    def tag(self) -> str:
        return f"trial {self.number}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "model"}


@dataclass(frozen=True, eq=False)
class SweepDefaults:
    """Defaults for trials whose space does not choose a value; see `hfusion.sweep`."""

    optimizer: MakeOptimizer
    epochs: int
    clip_norm: float | None = None
    accumulate: int = 1


class Maker:
    """Makes suggestions and models from trials. Raises ValueError if the optimizer is not from hf.optim.

    Args:
        loader: the function that makes loaders, if there is one.
        scheduler: makes a scheduler from the optimizer of one member, if there is one.
    """

    def __init__(
        self,
        make_model: MakeModel,
        space: Space,
        loss: Callable[..., Any],
        loader: Callable[..., Any] | None,
        scheduler: MakeScheduler | None,
        defaults: SweepDefaults,
        device: torch.device,
    ) -> None:
        self._space, self.models = space, ModelMaker(make_model, device)
        self._defaults, self._scheduler = defaults, scheduler
        functions: list[tuple[str, Callable[..., Any] | None, int]] = [
            (MAKE_MODEL, make_model, 0),
            (LOADER, loader, 0),
            (LOSS, loss, 2),
            (SCHEDULER, scheduler, 1),
        ]
        self._receivers = [
            *(
                Receiver.of_function(prefix, function, positional)
                for prefix, function, positional in functions
                if function is not None
            ),
            Receiver.of_names(SWEEP, "the sweep", SWEEP_NAMES),
        ]
        sample_optimizer(defaults.optimizer)

    def suggestion(self, trial: Any) -> Suggestion:
        """Route the values of ``space(trial)`` by name. Raises ValueError for a value that no function takes."""
        try:
            values = self._space(trial)
        except TypeError as error:
            if "JSON serializable" in str(error):
                error.add_note(_NAMES)
            raise
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise ValueError(f"space gave {values!r} for trial {trial.number}: return a dict of keyword arguments")
        try:
            return self._sorted(trial.number, values)
        except ValueError as error:
            if str(error).startswith("trial "):
                raise
            raise ValueError(f"trial {trial.number}: {error}") from error

    def _sorted(self, number: int, values: Mapping[str, Any]) -> Suggestion:
        kind = self._kind(values)
        sample = sample_optimizer(kind)
        names = dict.fromkeys([*(hyper.key for hyper in sample.hypers), *sample.options])
        optimizer = Receiver.of_names(OPTIMIZER, type(sample).__name__, list(names))
        receivers = [optimizer, *self._receivers]
        routed = route(number, values, receivers)
        options = {key: value for key, value in routed[OPTIMIZER].items() if key in sample.options}
        hypers = {key: value for key, value in routed[OPTIMIZER].items() if key not in options}
        _check_hypers(sample, hypers)
        epochs, accumulate, clip = self._numbers(routed[SWEEP])
        choices = ArrayChoices(kind, options, routed[LOADER], routed[LOSS], accumulate, clip is not None)
        # Raise errors now if hyper-parameters, options and scheduler do not fit together.
        combined = sample_optimizer(kind, options, [hypers])
        _ = combined.state_stacks
        if self._scheduler is not None:
            PerMember(combined, partial(self._scheduler, **routed[SCHEDULER]))
        return Suggestion(hypers, choices, routed[MAKE_MODEL], epochs, routed[SCHEDULER], clip)

    def _kind(self, values: Mapping[str, Any]) -> MakeOptimizer:
        """Return the optimizer that the space chose, or the default."""
        address = f"{SWEEP}.{OPTIMIZER}"
        choice = values.get(address, values.get(OPTIMIZER))
        return self._defaults.optimizer if choice is None else optimizer_of(choice)

    def _numbers(self, values: Mapping[str, Any]) -> tuple[int, int, float | None]:
        """Return epochs, accumulate and clip_norm of a trial. If the space chose None for the norm, it is infinite."""
        counts = []
        for name in ("epochs", "accumulate"):
            value = values.get(name, getattr(self._defaults, name))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
            counts.append(value)
        if "clip_norm" not in values:
            return counts[0], counts[1], self._defaults.clip_norm
        clip = values["clip_norm"]
        if clip is not None and (not isinstance(clip, int | float) or isinstance(clip, bool) or not clip > 0):
            raise ValueError(f"clip_norm={clip!r}: give a norm above 0, or None")
        return counts[0], counts[1], math.inf if clip is None else float(clip)

    def candidate(self, number: int, suggestion: Suggestion) -> TrialModel:
        """Return a trial with its model. Raises the same errors as `ModelMaker.model`."""
        trial_model = TrialModel(number, suggestion, self.models)
        _ = trial_model.model
        return trial_model


def _check_hypers(optimizer: FusedOptimizer, hypers: Mapping[str, Any]) -> None:
    for hyper in optimizer.hypers:
        if hyper.key not in hypers:
            continue
        value = hypers[hyper.key]
        if hyper.index is not None:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"{hyper.key}={value!r} is not a pair")
            value = value[hyper.index]
        hyper.check(member_vector(hyper.label, value, 1).tolist())


def check_choices(trial: Any) -> None:
    """Raise ValueError for choices that change when a study is stored on disk, such as tuples, which become lists."""
    for name, distribution in trial.distributions.items():
        for choice in getattr(distribution, "choices", ()):
            if choice is not None and not isinstance(choice, bool | int | float | str):
                raise ValueError(
                    f"trial {trial.number}: {name!r} has the choice {choice!r}, with which a sweep in a directory "
                    f"could not go on: {_NAMES}"
                )
