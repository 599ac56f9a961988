"""The vocabulary of compiled arrays: what one capture of a member is, and the fused program made of it."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec

from hfusion.core.guards import open_dims
from hfusion.core.layout import COPYING, Layout
from hfusion.core.text import aligned


class Kind(enum.Enum):
    """The source of a graph's input."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"


@dataclass(frozen=True)
class Slot:
    """One placeholder of a graph: ``name`` is the key in the state dict, or the position among the flat inputs."""

    kind: Kind
    name: str


@dataclass(frozen=True, eq=False)
class Capture:
    """One member's forward as a graph of ATen operators without in-place writes.

    ``slots`` describe the placeholders in order; ``constants`` are tensors that belong to the graph.
    ``guards`` tells whether the graph is valid for inputs of other shapes, empty for what is no tensor; ``modes`` are
    the submodules whose train or eval mode forward changes, by path. ``calls`` are the operators that the code called,
    and ``meta["call"]`` of a node its index there; ``size_uses`` the numbers that met sizes that vary.
    ``needs_strides``: the graph is valid only for inputs whose dims have the same order in memory. ``opaque``: its
    calls that run in a loop over members (`hfusion.capture.fallback_runtime.OpaqueCall`).
    """

    graph: fx.Graph
    slots: tuple[Slot, ...]
    constants: dict[str, Tensor]
    out_spec: TreeSpec
    guards: Callable[[Sequence[Sequence[Any]]], bool]
    modes: Mapping[str, bool] = field(default_factory=dict)
    calls: tuple[Any, ...] = ()
    size_uses: tuple[Any, ...] = ()
    needs_strides: bool = False
    opaque: tuple[Any, ...] = ()


def writable(graph: fx.Graph, slots: Sequence[Slot]) -> frozenset[str]:
    """Return the names of the placeholders that a graph may write to."""
    return of_kind(graph, slots, Kind.BUFFER, Kind.PARAMETER)


def of_kind(graph: fx.Graph, slots: Sequence[Slot], *kinds: Kind) -> frozenset[str]:
    """The names of the placeholders that stand for tensors of some kinds."""
    pairs = zip(graph.find_nodes(op="placeholder"), slots, strict=True)
    return frozenset(node.name for node, slot in pairs if slot.kind in kinds)


def input_dims(graph: fx.Graph, slots: Sequence[Slot]) -> list[frozenset[int]]:
    """Return the dynamic dims of each input of a member's graph."""
    pairs = zip(graph.find_nodes(op="placeholder"), slots, strict=True)
    return [open_dims(node.meta.get("val")) for node, slot in pairs if slot.kind is Kind.INPUT]


@dataclass(frozen=True, eq=False)
class Program:
    """The forward of the whole array.

    ``run`` takes the tensors of ``slots`` in order and returns the flat outputs, each tensor stacked ``[B, ...]``.
    ``module`` has one call per operator, for people and checks; ``code``, the same with its loops gathered, runs.
    """

    name: str
    members: int
    training: bool
    module: fx.GraphModule
    code: fx.GraphModule
    slots: tuple[Slot, ...]
    layouts: tuple[Layout, ...]
    out_spec: TreeSpec

    @property
    def run(self) -> Callable[..., Any]:
        forward: Callable[..., Any] = self.code.forward
        return forward

    def __str__(self) -> str:
        mode = "train" if self.training else "eval"
        # Parameters and buffers are under their keys, all else is under the names of the member's nodes.
        names = {node: node.name for node in self.module.graph.nodes}
        slots = zip(self.module.graph.find_nodes(op="placeholder"), self.slots, strict=True)
        names |= {node: slot.name for node, slot in slots if slot.kind is not Kind.INPUT}
        title = f"program {self.name}  B={self.members}  {mode}"
        text = _described(title, self.module.graph, names, lambda node: _row(node, names, self.members))
        return f"{text}\n  {self.copies} copies between layouts"

    @property
    def copies(self) -> int:
        """Number of layout conversions that copy."""
        nodes = self.module.graph.nodes
        return sum(bool(node.meta.get("transition")) and node.target in COPYING for node in nodes)

    @property
    def gives_member_values(self) -> bool:
        """Whether members return different values that are no tensors."""
        (results,) = next(iter(reversed(self.module.graph.nodes))).args
        return any(isinstance(item, fx.Node) and item.meta.get("layout") is Layout.LISTED for item in results)


