"""Write graphs as JSON, and read them: functions are written as names.

A text contains no code. Functions are looked up among torch's operators and in the modules named in `_SOURCES`; a
graph that calls others is refused when it is written.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket

from hfusion.core.layout import Layout
from hfusion.ops.rule import MemberScalars, Memberwise
from hfusion.passes.regions import Region

# The packages whose functions a graph may call.
_SOURCES = ("hfusion", "torch", "math", "_operator")
_PLAIN = (bool, int, float, str, type(None))


class Unwritable(Exception):
    """A graph holds a value that cannot be written as text; the message names it."""


def write_graph(graph: fx.Graph, root: nn.Module | None = None) -> list[Any]:
    """Return ``graph`` as JSON values, a list for each node. ``root`` holds the regions that the graph calls, if any.

    Of a node's ``meta``, only the scalars of members and the members that compute the node are written.
    """
    indices = {node: index for index, node in enumerate(graph.nodes)}
    return [_write_node(node, indices, root) for node in graph.nodes]


def read_graph(rows: Sequence[Any]) -> fx.GraphModule:
    """Read the output of `write_graph`. Raises LookupError, ValueError, TypeError or AttributeError for other input."""
    root, graph = nn.Module(), fx.Graph()
    nodes: list[fx.Node] = []
    for op, name, target, args, kwargs, meta in rows:
        called: Any = target
        if op == "call_function":
            called = find_function(target)
        elif op == "call_module":
            called = f"region_{len(list(root.children()))}"
            listed, members, body = target
            root.add_module(called, Region(read_graph(body), tuple(map(bool, listed)), int(members)))
        node = graph.create_node(op, called, _read(args, nodes), _read(kwargs, nodes), name)
        node.meta.update({key: _read(value, nodes) for key, value in meta.items()})
        nodes.append(node)
    graph.lint()
    return fx.GraphModule(root, graph)


def _write_node(node: fx.Node, indices: dict[fx.Node, int], root: nn.Module | None) -> list[Any]:
    target: Any = node.target
    if node.op == "call_function":
        target = function_name(target)
    elif node.op == "call_module" and root is not None:
        region = root.get_submodule(target)
        if not isinstance(region, Region):
            raise Unwritable(type(region).__name__)
        target = [list(region.listed), region.members, write_graph(region.body.graph)]
    elif node.op not in ("placeholder", "output"):
        raise Unwritable(f"{node.op} {target}")
    meta = {key: write_value(node.meta[key], indices) for key in ("arguments", "members", "rows") if key in node.meta}
    return [node.op, node.name, target, write_value(node.args, indices), write_value(dict(node.kwargs), indices), meta]


def write_value(value: Any, indices: dict[fx.Node, int]) -> Any:
    """Return an argument of a call as a JSON value. Raises Unwritable."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [write_value(item, indices) for item in value]
    for kind, (value_type, write, _) in _KINDS.items():
        if isinstance(value, value_type):
            return {kind: write(value, indices)}
    if callable(value):
        return {"function": function_name(value)}
    raise Unwritable(type(value).__name__)


def _write_all(items: Iterable[Any], indices: dict[fx.Node, int]) -> list[Any]:
    return [write_value(item, indices) for item in items]


def _read(value: Any, nodes: Sequence[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return find_function(content) if kind == "function" else _KINDS[kind][2](content, nodes)


def _read_all(items: Any, nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
    return tuple(_read(item, nodes) for item in items)


def _named(text: str, expected_type: type) -> Any:
    value = getattr(torch, text)
    if not isinstance(value, expected_type):
        raise ValueError(f"torch.{text} is no {expected_type.__name__}")
    return value


def function_name(fn: Any) -> str:
    """Return the import path of ``fn``, such as ``torch:ops.aten.add.Tensor``. Raises Unwritable if it has none."""
    if isinstance(fn, Memberwise):
        return f"each {function_name(fn.member)}"
    if isinstance(fn, OpOverload):
        return f"torch:ops.{fn.namespace}.{fn._opname}.{fn._overloadname}"
    if isinstance(fn, OpOverloadPacket):
        return f"torch:ops.{fn._qualified_op_name.replace('::', '.')}"
    name = getattr(fn, "__qualname__", "")
    for file, path in ((getattr(fn, "__module__", None), name), ("torch", name.rpartition(".")[2])):
        try:
            if file is not None and _find(file, path) is fn:
                return f"{file}:{path}"
        except (LookupError, ValueError, AttributeError, ImportError):
            continue
    raise Unwritable(f"the function {name or type(fn).__name__}")


@functools.lru_cache(maxsize=4096)
def find_function(name: str) -> Any:
    if name.startswith("each "):
        return memberwise(find_function(name.removeprefix("each ")))
    file, _, path = name.partition(":")
    return _find(file, path)


@functools.lru_cache(maxsize=256)
def memberwise(fn: Callable[..., Any]) -> Memberwise:
    return Memberwise(fn)


def _find(file: str, path: str) -> Any:
    if file.partition(".")[0] not in _SOURCES:
        raise ValueError(f"{file} is no place for a function of a graph")
    target: Any = importlib.import_module(file)
    for part in path.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"{file}:{path} is no function")
    return target


def _row(value_type: type) -> tuple[type, Callable[..., Any], Callable[..., Any]]:
    """Return the row of `_KINDS` for values of torch that are written as their names, such as contiguous_format."""
    return value_type, lambda value, _: str(value).removeprefix("torch."), lambda text, _: _named(text, value_type)


# By the kind of a value in the text: its type, and how it is written (with the index of each node) and read (with the
# nodes so far).
_KINDS: dict[str, tuple[type, Callable[..., Any], Callable[..., Any]]] = {
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
    "slice": (
        slice,
        lambda part, indices: _write_all((part.start, part.stop, part.step), indices),
        lambda parts, nodes: slice(*_read_all(parts, nodes)),
    ),
    "complex": (complex, lambda number, _: [number.real, number.imag], lambda parts, _: complex(*parts)),
    "device": (torch.device, lambda device, _: str(device), lambda text, _: torch.device(text)),
    "array layout": (Layout, lambda layout, _: layout.value, lambda text, _: Layout(text)),
    "dtype": _row(torch.dtype),
    "layout": _row(torch.layout),
    "memory_format": _row(torch.memory_format),
}
