"""Inductor: compile a graph, and read and set the settings of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx


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
