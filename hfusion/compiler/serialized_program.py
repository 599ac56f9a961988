"""Write the program of an array as JSON, and read it, to pass it to another process or to store it.

A text contains no code: functions are written as names. They are looked up among torch's operators and in the modules
named in `_SOURCES`; a graph that calls others is refused when it is written.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hfusion.compiler.compiled_program import RULES, Compiled, look_at
from hfusion.core.guards import AllHold, Assumptions, fixed
from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Program, Slot
from hfusion.ops.rule import MemberScalars
from hfusion.passes.batch import batch
from hfusion.passes.layouts import Choice
from hfusion.passes.views import infer
from hfusion.torch_private.dispatch_modes import (
    FakeTensorMode,
    disable_current_modes,
    enable_python_dispatcher,
    with_dynamic_dims,
)
from hfusion.torch_private.operator_tables import correct_lstm_decomposition
from hfusion.torch_private.replaced_functions import silence_tracers

# The packages whose functions a graph may call.
_SOURCES = ("hfusion", "torch", "math", "_operator")
_PLAIN = (bool, int, float, str, type(None))


class Unwritable(Exception):
    """A graph holds a value that cannot be written as text; the message names it."""


def write_compiled(compiled: Compiled) -> dict[str, Any]:
    """Return the program as JSON's values, without the values of its constants. Raises Unwritable."""
    if compiled.opaque:
        raise Unwritable(f"{compiled.opaque[0].island}, which runs as the members' own code")
    program, graph = compiled.program, compiled.graph
    names: dict[str, str] = {}
    chosen = {n.meta["origin"]: n.meta["choice"].index for n in program.module.graph.nodes if "choice" in n.meta}
    return {
        "name": program.name,
        "members": program.members,
        "training": program.training,
        "graph": write_graph(graph),
        "inputs": [write_example(node.meta.get("val"), names) for node in graph.find_nodes(op="placeholder")],
        "choices": [chosen.get(node) for node in graph.nodes],
        "slots": [[slot.kind.value, slot.name] for slot in program.slots],
        "layouts": [layout.value for layout in program.layouts],
        "outputs": program.out_spec.num_leaves,
        "guards": [[a.sizes, a.code] for a in assumptions(compiled.guards)],
        "modes": dict(compiled.modes),
    }


def assumptions(guards: Any) -> list[Assumptions]:
    """Return the assumptions of a program about sizes. Raises Unwritable."""
    try:
        return [part.assumptions() for part in guards.parts]
    except (AttributeError, ValueError, SyntaxError) as error:
        raise Unwritable(f"an assumption of sizes ({error})") from error


def read_compiled(written: Mapping[str, Any], constants: Mapping[str, Tensor]) -> Compiled:
    """Read a program from the output of `write_compiled`, with these ``constants``; its outputs are a flat tuple.

    Raises LookupError, ValueError, TypeError or AttributeError for other input, and torch's own error if an operator is
    missing.
    """
    graph = read_graph(written["graph"])
    _propagate(graph, written["inputs"])
    layouts = tuple(map(Layout, written["layouts"]))
    slots = tuple(Slot(Kind(kind), name) for kind, name in written["slots"])
    pairs = zip(graph.nodes, written["choices"], strict=True)
    choices = {node: Choice(index, 0.0) for node, index in pairs if index is not None}
    module = batch(graph, layouts, written["members"], RULES, choices)
    spec = pytree.tree_structure((0,) * written["outputs"])
    program = Program(written["name"], written["members"], written["training"], module, module, slots, layouts, spec)
    look_at(program)
    guards = AllHold(tuple(Assumptions.read(*entry) for entry in written["guards"]))
    return Compiled(program, graph, dict(constants), (), guards, written["modes"])


def write_example(value: Any, names: dict[str, str]) -> Any:
    """Return an example without its values. Dynamic sizes are pairs (name, hint); new names are added to ``names``."""
    if not isinstance(value, Tensor):
        return write_value(value, {})
    varies = any(fixed(size) is None for size in value.shape)
    if value.layout is not torch.strided or (varies and not value.is_contiguous()):
        raise Unwritable("an input that is not strided as contiguous tensors are, of sizes that vary")
    return {
        "shape": [_write_size(size, names) for size in value.shape],
        "stride": None if varies else list(map(fixed, value.stride())),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "grad": value.requires_grad,
    }


def _write_size(size: Any, names: dict[str, str]) -> Any:
    number = fixed(size)
    if number is not None:
        return number
    name = str(size.node.expr)
    if not name.isidentifier():
        raise Unwritable(f"the size {name}")
    return [names.setdefault(name, f"n{len(names)}"), int(size.node.hint)]


