"""Keep sizes that vary dynamic while forward is traced, and record the code that may depend on them.

To infer the shapes of a recurrent layer, torch's tracers write out every step. Inside `OpenLengths` a layer is one
call of an operator of hfusion, whose shapes follow from its arguments; `original` returns the operator of torch. Some
other functions do not accept symbolic sizes, and are replaced by functions that do.

`size_uses` notes where Python code computes with sizes that vary. A trace of a member at one size shows every number
that reaches an operator, but not one that is compared with a size, or that a size is divided by: at another size, other
operators may follow. Members that differ in such numbers are captured separately.
"""

from __future__ import annotations

import dis
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from hfusion.core.errors import FusionError
from hfusion.core.guards import open_dims
from hfusion.torch_private.operator_tables import decomposed_linspace
from hfusion.torch_private.replaced_functions import number_operators_replaced

aten = torch.ops.aten

_OPTIONS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


def _output(x: Tensor, state: Tensor, bidirectional: bool) -> Tensor:
    """Return an empty tensor for the hidden states of all steps, of both directions if there are two."""
    return x.new_empty(*x.shape[:2], state.shape[-1] * (2 if bidirectional else 1))


def _lstm(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    h, c = hx
    return _output(x, h, options[4]), torch.empty_like(h), torch.empty_like(c)


def _simple(x: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    return _output(x, hx, options[4]), torch.empty_like(hx)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise FusionError("forward takes gradients through a recurrent layer over a varying number of steps")


_library = torch.library.Library("hfusion_recurrent", "DEF")
_TRACED: dict[Any, OpOverload] = {}
_ORIGINAL: dict[OpOverload, OpOverload] = {}
for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _hx, _results = ("Tensor[] hx", "Tensor, Tensor, Tensor") if _name == "lstm" else ("Tensor hx", "Tensor, Tensor")
    _library.define(f"{_name}(Tensor input, {_hx}, {_OPTIONS}) -> ({_results})")
    _target = getattr(torch.ops.hfusion_recurrent, _name).default
    _TRACED[getattr(torch, _name)], _ORIGINAL[_target] = _target, getattr(aten, _name).input
    _fake: Callable[..., Any] = _lstm if _name == "lstm" else _simple
    torch.library.register_fake(_target.name(), _fake, lib=_library)
    torch.library.register_autograd(_target.name(), _refuse, lib=_library)


def _layer(func: Any, x: Tensor, *rest: Any) -> Any:
    # For packed sequences, the fourth argument is the list of weights instead of a bool.
    symbolic = isinstance(rest[2], bool) and not isinstance(x.shape[1 if rest[7] else 0], int)
    return _TRACED[func](x, *rest) if symbolic else func(x, *rest)


def _max_pool1d(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    options = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(input.shape[-1], int) or options.get("return_indices"):
        return func(input, *args, **kwargs)
    kernel, stride, padding, dilation = (_scalar_option(options.get(name)) for name in names[:4])
    sizes = (1, kernel), (1, stride or kernel), (0, padding or 0), (1, dilation or 1)
    return torch.max_pool2d(input.unsqueeze(-2), *sizes, options.get("ceil_mode", False)).squeeze(-2)


def _scalar_option(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return value[0] if value else None
    return value


def _linspace(func: Any, start: Any, end: Any, steps: Any, **kwargs: Any) -> Any:
    plain = not isinstance(steps, torch.SymInt) or isinstance(start, Tensor) or isinstance(end, Tensor)
    return (func if plain else decomposed_linspace)(start, end, steps, **kwargs)


_WAYS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_TRACED, _layer),
    torch.max_pool1d: _max_pool1d,
    F.max_pool1d: _max_pool1d,
    torch.linspace: _linspace,
}


class OpenLengths(TorchFunctionMode):
    """Keeps varying sizes of recurrent layers and some other functions dynamic in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        substitute = _WAYS.get(func)
        return func(*args, **(kwargs or {})) if substitute is None else substitute(func, *args, **(kwargs or {}))


def original(target: Any) -> Any:
    """Return torch's operator for an operator of ``hfusion_recurrent``, and any other target unchanged."""
    return _ORIGINAL.get(target, target)


def recurrent(graph: fx.Graph) -> bool:
    """Return whether a graph has a recurrent layer over a dynamic number of steps."""
    layers = [node for node in graph.nodes if node.target in _ORIGINAL.values()]
    return any((1 if node.args[8] else 0) in open_dims(node.args[0].meta.get("val")) for node in layers)


class SizeUse(NamedTuple):
    """A ``number`` that code combined with a size.

    Attributes:
        attribute: the attribute that the number was read from; empty if that is unknown.
        in_torch: whether the operation is in the Python code of torch.
    """

    number: int | float
    attribute: str
    in_torch: bool


@contextmanager
def size_uses() -> Iterator[list[SizeUse]]:
    """Context manager: record the numbers that code of this thread combines with sizes that vary.

    A literal in the code, right of the operator, is not specific to a member and is left out.
    """
    uses: list[SizeUse] = []
    thread_id = threading.get_ident()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(size: Any, *others: Any) -> Any:
            if others and threading.get_ident() == thread_id:
                _note(uses, others[0], sys._getframe(1))
            return method(size, *others)

        return noted

    with number_operators_replaced(noting):
        yield uses


# Modules of torch with stack frames between an operator in code and the method of a symbol.
_PLUMBING = ("torch", "torch.fx.experimental.sym_node")


def _note(uses: list[SizeUse], other: Any, frame: types.FrameType | None) -> None:
    if not isinstance(other, int | float) or isinstance(other, Tensor):
        return
    while frame is not None and frame.f_globals.get("__name__") in _PLUMBING:
        frame = frame.f_back
    if frame is None:
        return
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in ("sympy", "hfusion") or _computes_shapes(module):
        return
    operand = _right_operand(frame.f_code, frame.f_lasti)
    if operand is None or operand.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        attribute = str(operand.argval) if operand is not None and operand.opname == "LOAD_ATTR" else ""
        uses.append(SizeUse(other, attribute, module.partition(".")[0] == "torch"))


def _computes_shapes(module: str) -> bool:
    """Return whether a module of torch holds shape rules of operators, which take the numbers of their calls."""
    return module.startswith("torch.") and not module.startswith(("torch.nn.", "torch.functional"))


def _right_operand(code: types.CodeType, offset: int) -> dis.Instruction | None:
    """Return the instruction that loads the right operand of the operator at ``offset``; None if it is not known."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    for operand, step in pairwise(steps):
        if step.offset == offset and step.opname.startswith(("BINARY_OP", "COMPARE_OP")):
            return operand
    return None
