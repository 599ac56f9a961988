"""The definition of an optimizer: its constructor's arguments, the state it keeps, and its update in torch.

docs/contributing.md shows how to write one. Kernels are written from a trace of the definition, in C
(``native_kernels.py``) and in Triton (``gpu.py``). Both languages have a macro or function of the same name for each
operator (``operators.h``, ``triton_kernels.py``).
"""

from __future__ import annotations

import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeAlias, dataclass_transform

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.overrides import handle_torch_function, has_torch_function

from hfusion.optim.hyper import MASTER_WEIGHTS, Hyper, Settings

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
        shared = [name for name, argument in cls.arguments.items() if not argument.hypers]
        cls.options = tuple(name for name in shared if name != MASTER_WEIGHTS)
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


# What kernels are written from: the operators of `scalars` and `update`.

Operand: TypeAlias = str | float
"""The name of a value, or a number that is the same for all members."""

_INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COUNTS = {
    **dict.fromkeys(_INFIX, (2,)),
    **dict.fromkeys(("neg", "abs", "sqrt", "rsqrt", "reciprocal", "square", "sign", "to_double"), (1,)),
    **dict.fromkeys(("div", "maximum", "minimum", "pow", "cast_like"), (2,)),
    **dict.fromkeys(("where", "lerp"), (3,)),
    **dict.fromkeys(("addcmul", "addcdiv"), (3, 4)),
    "add": (2, 3),
}
"""The operators, and how many operands they may have."""
_ALIASES = {"truediv": "div", "to": "cast_like", "double": "to_double"}
# Their results have no more bits than their operands.
EXACT = ("abs", "sign", "maximum", "minimum", "where")


class Operation(NamedTuple):
    """One operator of a formula. ``stacked``: it computes elements of stacks, not a number of each member."""

    name: str
    operator: str
    operands: tuple[Operand, ...]
    stacked: bool


@dataclass(frozen=True, eq=False)
class KernelProgram:
    """What a formula computes for param groups with certain options and state.

    Attributes:
        formula: its class.
        states: the names of the stacks in the state.
        before: the operations that compute scalars.
        scalars: the scalars that the update reads, by name.
        new_numbers: numbers other than ``step`` after the step, by name.
        update: the operations of the update.
        results: the new parameter and the new stacks, by name.
    """

    formula: type[Formula]
    states: tuple[str, ...]
    before: Sequence[Operation]
    scalars: Mapping[str, Operand]
    new_numbers: Mapping[str, Operand]
    update: Sequence[Operation]
    results: Mapping[str, Operand]


def program(formula: type[Formula], options: Any, states: tuple[str, ...]) -> KernelProgram | None:
    """Return what ``formula`` computes for tensors with these ``states``; None if there are no kernels for it."""
    try:
        return _program(formula, options, states) if formula.elementwise else None  # type: ignore[arg-type]
    # A formula is user code, and may do anything with the symbols of a trace.
    except Exception:
        return None


@lru_cache(maxsize=256)
def _program(formula: type[Formula], options: Any, states: tuple[str, ...]) -> KernelProgram:
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()

    def symbol(name: str) -> Any:
        return tracer.create_proxy("placeholder", name, (), {})

    h = formula.Values(*(symbol(f"h_{hyper.name}") for hyper in formula.hypers))
    n = SimpleNamespace(**{name: symbol(f"n_{name}") for name in formula.numbers})
    scalars = {name: _operand(value) for name, value in formula.scalars(h, options, n).items()}
    before = _operations(tracer.graph, ())
    # A number that is the same for all members is no scalar.
    s = {name: symbol(f"s_{name}") if isinstance(value, str) else value for name, value in scalars.items()}
    names = [f"x_{name}" for name in ("param", "grad", *states)]
    param, grad, *stacks = map(symbol, names)
    state = dict(zip(states, stacks, strict=True))
    new_param, new_state = formula.update(param, grad, state, SimpleNamespace(**s), options)
    if new_state.keys() != state.keys():
        raise ValueError(f"update returned the state {sorted(new_state)}, not {sorted(state)}")
    update = _operations(tracer.graph, names)[len(before) :]
    results = {"param": _operand(new_param), **{name: _operand(new_state[name]) for name in states}}
    read = {*results.values(), *(operand for operation in update for operand in operation.operands)}
    return KernelProgram(
        formula,
        states,
        before,
        {name: operand for name, operand in scalars.items() if f"s_{name}" in read},
        {name: scalars[name] for name in formula.numbers if name != "step"},
        update,
        results,
    )


