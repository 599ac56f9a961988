"""The form of a row of the table of forwards, and the one check of all rows.

A row is what forward does, the attributes that it uses, its calls, and what an array makes of it::

    row("dropout in evaluation", lambda self, x: F.dropout(self.fc(x), 0.5, training=False))

    @row(loops="forward", says="reads a number")
    def scaled_by_a_sum(self, x):
        return self.fc(x) * x.sum().item()

Every model has a linear layer ``fc`` from 4 to 4 features.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import hfusion as hf
from hfusion.capture import export
from hfusion.compiler.fill_scalars import MAX_CAPTURES
from tests.alone import Call, assert_alone, call, looped, normal

# Larger than any sum here: a comparison with it is a branch on values that always goes one way.
FAR = 1e9
COUNT = 2
# Where no program computes a call, but the members themselves.
MEMBERS = "the members"


class Each(tuple[Any, ...]):
    """An attribute's values, one for each member."""


def each(*values: Any) -> Each:
    return Each(values)


def module(forward: Callable[..., Any], **attributes: Any) -> Callable[[], Any]:
    """Return a function that makes float64 modules with this forward.

    Args:
        attributes: what makes them; or their values, where nothing can call them.
    """

    def init(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, value in attributes.items():
            setattr(self, name, value() if callable(value) else value)
        self.double()

    return type("Part", (nn.Module,), {"__init__": init, "forward": forward})


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(normal(*shape or (4,)))


def buffer(fill: float = 0.0, *shape: int) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.full(shape or (4,), fill, dtype=torch.float64))


