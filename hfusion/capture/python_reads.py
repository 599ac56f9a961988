"""What forward's code reads out of tensors while it is traced: values, with which it must not compute, and sizes.

In a trace the number of a `Tensor.item` is a symbol. Conditions on symbols that torch can decide without a value,
such as ``v != v`` and ``v * 0 == 0``, leave no trace in the graph, though a NaN decides them otherwise; and a symbol's
text is its name. So code that reads a number that no graph can hold is refused there, and runs as members' own code.
A condition that only decides whether to raise (``assert (x > 0).all()``) becomes a call of `EXPECT` in the graph.

Such conditions are recognised in the source of the code. One that is not recognised costs a loop over members, and one
recognised in error a second run if it fails: results are right either way.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice, pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from hfusion.core.errors import FusionError
from hfusion.core.guards import open_dims
from hfusion.core.tree import leaves
from hfusion.passes.side_effects import EXPECT
from hfusion.torch_private.dispatch_modes import FakeTensor
from hfusion.torch_private.export_state import MODULES_BELOW_CODE, TRACERS
from hfusion.torch_private.operator_tables import decomposed_linspace
from hfusion.torch_private.replaced_functions import number_operators_replaced

# Reads of values that give no symbol, and the Python functions of torch that read a value and format it.
_TEXTS = frozenset({Tensor.__repr__, Tensor.__format__})
_TRUTHS = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, torch._assert})
_NUMBERS = frozenset({Tensor.item, Tensor.tolist})
STRIDE_QUESTIONS = frozenset({"stride", "is_contiguous", "dim_order"})
"""The names of methods of tensors that return strides or depend on them."""
_STRIDES = frozenset(getattr(Tensor, name) for name in STRIDE_QUESTIONS)
_MEMORY = frozenset({Tensor.storage_offset, Tensor.untyped_storage, Tensor.storage, Tensor.storage_type})
_REFUSED = _TEXTS | _MEMORY
_MAY_COPY = frozenset({Tensor.contiguous, Tensor.to, Tensor.reshape, Tensor.flatten, Tensor.ravel, torch.ravel})


def _refusal(frame: FrameType, read: str) -> FusionError:
    remedy = "compute with the tensor, such as by torch.where"
    if _module(frame).startswith("torch.distributions"):
        remedy = "it is a check of torch.distributions, which validate_args=False leaves out"
    return FusionError(
        f"{_line(frame)} reads {read} of a tensor in Python, which differs between members and calls; {remedy}"
    )


def _seen_inside(function: Any) -> Any:
    """Return a copy of ``function`` that is not dispatched to modes as a whole, so that they see its reads."""
    asks = [name for name in function.__code__.co_names if name.startswith("has_torch_function")]
    space = {**function.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Functions of torch that check values in Python.
_CHECKING = {function: _seen_inside(function) for function in (F.gaussian_nll_loss,)}


class PythonReads(TorchFunctionMode):
    """While a forward is traced, refuses numbers and texts of tensors' values where Python uses them.

    ``tensor.data`` is read as ``tensor.detach()``, since an export loses the inputs of the former. An assignment to it
    is a write into the tensor, which an export does not see.

    Attributes:
        asked_strides: whether forward has read the strides of a tensor.
        was_contiguous: whether ``contiguous()`` or a similar call returned its operand, which leaves no node.
        trains_outside: whether forward has computed with a trainable parameter that the model does not register. An
            export has its values as a constant, without a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked_strides = False
        self.was_contiguous = False
        self.trains_outside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].detach().copy_(args[1].detach())
            return None
        if func in _CHECKING:
            with self:
                return _CHECKING[func](*args, **(kwargs or {}))
        if func in _STRIDES and not self.asked_strides:
            self.asked_strides = _asking_frame() is not None
        if func in _REFUSED or func in _TRUTHS or func in _NUMBERS:
            frame = _asking_frame()
            if frame is not None:
                return _read(frame, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func in _MAY_COPY and result is args[0]:
            self.was_contiguous = True
        # An export has fake tensors for parameters that are registered.
        if not self.trains_outside and any(
            isinstance(x, nn.Parameter) and x.requires_grad and not isinstance(x, FakeTensor)
            for x in leaves((args, kwargs), Tensor)
        ):
            self.trains_outside = any(tensor.requires_grad for tensor in leaves(result, Tensor))
        return result


def _read(frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a read of a tensor by the code of ``frame``. Raises FusionError if no graph can hold it."""
    tensor = args[0]
    if func in _MEMORY:
        raise FusionError(f"{_line(frame)} reads the memory of a tensor ({func.__name__}), which a graph does not have")
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
        return func(*args, **kwargs)
    if func in _TEXTS:
        raise _refusal(frame, "the text")
    if func in _TRUTHS or (func is Tensor.item and tensor.dtype is torch.bool):
        truth = True if func is torch._assert else truth_without_raise(frame)
        if truth is None or tensor.numel() != 1:
            raise _refusal(frame, "the truth")
        condition = tensor.detach()
        EXPECT(condition if condition.dtype is torch.bool else condition != 0, truth, _line(frame))
        return None if func is torch._assert else truth
    raise _refusal(frame, "a number")


# Properties that differ between a member of an array and a member alone, with remedies: of tensors in the memory of
# inputs of forward and registered tensors, of these tensors themselves, and of inputs that need a gradient.
MEMORY_QUESTIONS = {
    "_version": "keep a count in a buffer",
    "_is_view": "clone what must be no view",
    "_base": "clone what must be no view",
}
# The names of functions that take a storage offset, or return or replace the storage itself.
ADDRESSES = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})
ADDRESSES |= {"storage", "untyped_storage", "storage_offset", "set_"}
_OF_OWN = {
    "grad": "give forward what it needs of gradients as an argument, or in a buffer",
    "is_inference": "ask torch.is_inference_mode_enabled()",
}
_OF_INPUTS = dict.fromkeys(("is_leaf", "grad_fn", "retains_grad"), "ask requires_grad")
GRADIENT_QUESTIONS = frozenset(
    {"requires_grad", "is_leaf", "grad_fn", "is_grad_enabled", "is_inference_mode_enabled", "is_inference"}
)
"""The names by which code reads values that depend on whether gradients are on."""
EXACT_CLASS = frozenset({"type", "__class__"})
"""The names by which code reads the exact class of an object."""
CLASSES = EXACT_CLASS | {"Parameter"}
"""The names by which code tells parameters from other tensors."""
UNANSWERABLE = frozenset({*MEMORY_QUESTIONS, *_OF_OWN, *_OF_INPUTS})
"""The names of attributes and methods of tensors of which `RefusedReads` refuses some reads."""


class RefusedReads(TorchFunctionMode):
    """While a forward runs, raises FusionError if it reads properties of tensors that differ in an array.

    Args:
        inputs, registered: the inputs of forward, and its registered tensors.
        restrided: whether strides of some of these, and so of later values, differ from the original strides.
    """

    def __init__(self, inputs: Collection[Tensor], registered: Collection[Tensor], restrided: bool) -> None:
        super().__init__()
        self._inputs, self._registered, self._restrided = inputs, registered, restrided
        self._memory = set(map(_storage, [*inputs, *registered]))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        getter = func.__name__ == "__get__"
        name = func.__self__.__name__ if getter else func.__name__
        if (
            (name in UNANSWERABLE or name in STRIDE_QUESTIONS)
            and (remedy := self._remedy(name, args[0]))
            and (frame := _asking_frame()) is not None
        ):
            raise FusionError(
                f"{_line(frame)} reads {name} of a tensor of shape {tuple(args[0].shape)}, which a member of an array, "
                f"whose tensors are rows of stacks, has otherwise than alone; {remedy}"
            )
        return func(*args, **(kwargs or {}))

    def _remedy(self, name: str, tensor: Tensor) -> str | None:
        if name in STRIDE_QUESTIONS:
            remedy = "convert the models by .to(memory_format=torch.contiguous_format) before fusing"
            return remedy if self._restrided else None
        if name in MEMORY_QUESTIONS:
            return MEMORY_QUESTIONS[name] if _storage(tensor) in self._memory else None
        registered = any(tensor is held for held in self._registered)
        if not registered and not any(tensor is held for held in self._inputs):
            return None
        trained = tensor.requires_grad or isinstance(tensor, nn.Parameter)
        if name in _OF_OWN:
            return None if name == "grad" and registered and not trained else _OF_OWN[name]
        return _OF_INPUTS[name] if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else None


def _storage(tensor: Tensor) -> Any:
    """Return what tensors in the same memory have in common; the tensor itself where it has no storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _asking_frame() -> FrameType | None:
    """Return the frame that called the intercepted function; None if a tracer of torch, or hfusion, called it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_passed(frame):
        frame = frame.f_back
    return None if frame is None or _module(frame).startswith((*TRACERS, "hfusion.")) else frame


def _is_passed(frame: FrameType) -> bool:
    """Return whether a frame is between a call of a function of torch and the mode that intercepts it."""
    return frame.f_code.co_name == "__torch_function__" or _module(frame) in MODULES_BELOW_CODE


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _line(frame: FrameType) -> str:
    """Return ``file.py:12`` for ``frame``, or for the code outside of torch that called it."""
    caller: FrameType | None = frame
    while caller is not None and (_is_passed(caller) or _module(caller).partition(".")[0] == "torch"):
        caller = caller.f_back
    if caller is None or _module(caller).startswith((*TRACERS, "hfusion.")):
        caller = frame
    return f"{caller.f_code.co_filename.rpartition('/')[2]}:{caller.f_lineno}"


def truth_without_raise(frame: FrameType) -> bool | None:
    """Return the truth value for which ``frame``, which is testing a value, does not raise.

    None unless the code only raises for the other truth value, or if the form of the test is not recognised.
    """
    if frame.f_code.co_name == "_check_tensor_all_with" and _module(frame) == "torch":
        return True
    # Of a jump, Python 3.11 knows the statement only: the instruction before it computes what is tested.
    index = frame.f_lasti // 2
    places = set(islice(frame.f_code.co_positions(), index - 1, index + 1))
    truths = (_truth_at(places, test, passing) for test, passing in _checks(frame.f_code))
    return next((truth for truth in truths if truth is not None), None)


@lru_cache(maxsize=256)
def _checks(code: CodeType) -> list[tuple[ast.expr, bool]]:
    """Return the tests in a function that raise for one outcome, each with the other outcome."""
    try:
        lines, first = inspect.getsourcelines(code)
        # An indented function is parsed as the body of a statement, which keeps its columns.
        tree = ast.parse("".join(["if True:\n" if lines[0][0].isspace() else "\n", *lines]))
    except (OSError, SyntaxError, IndexError):
        return []
    ast.increment_lineno(tree, first - 2)
    nodes = list(ast.walk(tree))
    handled = (part for node in nodes if isinstance(node, ast.Try) and node.handlers for part in node.body)
    caught = {inner for part in handled for inner in ast.walk(part)}
    checks = [(node.test, True) for node in nodes if isinstance(node, ast.Assert) and node not in caught]
    for node in nodes:
        if isinstance(node, ast.If) and node not in caught and _only_raises(node.body) != _only_raises(node.orelse):
            checks.append((node.test, _only_raises(node.orelse)))
    return checks


def _only_raises(body: list[ast.stmt]) -> bool:
    """Return whether statements end in an error, and cannot be left otherwise."""
    exits = (ast.Return, ast.Yield, ast.YieldFrom, ast.Break, ast.Continue)
    inner = (part for statement in body for part in ast.walk(statement))
    return bool(body) and isinstance(body[-1], ast.Raise) and not any(isinstance(part, exits) for part in inner)


def _truth_at(places: set[Any], test: ast.expr, passing: bool) -> bool | None:
    """Return the truth of the expression at one of ``places`` if ``test`` is ``passing``; None if that is open."""
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) in places:
        return passing
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth_at(places, test.operand, not passing)
    # All parts of an ``and`` that holds do, and none of an ``or`` that does not.
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is passing else ()
    truths = (_truth_at(places, part, passing) for part in parts)
    return next((truth for truth in truths if truth is not None), None)


# Keep sizes that vary dynamic while forward is traced, and record the code that may depend on them.

# To infer the shapes of a recurrent layer, torch's tracers write out every step. Inside `OpenLengths` a layer is one
# call of an operator of hfusion, whose shapes follow from its arguments; `original` returns the operator of torch. Some
# other functions do not accept symbolic sizes, and are replaced by functions that do.

# `size_uses` notes where Python code computes with sizes that vary. A trace of a member at one size shows every number
# that reaches an operator, but not one that is compared with a size, or that a size is divided by: at another size,
# other operators may follow. Members that differ in such numbers are captured separately.

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
    raise FusionError("forward takes gradients through a recurrent layer")


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
    return _TRACED[func](x, *rest) if isinstance(rest[2], bool) else func(x, *rest)


def _max_pool1d(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    options = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(input.shape[-1], int) or options.get("return_indices"):
        return func(input, *args, **kwargs)
    given = (options.get(name) for name in names[:4])
    kernel, stride, padding, dilation = (next(iter(o), None) if isinstance(o, list | tuple) else o for o in given)
    sizes = (1, kernel), (1, stride or kernel), (0, padding or 0), (1, dilation or 1)
    return torch.max_pool2d(input.unsqueeze(-2), *sizes, options.get("ceil_mode", False)).squeeze(-2)


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
    """Makes recurrent layers one operator each, and keeps varying sizes of some functions dynamic, in this thread."""

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
    package = module.partition(".")[0]
    # Other modules of torch hold shape rules of operators, which take the numbers of their calls.
    in_layers = module.startswith(("torch.nn.", "torch.functional"))
    if package in ("sympy", "hfusion") or (module.startswith("torch.") and not in_layers):
        return
    operand = _right_operand(frame.f_code, frame.f_lasti)
    if operand is None or operand.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        attribute = str(operand.argval) if operand is not None and operand.opname == "LOAD_ATTR" else ""
        uses.append(SizeUse(other, attribute, package == "torch"))


def _right_operand(code: types.CodeType, offset: int) -> dis.Instruction | None:
    """Return the instruction that loads the right operand of the operator at ``offset``; None if it is not known."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    for operand, step in pairwise(steps):
        if step.offset == offset and step.opname.startswith(("BINARY_OP", "COMPARE_OP")):
            return operand
    return None
