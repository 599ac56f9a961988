"""Turns the values that a space returns for a trial into a model, its hyper-parameters and other choices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion import optim
from hfusion.core.membership import Membership, mark
from hfusion.optim import FusedOptimizer
from hfusion.optim.hyper import member_vector
from hfusion.optim.lr_scheduler import PerMember
from hfusion.optim.optimizer_rows import explicit_everywhere, groups_taking
from hfusion.tune.study import check, is_count, is_positive

if TYPE_CHECKING:
    from optuna import Trial

    from hfusion.tune.trial_rows import SweepRecipe


Space: TypeAlias = "Callable[[Trial], Mapping[str, Any]]"
MakeModel: TypeAlias = Callable[..., nn.Module]
MakeScheduler: TypeAlias = Callable[..., Any]


def same_values(first: Any, second: Any) -> bool:
    """Return whether two nested values are equal, including types and tensors."""
    leaves, spec = pytree.tree_flatten(first)
    others, other_spec = pytree.tree_flatten(second)
    return spec == other_spec and all(map(_equal_leaves, leaves, others))


def _equal_leaves(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first is second or (type(first) is type(second) and bool(first == second))


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
        names = ("model_arguments", "scheduler", "epochs")
        same = all(same_values(getattr(self, name), getattr(other, name)) for name in names)
        return same and self.choices.matches(other.choices)


@dataclass(eq=False)
class SweepTrial:
    """A trial and its model.

    Attributes:
        model: the model; None before it is made, and when its worker has it.
        began: the round of its array in which it started.
        epochs: the number of epochs that it has trained.
        params: None, or its parameters after it became a copy of another trial.
        origin: the trial whose distributions ``params`` belong to.
    """

    number: int
    suggestion: Suggestion
    model: Any
    began: int = 0
    epochs: int = 0
    params: dict[str, Any] | None = None
    origin: int | None = None

    @property
    def tag(self) -> str:
        return f"trial {self.number}"

    @property
    def is_last(self) -> bool:
        """True if the next epoch is its last one."""
        return self.epochs + 1 == self.suggestion.epochs


class Maker:
    """Makes suggestions from trials.

    Args:
        recipe: the functions that may take values.
        defaults: the values of `SWEEP_NAMES` for trials whose space does not choose them.
    """

    def __init__(self, space: Space, recipe: SweepRecipe, defaults: Mapping[str, Any]) -> None:
        self._space, self.recipe, self._defaults = space, recipe, defaults
        functions: dict[tuple[str, int], Any] = {
            (MAKE_MODEL, 0): recipe.make_model,
            (LOADER, 0): recipe.loaders.function,
        }
        functions |= {(LOSS, 2): recipe.loss, (SCHEDULER, 1): recipe.scheduler}
        self._receivers = [Receiver.of_function(*key, taker) for key, taker in functions.items() if taker is not None]
        self._receivers.append(Receiver(SWEEP, "the sweep", SWEEP_NAMES))

    def suggestion(self, trial: Any) -> Suggestion:
        """Route the values of ``space(trial)`` by name. Raises ValueError for a value that no function takes."""
        values = self._space(trial)
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise ValueError(f"space gave {values!r} for trial {trial.number}: return a dict of keyword arguments")
        try:
            return self._sorted(values)
        except ValueError as error:
            raise ValueError(f"trial {trial.number}: {error}") from error

    def _sorted(self, values: Mapping[str, Any]) -> Suggestion:
        choice = values.get(f"{SWEEP}.{OPTIMIZER}", values.get(OPTIMIZER))
        kind: MakeOptimizer = self._defaults[OPTIMIZER] if choice is None else optimizer_of(choice)
        sample = sample_optimizer(kind)
        names = dict.fromkeys([*(hyper.key for hyper in sample.hypers), *sample.options])
        routed = route(values, [Receiver(OPTIMIZER, type(sample).__name__, tuple(names)), *self._receivers])
        options = {key: value for key, value in routed[OPTIMIZER].items() if key in sample.options}
        hypers = {key: value for key, value in routed[OPTIMIZER].items() if key not in options}
        for hyper in sample.hypers:
            if hyper.key in hypers:
                hyper.check(member_vector(hyper.label, hyper.get(hypers), 1).tolist())
        own = {**self._defaults, **routed[SWEEP]}
        for name in ("epochs", "accumulate"):
            check(name, own[name], is_count(own[name]), "give a whole number of at least 1")
        clip = own["clip_norm"]
        check("clip_norm", clip, clip is None or is_positive(clip), "give a norm above 0, or None")
        if "clip_norm" in routed[SWEEP]:
            # Trials that are not clipped share an array with others.
            clip = math.inf if clip is None else float(clip)
        choices = ArrayChoices(kind, options, routed[LOADER], routed[LOSS], own["accumulate"], clip is not None)
        # Raise errors now if hyper-parameters, options and scheduler do not fit together.
        combined = sample_optimizer(kind, options, [hypers])
        _ = combined.state_stacks
        if self.recipe.scheduler is not None:
            PerMember(combined, partial(self.recipe.scheduler, **routed[SCHEDULER]))
        return Suggestion(hypers, choices, routed[MAKE_MODEL], own["epochs"], routed[SCHEDULER], clip)


def check_choices(trial: Any) -> None:
    """Raise ValueError for choices that change when a study is stored on disk, such as tuples, which become lists."""
    for name, distribution in trial.distributions.items():
        for choice in getattr(distribution, "choices", ()):
            if choice is not None and not isinstance(choice, bool | int | float | str):
                raise ValueError(
                    f"trial {trial.number}: {name!r} has the choice {choice!r}, with which a sweep in a directory "
                    "could not go on: a study on disk keeps choices that are None, bool, int, float or str. Suggest a "
                    "name, and look it up, as in {'relu': nn.ReLU}[trial.suggest_categorical('act', ['relu'])]"
                )


# Routing of the values that a space returns, by name, to the functions of a sweep.

# Prefixes of addresses such as "optimizer.lr": they name the function that takes a value.
OPTIMIZER, MAKE_MODEL, LOADER, LOSS = "optimizer", "make_model", "loader", "loss"
SCHEDULER, SWEEP = "scheduler", "sweep"
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
    def of_function(prefix: str, positional: int, function: Callable[..., Any]) -> Receiver:
        """Return a receiver of the parameters after the first ``positional`` ones."""
        try:
            signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        except (TypeError, ValueError):
            # Python knows none of some built-in functions.
            return Receiver(prefix, prefix, (), None, positional, takes_others=True)
        parameters = list(signature.parameters.values())
        named = [p for p in parameters[positional:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        others = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return Receiver(prefix, f"{prefix}{signature}", tuple(p.name for p in named), signature, positional, others)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a call with these values would miss an argument or have an unexpected one."""
        if self.signature is None:
            return
        try:
            self.signature.bind(*[None] * self.positional, **values)
        except TypeError as error:
            raise ValueError(f"space gives {dict(values)} to {self.label}, which {error}") from error