class Sevenfold(torch.autograd.Function):
    """A square whose backward is not its derivative, so that a lost backward shows. No graph holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] * 7


square = module(lambda self, x: Sevenfold.apply(x))


def branch(x: Tensor) -> Tensor:
    """Return ``x``, by a branch on values, which no graph holds."""
    return x if x.sum() < FAR else -x


def two_batches() -> Sequence[Call | Tensor]:
    return normal(5, 4), normal(3, 4)


def stacked(members: int = COUNT) -> Callable[[], Sequence[Call | Tensor]]:
    """Return a function that gives one batch for all members, and then one for each."""
    return lambda: (normal(5, 4), call(hf.stacked(normal(members, 5, 4))))


@contextmanager
def exports() -> Iterator[list[str]]:
    """Context manager: the classes of the modules that are exported in it, of which none is known before."""
    names: list[str] = []
    exported, captures = export._exported, export._captures

    def noting(module: nn.Module, *args: Any) -> Any:
        names.append(type(module).__name__)
        return exported(module, *args)

    with mock.patch.object(export, "_exported", noting), mock.patch.object(export, "_captures", type(captures)()):
        yield names


@dataclass(frozen=True, kw_only=True)
class Row:
    """What forward does, and what an array makes of it.

    Attributes:
        forward: of the model, with ``self``.
        has: attributes of the model, as `module` takes them, or `each`.
        make: makes the model in place of ``forward`` and ``has``; takes the member's number if it takes an argument.
        calls: makes the arguments of the calls, one after another.
        loops: the paths that run as the members' own code in the first program, `MEMBERS` if there is no program; None
            if that does not matter.
        ends: the same of the last program.
        says: a pattern of the report.
        silent: a pattern that must not be in the report.
        refused: a pattern of the `FusionError` of the first call that raises; nothing is compared then.
        warns: a pattern of a warning.
        ignores: a pattern of warnings that there may be.
        training: the modes in which the models are called, each with new models.
        grads: whether gradients are compared.
        captures: how many programs there may be; None for any number.
        exports: whether a few exports must serve all members.
    """

    name: str
    forward: Callable[..., Any] | None = None
    has: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., nn.Module] | None = None
    members: int = COUNT
    calls: Callable[[], Sequence[Call | Tensor]] = two_batches
    loops: str | None = ""
    ends: str | None = None
    says: str = ""
    silent: str = ""
    refused: str = ""
    warns: str = ""
    ignores: str = ""
    training: Sequence[bool] = (True,)
    grads: bool = True
    captures: int | None = None
    exports: bool = False

    def __str__(self) -> str:
        return self.name

    def models(self) -> list[nn.Module]:
        if self.make is not None:
            code, defaults = getattr(self.make, "__code__", None), getattr(self.make, "__defaults__", None)
            numbered = code is not None and code.co_argcount > len(defaults or ())
            return [self.make(member) if numbered else self.make() for member in range(self.members)]
        assert self.forward is not None
        members = {len(value) for value in self.has.values() if isinstance(value, Each)} or {self.members}
        rest = {name: value for name, value in self.has.items() if not isinstance(value, Each)}
        make = module(self.forward, **{"fc": linear, **rest})
        models = [make() for _ in range(*members)]
        for name, values in self.has.items():
            for model, value in zip(models, values if isinstance(values, Each) else (), strict=False):
                setattr(model, name, value)
        return models

    def check(self) -> None:
        """Assert that an array gives what its members give alone, in the expected way, or is refused."""
        for training in self.training:
            models = [model.train(training) for model in self.models()]
            if self.refused:
                self._check_refused(models)
                continue
            with self._warnings(), exports() as names:
                fused = assert_alone(models, *self.calls(), grads=self.grads and training)
            self._check_report(fused, training)
            assert not self.exports or len(names) <= MAX_CAPTURES

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        with pytest.warns(UserWarning, match=self.warns) if self.warns else warnings.catch_warnings():
            if self.ignores:
                warnings.filterwarnings("ignore", self.ignores)
            yield

    def _check_report(self, fused: hf.FusedModule, training: bool) -> None:
        parts, text = fused.report().parts, str(fused.report())
        for expected, part in ((self.loops, parts[:1]), (self.ends, parts[-1:])):
            assert expected is None or (", ".join(sorted(looped(part[0]))) if part else MEMBERS) == expected
        assert re.search(self.says, text)
        assert not self.silent or not re.search(self.silent, text)
        if training and self.loops is not None and "forward" not in self.loops and self.loops != MEMBERS:
            assert re.search("self-check passed|draws random numbers that the program draws elsewhere", parts[0].check)
        assert self.captures is None or sum(map(len, fused._compiler.families.values())) <= self.captures

    def _check_refused(self, models: list[nn.Module]) -> None:
        """Assert that there is an error, and that neither the arguments nor the models' tensors have changed."""
        calls = [made if isinstance(made, Call) else call(made) for made in self.calls()]
        before = [leaf.detach().clone() for leaf in _tensors(calls, models)]
        with pytest.raises(hf.FusionError, match=self.refused):
            _run(models, calls)
        assert_close(_tensors(calls, models), before, rtol=0, atol=0, equal_nan=True)


def _run(models: list[nn.Module], calls: Sequence[Call]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = hf.fuse(models)
        for made in calls:
            fused(*made.args, **made.kwargs)


def _tensors(calls: Sequence[Call], models: Sequence[nn.Module]) -> list[Tensor]:
    leaves = tree_leaves([made.args for made in calls]) + tree_leaves([model.state_dict() for model in models])
    found = [getattr(leaf, "tensor", leaf) for leaf in leaves]
    return [leaf for leaf in found if isinstance(leaf, Tensor) and not is_lazy(leaf)]


class Table(list[Row]):
    """Rows that share some fields.

    ``table(name, forward, **fields)`` adds a row; ``@table(**fields)`` adds one that is called as its function is, and
    keyword arguments that are no fields of a row are attributes of the model.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def __call__(self, name: str = "", forward: Callable[..., Any] | None = None, **given: Any) -> Any:
        fields = {key: given.pop(key) for key in list(given) if key in Row.__dataclass_fields__}
        fields = {**self.fields, **fields, "has": {**self.fields.get("has", {}), **given}}
        if forward is not None or "make" in fields:
            self.append(Row(name=name, forward=forward, **fields))
            return None

        def add(forward: Callable[..., Any]) -> Callable[..., Any]:
            self.append(Row(name=name or forward.__name__.replace("_", " ").strip(), forward=forward, **fields))
            return forward

        return add