def _operand(value: Any) -> Operand:
    """Return what operations call a value. Raises TypeError if it is neither a symbol, a result nor a number."""
    node = value.node if isinstance(value, fx.Proxy) else value
    if isinstance(node, fx.Node):
        return str(node.target) if node.op == "placeholder" else f"v_{node.name}"
    if isinstance(node, (bool, int, float)):
        return float(node)
    raise TypeError(f"{value!r} is no number")


def _operations(graph: fx.Graph, stacks: Iterable[str]) -> list[Operation]:
    """Return the operations of a trace in their order. Raises ValueError for others than `_COUNTS` has.

    ``stacks``: the symbols that are stacks, whose elements are computed.
    """
    operations: list[Operation] = []
    stacked = set(stacks)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        operator = _ALIASES.get(name, name)
        operands = tuple(map(_operand, (*node.args, *node.kwargs.values())))
        is_stacked = not stacked.isdisjoint(operands)
        if len(operands) not in _COUNTS.get(operator, ()) or not node.kwargs.keys() <= {"alpha", "value", "weight"}:
            raise ValueError(f"{name} with {len(operands)} operands is not an operator of kernels")
        # Powers of 2, products and quotients round as these do.
        if operator == "square" or (operator == "pow" and operands[1] == 2.0):
            operator, operands = "mul", operands[:1] * 2
        elif operator == "neg":
            operator, operands = "mul", (*operands, -1.0)
        elif operator == "reciprocal":
            operator, operands = "div", (1.0, *operands)
        elif operator in ("addcmul", "addcdiv") and len(operands) == 3:
            operands = (*operands, 1.0)
        if is_stacked and operator in ("pow", "cast_like", "to_double"):
            raise ValueError(f"kernels have no {name} of elements")
        if is_stacked and operator == "div" and operands[1] not in stacked:
            # Of elements by a number of their member.
            operator = "div_by"
        operations.append(Operation(f"v_{node.name}", operator, operands, is_stacked))
        if is_stacked:
            stacked.add(operations[-1].name)
    return operations


def expression(operation: Operation, operands: Iterable[str]) -> str:
    """Return the expression of an operation. Functions have operands that infix operators do not have."""
    first, *others = operands
    if operation.operator in _INFIX and len(operation.operands) == 2:
        return f"{first} {_INFIX[operation.operator]} {others[0]}"
    return f"{operation.operator}({', '.join([first, *others])})"


# What makes steps of tensors by a formula: its kernels, or torch.


@dataclass(frozen=True, eq=False)
class StepTensors:
    """Tensors of one dtype on one device that a stepper updates.

    Attributes:
        formula: what a step computes.
        options: of the param group.
        names: of the stacks in the state.
        stacks: the parameters, then the stacks of each of the names; lists of tensors ``[B, *shape]``.
        numbers: by name a list of vectors ``[B]``, one for each parameter, on the CPU; empty if no state is kept.
    """

    formula: type[Formula]
    options: Any
    names: Sequence[str]
    stacks: Sequence[Sequence[Tensor]]
    numbers: Mapping[str, list[Tensor]]

    def advance(self, settings: Settings) -> Mapping[str, Tensor]:
        """Advance the numbers in the state by one step; return the scalars of this step, float64 ``[params, B]``."""
        members = len(self.stacks[0][0])
        stacked = {name: torch.stack(list(vectors)) for name, vectors in self.numbers.items()}
        if "step" in stacked:
            stacked["step"] += settings.advance[:members]
        step = stacked["step"].double() if stacked else torch.zeros(members, dtype=torch.float64, device="cpu")
        n = SimpleNamespace(**{**stacked, "step": step})
        hypers = settings.members[0]._make(settings.table[:, :members])
        scalars = self.formula.scalars(hypers, settings.options, n)
        for name, vectors in self.numbers.items():
            new = stacked[name] if name == "step" else scalars[name]
            torch._foreach_copy_(list(vectors), list(new.unbind()))
        shape = len(self.stacks[0]), members
        return {n: torch.as_tensor(v, dtype=torch.float64, device="cpu").expand(shape) for n, v in scalars.items()}


class Stepper:
    """Updates the tensors of a group.

    A step is work on the host (`ready`), then launches that are the same every time (`launch`), which can be recorded.

    Attributes:
        contiguous: whether it reads gradients by address, so that they must be contiguous and of the parameters' dtype.
        unrecordable: the reason why its launches cannot be recorded.
        key: everything that the launches depend on, except the addresses of tensors.
    """

    contiguous = False
    unrecordable = ""
    key: Hashable = None

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts, and copy the host's numbers that a step needs to the device.

        ``grads``: one gradient for each parameter.
        """

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step; return the objects that must stay alive while the launches may be replayed."""
