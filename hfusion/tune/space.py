"""Turns the values that a space returns for a trial into a model, its hyper-parameters and other choices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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


# Routing of the values that a space returns, by name, to the functions of a sweep.

# Prefixes of addresses such as "optimizer.lr": they name the function that takes a value.
OPTIMIZER, MAKE_MODEL, LOADER, LOSS, SCHEDULER, SWEEP = (
    "optimizer",
    "make_model",
    "loader",
    "loss",
    "scheduler",
    "sweep",
)
# Arguments of hf.sweep itself that a space may choose for each trial.
SWEEP_NAMES = ("optimizer", "epochs", "clip_norm", "accumulate")


@dataclass(frozen=True)
class Receiver:
    """A function that takes values of the space.

    Attributes:
        prefix: its name in an address, as in ``"loss.label_smoothing"``.
        label: its name in errors.
        names: the parameters that it takes by name, except for those that hfusion passes.
        signature: its signature; None if Python knows none, or if only names are checked.
        positional: the number of positional arguments that hfusion passes.
        takes_others: it has ``**kwargs`` or no known signature, so that an address may have any name.
    """

    prefix: str
    label: str
    names: tuple[str, ...]
    signature: inspect.Signature | None = None
    positional: int = 0
    takes_others: bool = False

    @staticmethod
    def of_names(prefix: str, label: str, names: Sequence[str]) -> Receiver:
        """Return a receiver that takes these names only."""
        return Receiver(prefix, label, tuple(names))

    @staticmethod
    def of_function(prefix: str, function: Callable[..., Any], positional: int = 0) -> Receiver:
        """Return a receiver of the parameters after the first ``positional`` ones."""
        signature = _signature(function.forward if isinstance(function, nn.Module) else function)
        if signature is None:
            return Receiver(prefix, prefix, (), None, positional, takes_others=True)
        parameters = list(signature.parameters.values())
        named = [p for p in parameters[positional:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        others = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return Receiver(prefix, f"{prefix}{signature}", tuple(p.name for p in named), signature, positional, others)

    def check(self, number: int, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a call with these values would miss an argument or have an unexpected one."""
        if self.signature is None:
            return
        try:
            self.signature.bind(*[None] * self.positional, **values)
        except TypeError as error:
            raise ValueError(f"trial {number}: space gives {dict(values)} to {self.label}, which {error}") from error


def route(number: int, values: Mapping[str, Any], receivers: Sequence[Receiver]) -> dict[str, dict[str, Any]]:
    """Return the values of a trial by the prefix of the function that takes them.

    A name that is no parameter of any function goes to ``make_model``, if that has ``**kwargs``.

    Raises:
        ValueError: no function takes a name, several functions do, or one function gets a name twice.
    """
    by_prefix = {receiver.prefix: receiver for receiver in receivers}
    routed: dict[str, dict[str, Any]] = {prefix: {} for prefix in (*by_prefix, LOADER, LOSS, SCHEDULER)}
    for key, value in values.items():
        prefix, name = _address(number, key, by_prefix)
        if name in routed[prefix]:
            raise ValueError(f'trial {number}: space gives {name!r} to {prefix} twice, once as "{prefix}.{name}"')
        routed[prefix][name] = value
    for receiver in receivers:
        receiver.check(number, routed[receiver.prefix])
    return routed


def _address(number: int, key: str, receivers: Mapping[str, Receiver]) -> tuple[str, str]:
    """Return the prefix and the name of a key of the space."""
    prefix, dot, name = key.partition(".")
    if dot and prefix in receivers:
        receiver = receivers[prefix]
        if name not in receiver.names and receiver.signature is None and not receiver.takes_others:
            raise ValueError(f"trial {number}: {receiver.label} takes no {name!r}; it takes {_listed(receiver.names)}")
        return prefix, name
    takers = [receiver for receiver in receivers.values() if key in receiver.names]
    if len(takers) > 1:
        labels = [receiver.label for receiver in takers]
        addresses = " or ".join(f'"{receiver.prefix}.{key}"' for receiver in takers)
        raise ValueError(
            f"trial {number}: {', '.join(labels[:-1])} and {labels[-1]} {'both' if len(takers) == 2 else 'all'} take "
            f"{key!r}: let space give it as {addresses}, or give {'both' if len(takers) == 2 else 'several'}"
        )
    if takers:
        return takers[0].prefix, key
    if receivers[MAKE_MODEL].takes_others:
        return MAKE_MODEL, key
    accepted = "; ".join(f"{receiver.label} takes {_listed(receiver.names)}" for receiver in receivers.values())
    hint = "" if LOADER in receivers else "; loader takes nothing, as it is no function: give loader(batch_size)"
    raise ValueError(f"trial {number}: no function takes {key!r} that space gives: {accepted}{hint}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing by name"


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None if Python knows none, as for some built-in functions."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