def read_example(written: Any, sizes: dict[str, Any], mode: Any = None) -> Any:
    """Read the output of `write_example`. New dynamic sizes become symbols of the fake ``mode``, kept in ``sizes``."""
    if not isinstance(written, Mapping):
        return written

    def read_size(size: Any) -> Any:
        if isinstance(size, int):
            return size
        name, hint = size
        if name not in sizes:
            # Outside of the mode, so that it is a real tensor whose size can be made dynamic.
            with disable_current_modes():
                vector = torch.empty(int(hint), device="cpu")
            sizes[name] = with_dynamic_dims(mode, vector, [True], name).shape[0]
        return sizes[name]

    shape = list(map(read_size, written["shape"]))
    options: dict[str, Any] = {
        "dtype": getattr(torch, written["dtype"]),
        "device": torch.device(written["device"]),
        "requires_grad": written["grad"],
    }
    if written["stride"] is None:
        return torch.empty(shape, **options)
    return torch.empty_strided(shape, written["stride"], **options)


def _propagate(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Set the example value ``meta["val"]`` of every node."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    correct_lstm_decomposition()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with silence_tracers():
        sizes: dict[str, Any] = {}
        with mode:
            examples = [read_example(value, sizes, mode) for value in inputs]
        with mode, enable_python_dispatcher(), torch.no_grad():
            given = iter(examples)
            for node in graph.nodes:
                if node.op != "output":
                    is_input = node.op == "placeholder"
                    node.meta["val"] = next(given) if is_input else infer(node.target, node.args, node.kwargs)


# Graphs.


def write_graph(graph: fx.Graph) -> list[Any]:
    """Return ``graph`` as JSON values, a list for each node. Of a node's ``meta``, members' scalars are written."""
    indices = {node: index for index, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        target = function_name(node.target) if node.op == "call_function" else node.target
        meta = {key: write_value(node.meta[key], indices) for key in ("arguments", "members") if key in node.meta}
        args, kwargs = write_value(node.args, indices), write_value(dict(node.kwargs), indices)
        rows.append([node.op, node.name, target, args, kwargs, meta])
    return rows


def read_graph(rows: Sequence[Any]) -> fx.Graph:
    """Read the output of `write_graph`. Raises LookupError, ValueError, TypeError or AttributeError for other input."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, name, target, args, kwargs, meta in rows:
        called = find_function(target) if op == "call_function" else target
        node = graph.create_node(op, called, _read(args, nodes), _read(kwargs, nodes), name)
        node.meta.update({key: _read(value, nodes) for key, value in meta.items()})
        nodes.append(node)
    graph.lint()
    return graph


def write_value(value: Any, indices: dict[fx.Node, int]) -> Any:
    """Return an argument of a call as a JSON value. Raises Unwritable."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [write_value(item, indices) for item in value]
    for kind, (value_type, write, _) in _KINDS.items():
        if isinstance(value, value_type):
            return {kind: write(value, indices)}
    raise Unwritable(type(value).__name__)


def _write_all(items: Iterable[Any], indices: dict[fx.Node, int]) -> list[Any]:
    return [write_value(item, indices) for item in items]


def _read(value: Any, nodes: Sequence[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _KINDS[kind][2](content, nodes)


def _read_all(items: Any, nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
    return tuple(_read(item, nodes) for item in items)


def _named(text: str) -> Any:
    value = getattr(torch, text)
    if not isinstance(value, _NAMED):
        raise ValueError(f"torch.{text} is no value of a graph")
    return value


def function_name(fn: Any) -> str:
    """Return the import path of ``fn``, such as ``torch:ops.aten.add.Tensor``. Raises Unwritable if it has none."""
    if isinstance(fn, OpOverload):
        return f"torch:ops.{fn.namespace}.{fn._opname}.{fn._overloadname}"
    name = getattr(fn, "__qualname__", "")
    for path in (f"{getattr(fn, '__module__', None)}:{name}", f"torch:{name.rpartition('.')[2]}"):
        with suppress(LookupError, ValueError, AttributeError, ImportError):
            if find_function(path) is fn:
                return path
    raise Unwritable(f"the function {name or type(fn).__name__}")


@functools.lru_cache(maxsize=4096)
def find_function(name: str) -> Any:
    file, _, path = name.partition(":")
    if file.partition(".")[0] not in _SOURCES:
        raise ValueError(f"{file} is no place for a function of a graph")
    target: Any = importlib.import_module(file)
    for part in path.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"{name} is no function")
    return target


# Types of values of torch that are written as their names, such as contiguous_format.
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
# By the kind of a value in the text: its type, and how it is written (with the index of each node) and read (with the
# nodes so far).
_KINDS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "node": (fx.Node, lambda node, indices: indices[node], lambda index, nodes: nodes[operator.index(index)]),
    "members": (
        MemberScalars,
        lambda scalars, indices: _write_all(scalars.values, indices),
        lambda items, nodes: MemberScalars(_read_all(items, nodes)),
    ),
    "tuple": (tuple, _write_all, _read_all),
    "dict": (
        dict,
        lambda held, indices: [_write_all(pair, indices) for pair in held.items()],
        lambda pairs, nodes: dict(_read_all(pair, nodes) for pair in pairs),
    ),
    "complex": (complex, lambda number, _: [number.real, number.imag], lambda parts, _: complex(*parts)),
    "device": (torch.device, lambda device, _: str(device), lambda text, _: torch.device(text)),
    "torch": (_NAMED, lambda value, _: str(value).removeprefix("torch."), lambda text, _: _named(text)),
}