@dataclass(frozen=True, eq=False)
class Part:
    """A run of a program's operators, as one shard computes them.

    ``on(device)`` is a function for tensors there. It takes those of ``keys`` (parameters, buffers, constants) and the
    values named in ``takes`` (inputs of the program, results of earlier parts), and returns those named in ``gives``;
    of the last part, the flat outputs of the program instead. A value is a tensor, a number, or a tree of them.
    ``writes``: buffers it changes.
    """

    on: Callable[[torch.device], Callable[..., tuple[Any, ...]]]
    keys: tuple[Slot, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    writes: frozenset[str]


def _row(node: fx.Node, names: dict[fx.Node, str], members: int) -> tuple[str, str, str, str, str]:
    layout = node.meta.get("layout")
    shape = describe_value(node.meta.get("example"), layout, members)
    where = layout.value if layout is not None else ""
    if node.op == "placeholder":
        return names[node], shape, where, "input", ""
    origin = node.meta.get("origin")
    operator = str(origin.target).removeprefix("aten.") if origin is not None else getattr(node.target, "__name__", "")
    arguments = _argument(list(node.all_input_nodes), names)[1:-1]
    line = source_line(origin) if origin is not None else ""
    text = str(node.meta.get("lowering", ""))
    return names[node], shape, where, f"{operator}({arguments})", f"{text}  # {line}" if line else text


def _described(title: str, graph: fx.Graph, names: dict[fx.Node, str], row: Callable[[fx.Node], Sequence[str]]) -> str:
    """Print a graph: a ``row`` of cells for each call, and the results."""
    rows = [row(node) for node in graph.nodes if node.op != "output"]
    lines = [title, *(f"  {line}" for line in (aligned(rows, left=len(rows[0])) if rows else ()))]
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    return "\n".join([*lines, f"  return {_argument(outputs, names)}"])


def describe_graph(title: str, module: fx.GraphModule | fx.Graph, members: int = 0) -> str:
    """Print a graph with values in ``meta["val"]``, a line per call: name, shape, call, line of the source.

    Graphs that it calls follow below it. ``members``: the number of members, if values have layouts.
    """
    graph = module.graph if isinstance(module, fx.GraphModule) else module
    names = {node: node.name for node in graph.nodes}
    lines = [_described(title, graph, names, lambda node: _call_row(node, names, members))]
    inner = module.named_modules() if isinstance(module, fx.GraphModule) else ()
    lines += [describe_graph(name, part, members) for name, part in inner if name and isinstance(part, fx.GraphModule)]
    return "\n".join(lines)


def _call_row(node: fx.Node, names: dict[fx.Node, str], members: int) -> tuple[str, str, str, str]:
    args, kwargs = node.meta.get("arguments", (node.args, node.kwargs))
    arguments = [_argument(item, names) for item in args]
    arguments += [f"{key}={_argument(item, names)}" for key, item in kwargs.items()]
    target = str(getattr(node.target, "__name__", node.target)).removeprefix("aten.")
    call = "input" if node.op == "placeholder" else f"{target}({', '.join(arguments)})"
    value, line = node.meta.get("val", node.meta.get("example")), source_line(node)
    return node.name, describe_value(value, node.meta.get("layout"), members), call, f"# {line}" if line else ""


def describe_value(example: Any, layout: Layout | None, members: int) -> str:
    """Print a value such as ``f32[N,3*16,32,32]``: N is a dynamic size, ``3*16`` are packed channels of members."""
    if isinstance(example, list | tuple):
        return "(" + ", ".join(describe_value(part, layout, members) for part in example) + ")"
    if not isinstance(example, Tensor):
        return "" if example is None else type(example).__name__.lower().removeprefix("sym")
    sizes = [str(size) if isinstance(size, int) else "N" for size in example.shape]
    if layout is Layout.PACKED:
        sizes[1] = f"{members}*{sizes[1]}"
    if layout is Layout.STACKED:
        sizes = [str(members), *sizes]
    kind = str(example.dtype).removeprefix("torch.")
    short = kind.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    text = f"{short}[{','.join(sizes)}]"
    return f"{members} x {text}" if layout is Layout.LISTED else text


def source_line(node: fx.Node) -> str:
    """``file.py:12`` of the member's code, its innermost line outside torch and hfusion; empty if unknown."""
    locations = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace", "") or "")
    outside = [place for place in locations if "/torch/" not in place[0] and "/hfusion/array/" not in place[0]]
    file, line = (outside or locations or [("", "")])[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}" if file else ""


def _argument(item: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(item, fx.Node):
        return names[item]
    if isinstance(item, list | tuple):
        inner = ", ".join(_argument(part, names) for part in item)
        return f"[{inner}]" if isinstance(item, list) else f"({inner})"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{key}: {_argument(part, names)}" for key, part in item.items()) + "}"
    return str(item).removeprefix("aten.") if isinstance(item, OpOverload) else repr(item)
