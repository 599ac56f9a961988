"""Caches for repeated work of Inductor while it compiles a step. Without the names that it patches, nothing changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from hfusion.torch_private.replaced_functions import replaced

HEADER = Path(__file__).with_name("program.h")
# The two headers that `HEADER` includes.
_WRAPPER, _PREFIX = "torch/csrc/inductor/cpp_wrapper/cpu.h", "torch/csrc/inductor/cpp_prefix.h"


@contextmanager
def quick_inductor() -> Iterator[None]:
    """Context manager: Inductor compiles the same programs faster. For one thread at a time."""
    with _dtype_rules_once(), _all_headers_precompiled(), _numbers_stay_tensors():
        yield


@contextmanager
def _numbers_stay_tensors() -> Iterator[None]:
    """Context manager: do not let torch turn 0-dim float64 tensors into Python numbers; programs take tensors only.

    If torch specialized one to a number, it would request a new trace, which works only with Dynamo.
    """
    from torch.fx.passes import _tensorify_python_scalars as numbers

    name = "_is_tensorify_enabled"
    with replaced(numbers, {name: lambda: False} if hasattr(numbers, name) else {}):
        yield


@contextmanager
def _dtype_rules_once() -> Iterator[None]:
    """Context manager: fill the table of dtype rules once, not per operator, a third of torch's Python time."""
    from torch._inductor import dtype_propagation, utils
    from torch._inductor.codegen import common

    table: Any = getattr(dtype_propagation, "DtypePropagationOpsHandler", None)
    sources: list[Any] = [
        getattr(utils, "op_dtype_propagation_rules", None),
        getattr(common, "pointwise_overrides_data", None),
    ]
    if not hasattr(table, "_instance") or None in sources:
        yield
        return
    fill, filled = table.__init__, [-1]

    def fill_once(self: Any) -> None:
        # Imports of modules may add rules.
        sizes = [len(source) for source in sources]
        if sizes != filled:
            fill(self)
            filled[:] = sizes

    with replaced(table, {"__init__": fill_once}):
        yield


@contextmanager
def _all_headers_precompiled() -> Iterator[None]:
    """Context manager: precompile both headers of a program. torch precompiles one; the other takes a fifth of the time
    to compile a small program.
    """
    from torch._inductor import codecache

    cache: Any = codecache.CppWrapperCodeCache
    original = cache.__dict__.get("_get_uncompiled_header")
    prefix = getattr(codecache, "_get_cpp_prefix_header", None)
    # Inside a zip import there is no header file.
    if original is None or prefix is None or prefix("cpu") != _PREFIX or not HEADER.is_file():
        yield
        return

    def header(cls: type, device: str) -> Any:
        path = original.__get__(None, cls)(device)
        return str(HEADER) if path == _WRAPPER else path

    with replaced(cache, {"_get_uncompiled_header": classmethod(header)}):
        yield


# Inductor: compile a graph, and read and set the settings of the process.


def compile_graph(
    module: fx.GraphModule, examples: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """Return ``module`` compiled by Inductor for tensors like ``examples``. Raises what Inductor raises."""
    # Imported late: most programs never compile, and Inductor takes a second to import.
    from torch._inductor import compile as compile_by_inductor

    run: Callable[..., Sequence[Tensor]] = compile_by_inductor(module, list(examples), dict(options))
    return run


def changed_values() -> dict[str, Any]:
    """Return the settings that differ from torch's defaults, by name, without importing Inductor.

    Settings of AOTInductor are left out: it stores properties of the machine there.
    """
    module = sys.modules.get("torch._inductor.config")
    if module is None:
        return {}
    config: Any = module
    # A setting that was changed only during a compilation is no longer "default" to torch afterwards.
    values = {name: getattr(config, name) for name in config._config if not config._is_default(name)}
    return {
        name: value
        for name, value in sorted(values.items())
        if value != config._config[name].default and not name.startswith("aot_inductor.")
    }


def under_values(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Context manager: Inductor compiles under these settings. Imports Inductor."""
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(dict(values))
    return patched


def last_pass(own: Callable[[fx.Graph], None]) -> Any:
    """Return a pass for Inductor: the custom ones that the settings of the process run last, and then ``own``.

    Imports Inductor.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    present: Any = config.post_grad_custom_post_pass
    earlier: Sequence[Any] = () if present is None else (present,) if callable(present) else tuple(present)

    class LastPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for graph_pass in (*earlier, own):
                graph_pass(graph)

        def uuid(self) -> Any:
            names = [graph_pass.uuid() for graph_pass in earlier]
            # With None, torch caches no program.
            return None if None in names else (get_hash_for_files((own.__code__.co_filename,)), *names)

    return LastPass()
