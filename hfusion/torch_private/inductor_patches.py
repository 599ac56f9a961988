"""Caches for repeated work of Inductor while it compiles a step. Without the names that it patches, nothing changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from hfusion.torch_private.replaced_functions import replaced

HEADER = Path(__file__).with_name("program.h")
# One of the two headers that `HEADER` includes.
_WRAPPER = "torch/csrc/inductor/cpp_wrapper/cpu.h"


@contextmanager
def quick_inductor() -> Iterator[None]:
    """Context manager: Inductor compiles the same programs faster. For one thread at a time."""
    with ExitStack() as stack:
        for patch in (_dtype_rules_once, _all_headers_precompiled, _numbers_stay_tensors):
            with suppress(AttributeError, ImportError):
                stack.enter_context(patch())
        yield


def _numbers_stay_tensors() -> AbstractContextManager[None]:
    """Context manager: do not let torch turn 0-dim float64 tensors into Python numbers; programs take tensors only.

    If torch specialized one to a number, it would request a new trace, which works only with Dynamo.
    """
    from torch.fx.passes import _tensorify_python_scalars as numbers

    return replaced(numbers, {"_is_tensorify_enabled": lambda: False})


def _dtype_rules_once() -> AbstractContextManager[None]:
    """Context manager: fill the table of dtype rules once, not per operator, a third of torch's Python time."""
    from torch._inductor.codegen.common import pointwise_overrides_data
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.utils import op_dtype_propagation_rules

    fill, filled = DtypePropagationOpsHandler.__init__, [-1]

    def fill_once(self: Any) -> None:
        # Imports of modules may add rules.
        sizes = [len(op_dtype_propagation_rules), len(pointwise_overrides_data)]
        if sizes != filled:
            fill(self)
            filled[:] = sizes

    return replaced(DtypePropagationOpsHandler, {"__init__": fill_once})


def _all_headers_precompiled() -> AbstractContextManager[None]:
    """Context manager: precompile both headers of a program. torch precompiles one; the other takes a fifth of the time
    to compile a small program.
    """
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache._get_uncompiled_header

    def header(cls: type, device: str) -> Any:
        path = original(device)
        # Inside a zip import there is no header file.
        return str(HEADER) if path == _WRAPPER and HEADER.is_file() else path

    return replaced(CppWrapperCodeCache, {"_get_uncompiled_header": classmethod(header)})


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
