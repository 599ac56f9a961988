"""The definition of an optimizer: its constructor's arguments, the state it keeps, and its update in torch.

docs/contributing.md shows how to write one. Kernels for CPUs and GPUs are generated from the definition
(``kernel_source.py``).
"""

from __future__ import annotations

import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, TypeAlias, dataclass_transform

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import handle_torch_function, has_torch_function

from hfusion.optim.hyper import MASTER_WEIGHTS, Hyper

New: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]
"""The parameter and its state after a step."""


@dataclass(frozen=True)
class Argument:
    """An argument of an optimizer's constructor, which is a key of its param groups. `per_member`, `for_all` make it.

    Attributes:
        default: its value if it is not given.
        kw_only: True if it is passed by keyword only.
        hypers: the number of each member, or those of a pair; empty if all members have the same value.
        annotation: the type in the signature of the constructor.
    """

    default: Any
    kw_only: bool = False
    hypers: tuple[Hyper, ...] = ()
    annotation: Any = inspect.Parameter.empty


def per_member(
    *,
    default: float | tuple[float, ...],
    low: float = 0.0,
    high: float = math.inf,
    below: bool = False,
    names: tuple[str, ...] = (),
) -> Any:
    """Declare a number that may differ between members, as a class attribute of an optimizer.

    Args:
        default: the value of all members if none is given. A tuple for a pair such as ``betas``.
        low: the least value that is allowed.
        high: the largest value that is allowed.
        below: True if ``high`` itself is out of range.
        names: what `Formula.scalars` calls the items of a tuple.

    Example:
        >>> from hfusion.optim import FusedOptimizer, per_member
        >>> class Plain(FusedOptimizer):
        ...     lr: float = per_member(default=0.1)
        >>> [hyper.key for hyper in Plain.hypers]
        ['lr']
    """
    bounds = Hyper("", None, low, high, below)
    pair = tuple(replace(bounds, index=index, name=name) for index, name in enumerate(names))
    return Argument(default, hypers=pair or (bounds,))


def for_all(*, default: Any, kw_only: bool = False) -> Any:
    """Declare an option that all members of a param group share, as a class attribute of an optimizer.

    Args:
        default: its value if it is not given.
        kw_only: True if it is passed by keyword only.
    """
    return Argument(default, kw_only)


@dataclass_transform(field_specifiers=(per_member, for_all))
class Formula:
    """The part of an optimizer that defines what a step computes. Every method is static.

    Class attributes that are made by `per_member` and `for_all` are the arguments of the constructor, after ``params``.
    ``h`` holds the numbers by name: those of one member in ``check``, ``stacks`` and ``begin``, float64 vectors
    ``[..., B]`` in ``scalars``. ``o`` holds the options by name.
    """

    arguments: ClassVar[Mapping[str, Argument]] = {}
    """The arguments of the constructor by name, those of base classes first."""
    hypers: ClassVar[tuple[Hyper, ...]] = ()
    """Numbers that may differ between members."""
    options: ClassVar[tuple[str, ...]] = ()
    """Keys of the param group with one value for all members."""
    Values: ClassVar[Any] = None
    """A named tuple of the ``hypers``: numbers of one member, or vectors."""
    Options: ClassVar[Any] = None
    """A named tuple of the ``options`` of a param group, and of its `MASTER_WEIGHTS`."""
    moments: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors, shaped like the parameters, if every member has the same."""
    numbers: ClassVar[Mapping[str, float]] = {"step": 0.0}
    """State that is one number per member, with its initial value; ``step`` counts the member's steps."""
    torch_class: ClassVar[type[Optimizer] | None] = None
    """The optimizer of torch that does the same for one model. Half precision is rounded where that rounds."""
    counts_steps: ClassVar[bool] = True
    """True if members that keep no stack count their steps, and torch's class has a ``step`` in its state."""
    elementwise: ClassVar[bool] = True
    """True if each element is updated independently of the others, so that tensors may be passed in pieces."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        types = inspect.get_annotations(cls)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Argument)}
        for name, argument in own.items():
            delattr(cls, name)
            hypers = tuple(replace(hyper, key=name, name=hyper.name or name) for hyper in argument.hypers)
            own[name] = replace(argument, hypers=hypers, annotation=types.get(name, inspect.Parameter.empty))
        cls.arguments = {**cls.arguments, **own}
        cls.hypers = tuple(hyper for argument in cls.arguments.values() for hyper in argument.hypers)
        # Master weights are how state is kept, not what is computed.
        cls.options = tuple(
            name for name, argument in cls.arguments.items() if not argument.hypers and name != MASTER_WEIGHTS
        )
        named: Any = namedtuple
        cls.Values = named("Values", [hyper.name for hyper in cls.hypers])
        cls.Options = named("Options", [*cls.options, MASTER_WEIGHTS])
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("params", kinds[0], annotation="Any")]
        for name, argument in cls.arguments.items():
            kind = kinds[argument.kw_only]
            parameters.append(inspect.Parameter(name, kind, default=argument.default, annotation=argument.annotation))
        parameters.sort(key=lambda parameter: (parameter.kind, parameter.name == MASTER_WEIGHTS))
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    @staticmethod
    def check(h: Any, o: Any) -> None:
        """Raise ValueError if one member's hyper-parameters are not compatible with each other."""

    @staticmethod
    def check_param(name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raise ValueError if the optimizer cannot train a parameter that has this shape in one member."""

    @classmethod
    def stacks(cls, h: Any, o: Any) -> tuple[str, ...]:
        """Return the names of the state tensors, shaped like the parameters, that a member with these values has."""
        return cls.moments

    @staticmethod
    def begin(h: Any, o: Any) -> Mapping[str, float]:
        """Return the initial values of stacks that do not begin with 0, by name."""
        return {}

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        """Return the scalars of a step, computed in float64: vectors ``[..., B]``.

        ``n`` holds the ``numbers`` by name, ``[params, B]``; ``n.step`` is 1 at the first step. A scalar with the name
        of another number is the value of that number after the step.
        """
        return {**h._asdict(), "step": n.step}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        """Return the new values of ``param`` and of every tensor in ``state``.

        Tensors are stacks ``[B, ...]`` of float32 or float64 numbers, and not written. ``state`` has the stacks that
        some member uses. ``s`` holds the scalars by name, in the dtype and on the device of ``param``,
        ``[B, 1, ...]``, so that they broadcast over the members.
        """
        raise NotImplementedError


def _one_operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let traces record calls of ``function`` instead of the operators in it, so that its result is rounded once."""

    @wraps(function)
    def call(*args: Tensor) -> Tensor:
        if has_torch_function(args):
            return handle_torch_function(call, args, *args)
        return function(*args)

    return call


@_one_operator
def add(x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """Return ``x + alpha * y``: torch.add with a value of ``alpha`` per member."""
    return x + alpha * y


@_one_operator
def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """Return ``x + value * a * b``: torch.addcmul with a ``value`` per member."""
    return x + value * a * b


@_one_operator
def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """Return ``x + value * a / b``: torch.addcdiv with a ``value`` per member."""
    return x + value * a / b


def decayed(grad: Tensor, param: Tensor, decay: Tensor) -> Tensor:
    """Return ``grad + decay * param``, and ``grad`` for members without decay, whose ``0 * param`` might be NaN."""
    return torch.where(decay != 0, add(grad, param, decay), grad)


def ascent(grad: Tensor, maximize: bool) -> Tensor:
    """Return the gradient of the objective to minimize: ``-grad`` if ``maximize``, else ``grad``."""
    return -grad if maximize else grad
