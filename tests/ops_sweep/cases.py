"""Cases of the sweep: operators of PyTorch's database with sample arguments, as modules of tensors only.

See `torch.testing._internal.common_methods_invocations.op_db`, tried with torch 2.13.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# Tried in this order: the first dtype that an operator takes.
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)
MEMBERS = 3


# Their values are whatever memory held, which the self-check rightly finds to differ.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, eq=False)
class Form:
    """One way to call an operator of the database: as a function, or in place on a copy of its first argument."""

    info: OpInfo
    in_place: bool

    @property
    def name(self) -> str:
        name = f"{self.info.name}[{self.info.variant_test_name}]" if self.info.variant_test_name else self.info.name
        return f"{name} in place" if self.in_place else name

    @property
    def group(self) -> str:
        return "in place" if self.in_place else f"function, {str(self.dtype).removeprefix('torch.')}"

    @property
    def dtype(self) -> torch.dtype | None:
        """None where the operator takes none of `DTYPES` on a CPU."""
        return next((dtype for dtype in DTYPES if dtype in self.info.dtypes), None)

    @property
    def differentiable(self) -> bool:
        dtype = self.dtype
        return self.info.supports_autograd and dtype is not None and (dtype.is_floating_point or dtype.is_complex)

    def call(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.in_place:
            return self.info(value, *args, **kwargs)
        copy = value.clone()
        return self.info.inplace_variant(copy, *args, **kwargs), copy


@dataclass(frozen=True, eq=False)
class Case:
    """A form with one sample: ``rows[b]`` are the tensors of member b, ``process`` brings outputs to a unique form."""

    form: Form
    leaves: tuple[Any, ...]
    spec: Any
    rows: tuple[tuple[Tensor, ...], ...]
    process: Callable[[Any], Any]

    def forward(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        value, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs = self.form.call(value, *args, **kwargs)
        # A graph gives a torch.Size as the tuple that it is.
        return tuple(outputs) if isinstance(outputs, torch.Size) else outputs

    def unique(self, outputs: Any) -> Any:
        """Outputs that torch defines up to a sign or a phase, without that freedom."""
        return (self.process(outputs[0]), outputs[1]) if self.form.in_place else self.process(outputs)

    def modules(self, count: int) -> list[nn.Module]:
        """The call as members of an array; fuse refuses code that holds tensors with gradients, as the rows do."""
        call = replace(self, rows=()).forward

        class Operator(nn.Module):
            def forward(self, *tensors: Tensor) -> Any:
                return call(*tensors)

        return [Operator() for _ in range(count)]

    def __str__(self) -> str:
        arguments = [_told(leaf) for leaf in self.leaves]
        return f"{self.form.name}({', '.join(arguments)})"


def _told(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor) else repr(leaf)


def database() -> list[OpInfo]:
    """PyTorch's own, which takes a second to import and forbids setting flags of `torch.backends`; that is undone."""
    from torch.testing._internal.common_methods_invocations import op_db

    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return op_db


def forms(only: Sequence[str] = ()) -> Iterator[Form]:
    """Every form that computes something, or those of the operators named in ``only``."""
    for info in database():
        if info.name in UNINITIALISED or (only and info.name not in only):
            continue
        yield Form(info, in_place=False)
        if info.inplace_variant is not None and info.name != "copysign_":
            yield Form(info, in_place=True)


def cases(form: Form, most: int) -> list[Case]:
    """At most ``most`` samples, spread over those that the database has."""
    if form.dtype is None:
        return []
    draws = [_draw(form, seed) for seed in range(MEMBERS)]
    usable = [k for k, sample in enumerate(draws[0]) if _usable(form, sample)]
    places = sorted({round(k * (len(usable) - 1) / max(most - 1, 1)) for k in range(most)}) if usable else []
    return [_case(form, [draw[usable[k]] if usable[k] < len(draw) else draw[0] for draw in draws]) for k in places]


def _draw(form: Form, seed: int) -> list[SampleInput]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return list(form.info.sample_inputs("cpu", form.dtype, requires_grad=form.differentiable))


def _usable(form: Form, sample: SampleInput) -> bool:
    tensors = _tensors(sample)
    strided = all(t.layout is torch.strided and not t.is_nested for t in tensors)
    return strided and not (form.in_place and (sample.broadcasts_input or not isinstance(sample.input, Tensor)))


def _flat(sample: SampleInput) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((sample.input, sample.args, sample.kwargs))


def _tensors(sample: SampleInput) -> list[Tensor]:
    return [leaf for leaf in _flat(sample)[0] if isinstance(leaf, Tensor)]


def _case(form: Form, draws: Sequence[SampleInput]) -> Case:
    leaves, spec = _flat(draws[0])
    first = _tensors(draws[0])
    rows = [tuple(first)]
    for member, draw in enumerate(draws[1:], start=1):
        others = _tensors(draw)
        rows.append(tuple(_other(member, k, x, others) for k, x in enumerate(first)))
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Case(form, held, spec, tuple(rows), draws[0].output_process_fn_grad)


def _other(member: int, index: int, x: Tensor, drawn: Sequence[Tensor]) -> Tensor:
    """Another legal value for ``x``: of another draw where shapes agree, else scaled."""
    if index < len(drawn) and (drawn[index].shape, drawn[index].dtype) == (x.shape, x.dtype):
        return drawn[index]
    if x.is_floating_point() or x.is_complex():
        return (x.detach() * (1 - member / 8)).requires_grad_(x.requires_grad)
    return x
