"""From what a trial suggests to a model and its hyper-parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from hfusion.capture.compare import check_alone
from hfusion.core.membership import Membership, mark
from hfusion.device.generators import draws_kept
from hfusion.optim import FusedOptimizer
from hfusion.optim.hyper import member_vector

if TYPE_CHECKING:
    from optuna import Trial

# Of choices in a study that is stored.
_NAMES = (
    "a study on disk keeps choices that are None, bool, int, float or str: suggest a name, and look it up, as in "
    "{'relu': nn.ReLU, 'tanh': nn.Tanh}[trial.suggest_categorical('act', ['relu', 'tanh'])]"
)

# Before a dot and a name: who takes a value.
_OPTIMIZER, _MAKE_MODEL = "optimizer", "make_model"

Space: TypeAlias = "Callable[[Trial], Mapping[str, Any]]"
MakeModel: TypeAlias = Callable[..., nn.Module]
MakeOptimizer: TypeAlias = Callable[[Any], FusedOptimizer]


@dataclass(frozen=True, eq=False)
class Suggestion:
    """What a trial chose: ``hypers`` of its member, ``options`` of its array's optimizer, ``rest`` for the model."""

    hypers: dict[str, Any]
    options: dict[str, Any]
    rest: dict[str, Any]


@dataclass(frozen=True, eq=False)
class ModelMaker:
    """Makes the models of trials, on a device."""

    make_model: MakeModel
    device: torch.device

    def model(self, number: int, suggestion: Suggestion) -> nn.Module:
        """It is made after ``torch.manual_seed(number)``. Raises FusionError for one that cannot be fused."""
        with draws_kept():
            torch.manual_seed(number)
            model = self.make_model(**suggestion.rest)
        if not isinstance(model, nn.Module):
            raise ValueError(f"make_model gave a {type(model).__name__} for trial {number}: return an nn.Module")
        if not any(param.requires_grad for param in model.parameters()):
            raise ValueError(
                f"make_model gave a {type(model).__name__} for trial {number} without a parameter that requires grad: "
                "there is nothing to train; leave requires_grad of some parameter True"
            )
        check_alone(0, model)
        return model.to(self.device)


@dataclass(frozen=True, eq=False)
class TrialModel:
    """A trial with its model, which waits for a row or has one. Another process makes the model again."""

    number: int
    suggestion: Suggestion
    maker: ModelMaker

    @cached_property
    def model(self) -> nn.Module:
        """Raises as `ModelMaker.model`."""
        return self.maker.model(self.number, self.suggestion)

    @property
    def tag(self) -> str:
        return f"trial {self.number}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "model"}


class Maker:
    """Makes candidates from trials. Raises ValueError for an optimizer that is none of hf.optim."""

    def __init__(self, make_model: MakeModel, space: Space, optimizer: MakeOptimizer, device: torch.device) -> None:
        self._space, self.models = space, ModelMaker(make_model, device)
        known = _known(optimizer)
        self.name = known.__name__ if isinstance(known, type) else type(known).__name__
        self._hypers, self._options = known.hypers, known.options
        self._names = tuple(dict.fromkeys([*(hyper.key for hyper in self._hypers), *self._options]))
        self._signature = _signature(make_model)
        # By name: **kwargs takes what nobody else does.
        self._parameters = {
            name
            for name, parameter in (self._signature.parameters if self._signature else {}).items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }

    def suggestion(self, trial: Any) -> Suggestion:
        """What ``space(trial)`` gives, sorted by who takes it. Raises ValueError for what nobody takes or can take."""
        try:
            given = self._space(trial)
        except TypeError as error:
            if "JSON serializable" in str(error):
                error.add_note(_NAMES)
            raise
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ValueError(f"space gave {given!r} for trial {trial.number}: return a dict of keyword arguments")
        values, rest = self._addressed(trial.number, given)
        options = {key: value for key, value in values.items() if key in self._options}
        hypers = {key: value for key, value in values.items() if key not in options}
        self._check_hypers(trial.number, hypers)
        self._check_rest(trial.number, rest)
        return Suggestion(hypers, options, rest)

    def candidate(self, number: int, suggestion: Suggestion) -> TrialModel:
        """With its model. Raises as `ModelMaker.model`."""
        found = TrialModel(number, suggestion, self.models)
        _ = found.model
        return found

    def _addressed(self, number: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What goes to the optimizer, and what to make_model. Raises ValueError for what both or none of them take."""
        values: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for key, value in given.items():
            prefix, dot, name = key.partition(".")
            if not dot or prefix not in (_OPTIMIZER, _MAKE_MODEL):
                prefix, name = (_OPTIMIZER if key in self._names else _MAKE_MODEL), key
                if key in self._names and key in self._parameters:
                    raise ValueError(
                        f"trial {number}: {self.name} and make_model{self._signature} both take {key!r}: let space "
                        f'give it as "{_OPTIMIZER}.{key}" or "{_MAKE_MODEL}.{key}", or give both'
                    )
            elif prefix == _OPTIMIZER and name not in self._names:
                raise ValueError(f"trial {number}: {self.name} takes no {name!r}; it takes {', '.join(self._names)}")
            receiver = values if prefix == _OPTIMIZER else rest
            if name in receiver:
                raise ValueError(f'trial {number}: space gives {name!r} to {prefix} twice, once as "{prefix}.{name}"')
            receiver[name] = value
        return values, rest

    def _check_hypers(self, number: int, hypers: Mapping[str, Any]) -> None:
        for hyper in self._hypers:
            if hyper.key not in hypers:
                continue
            value = hypers[hyper.key]
            if hyper.index is not None:
                if not isinstance(value, tuple | list) or len(value) != 2:
                    raise ValueError(f"{hyper.key}={value!r} of trial {number} is not a pair")
                value = value[hyper.index]
            try:
                hyper.check(member_vector(hyper.label, value, 1).tolist())
            except ValueError as error:
                raise ValueError(f"trial {number}: {error}") from error

    def _check_rest(self, number: int, rest: Mapping[str, Any]) -> None:
        if self._signature is None:
            return
        try:
            self._signature.bind(**rest)
        except TypeError as error:
            raise ValueError(
                f"trial {number}: of what space gives, {', '.join(self._names)} go to {self.name} and the rest to "
                f"make_model{self._signature}, which {error}: {rest}"
            ) from error


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None where Python knows none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def check_choices(trial: Any) -> None:
    """Raise ValueError for choices that a study on disk gives back as others, such as tuples, which become lists."""
    for name, distribution in trial.distributions.items():
        for choice in getattr(distribution, "choices", ()):
            if choice is not None and not isinstance(choice, bool | int | float | str):
                raise ValueError(
                    f"trial {trial.number}: {name!r} has the choice {choice!r}, with which a sweep in a directory "
                    f"could not go on: {_NAMES}"
                )


def _known(optimizer: Any) -> Any:
    """What has ``hypers`` and ``options`` of the optimizer that a function makes."""
    if isinstance(optimizer, type) and issubclass(optimizer, FusedOptimizer):
        return optimizer
    params = [nn.Parameter(torch.empty(1, *shape, device="meta")) for shape in ((1, 1), (1,))]
    for param in params:
        mark(param, Membership("weight", 1, True))
    made = optimizer(params)
    if not isinstance(made, FusedOptimizer):
        raise ValueError(
            f"optimizer gave a {type(made).__name__}: give a class of hf.optim, or a function that makes one from "
            "parameters, such as lambda params: hf.optim.SGD(params, momentum=0.9)"
        )
    return made