def route(values: Mapping[str, Any], receivers: Sequence[Receiver]) -> dict[str, dict[str, Any]]:
    """Return the values of a trial by the prefix of the function that takes them.

    A name that is no parameter of any function goes to ``make_model``, if that has ``**kwargs``.

    Raises:
        ValueError: no function takes a name, several functions do, or one function gets a name twice.
    """
    by_prefix = {receiver.prefix: receiver for receiver in receivers}
    routed: dict[str, dict[str, Any]] = {prefix: {} for prefix in (*by_prefix, LOADER, LOSS, SCHEDULER)}
    for key, value in values.items():
        prefix, name = _address(key, by_prefix)
        if name in routed[prefix]:
            raise ValueError(f'space gives {name!r} to {prefix} twice, once as "{prefix}.{name}"')
        routed[prefix][name] = value
    for receiver in receivers:
        receiver.check(routed[receiver.prefix])
    return routed


def _address(key: str, receivers: Mapping[str, Receiver]) -> tuple[str, str]:
    """Return the prefix and the name of a key of the space."""
    prefix, dot, name = key.partition(".")
    if dot and prefix in receivers:
        receiver = receivers[prefix]
        if name not in receiver.names and receiver.signature is None and not receiver.takes_others:
            raise ValueError(f"{receiver.label} takes no {name!r}; it takes {_listed(receiver.names)}")
        return prefix, name
    takers = [receiver for receiver in receivers.values() if key in receiver.names]
    if len(takers) > 1:
        labels = [receiver.label for receiver in takers]
        addresses = " or ".join(f'"{receiver.prefix}.{key}"' for receiver in takers)
        raise ValueError(
            f"{', '.join(labels[:-1])} and {labels[-1]} {'both' if len(takers) == 2 else 'all'} take "
            f"{key!r}: let space give it as {addresses}, or give {'both' if len(takers) == 2 else 'several'}"
        )
    if takers:
        return takers[0].prefix, key
    if receivers[MAKE_MODEL].takes_others:
        return MAKE_MODEL, key
    accepted = "; ".join(f"{receiver.label} takes {_listed(receiver.names)}" for receiver in receivers.values())
    hint = "" if LOADER in receivers else "; loader takes nothing, as it is no function: give loader(batch_size)"
    raise ValueError(f"no function takes {key!r} that space gives: {accepted}{hint}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing by name"


# Optimizers chosen by a space: their class, the options of an array, and the hyper-parameters of its members.

MakeOptimizer: TypeAlias = Callable[[Any], FusedOptimizer]

_KINDS: dict[str, type[FusedOptimizer]] = {
    name.lower(): kind
    for name in optim.__all__
    if isinstance(kind := getattr(optim, name), type)
    and issubclass(kind, FusedOptimizer)
    and kind is not FusedOptimizer
}


def optimizer_of(choice: Any) -> MakeOptimizer:
    """Return the optimizer that a space names: ``"adam"``, ``hf.optim.Adam``, ``torch.optim.Adam``, or a function.

    Raises:
        ValueError: hf.optim has no optimizer of this name or class.
    """
    if isinstance(choice, str):
        if choice.lower() not in _KINDS:
            raise ValueError(f"optimizer={choice!r} is no optimizer of hf.optim; it has {', '.join(_KINDS)}")
        return _KINDS[choice.lower()]
    kind = choice if isinstance(choice, type) else object
    if issubclass(kind, torch.optim.Optimizer) and not issubclass(kind, FusedOptimizer):
        kinds = [kind for kind in _KINDS.values() if kind.torch_class is choice]
        if not kinds:
            raise ValueError(f"optimizer={choice.__name__} has no counterpart in hf.optim; it has {', '.join(_KINDS)}")
        return kinds[0]
    if not callable(choice):
        raise ValueError(f"optimizer={choice!r}: give a name such as 'adam', a class of hf.optim, or a function")
    make: MakeOptimizer = choice
    return make


def sample_optimizer(
    optimizer: MakeOptimizer, options: Mapping[str, Any] | None = None, hypers: Sequence[Mapping[str, Any]] = ()
) -> FusedOptimizer:
    """Return the optimizer of one member on the meta device. Raises ValueError if it is not from hf.optim.

    The options and hyper-parameters are written as by `optimizer_with`, except where param groups that are chosen by
    the names of a model's parameters would take them.
    """
    # As many as the layers of a model, of which ``optimizer`` may make groups by their places.
    params = [nn.Parameter(torch.empty(1, *shape, device="meta")) for shape in ((1, 1), (1,)) * 16]
    for param in params:
        mark(param, Membership("weight", 1, True))
    sample = optimizer(params)
    if not isinstance(sample, FusedOptimizer):
        raise ValueError(
            f"optimizer gave {type(sample).__name__}: give a class of hf.optim, or a function that makes one from "
            "parameters, such as lambda params: hf.optim.SGD(params, momentum=0.9)"
        )
    _write(sample, options or {}, hypers)
    return sample


def optimizer_with(
    optimizer: MakeOptimizer, options: Mapping[str, Any], hypers: Sequence[Mapping[str, Any]]
) -> MakeOptimizer:
    """Return a function that makes the optimizer with the options of an array and hyper-parameters of its members.

    hypers: the hyper-parameters of each member, or one mapping for all members. Options may depend on them, as nesterov
    needs momentum. Missing values keep the optimizer's defaults, and a param group keeps what it was given itself. The
    function raises ValueError for a value that no param group takes.
    """

    def make_optimizer(params: Any) -> FusedOptimizer:
        created = optimizer(params)
        if isinstance(created, FusedOptimizer) and (unused := _write(created, options, hypers)):
            raise ValueError(explicit_everywhere(created, unused[0]))
        return created

    return make_optimizer


def _write(optimizer: FusedOptimizer, options: Mapping[str, Any], hypers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write options and hyper-parameters as the optimizer's defaults; return the keys that no param group takes."""
    keys = dict.fromkeys([*options, *(key for member in hypers for key in member)])
    for key in keys:
        for group in groups_taking(optimizer, key):
            values = [member.get(key) for member in hypers]
            group[key] = options[key] if key in options else _values(group[key], values)
    return [key for key in keys if not groups_taking(optimizer, key)]


def _values(defaults: Any, values: Sequence[Any]) -> Any:
    """Return one hyper-parameter per member, or one for all, with defaults in place of None. Betas are a pair."""
    if isinstance(defaults, tuple):
        columns = [[None if value is None else value[index] for value in values] for index in range(len(defaults))]
        return tuple(_values(default, column) for default, column in zip(defaults, columns, strict=True))
    if len(values) == 1:
        return defaults if values[0] is None else values[0]
    return [
        default if value is None else float(value) for default, value in zip(defaults.tolist(), values, strict=True)
    ]
