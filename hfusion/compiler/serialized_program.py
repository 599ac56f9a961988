"""Write the program of an array as JSON, and read it, to pass it to another process or to store it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hfusion.compiler.compiled_program import RULES, Compiled, look_at
from hfusion.compiler.graph_text import Unwritable, read_graph, write_graph, write_value
from hfusion.core.guards import AllHold, Assumptions, fixed
from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Program, Slot
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
    graph = read_graph(written["graph"]).graph
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
            sizes[name] = _symbol(mode, name, int(hint))
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


def _symbol(mode: Any, name: str, hint: int) -> Any:
    # Outside of the mode, so that it is a real tensor whose size can be made dynamic.
    with disable_current_modes():
        vector = torch.empty(hint, device="cpu")
    return with_dynamic_dims(mode, vector, [True], name).shape[0]


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
