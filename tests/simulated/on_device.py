"""A plugin of pytest that runs tests on a simulated device: tensors made without a device are on ``sim:0``.

``python -m pytest -p tests.simulated.on_device tests/population``. Values are real there, and a tensor that is on
another device than the others is an error, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.simulated.device import install


class OnDevice(TorchFunctionMode):
    """Like ``torch.set_default_device``; generators of the CPU draw in host memory, and the draws are moved."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func in _device_constructors() and arguments.get("device") is None:
            generator = arguments.get("generator")
            tensor = func(*args, **{**arguments, "device": "sim:0" if generator is None else generator.device})
            return tensor.to("sim:0")
        return func(*args, **arguments)


def pytest_configure() -> None:
    # Not on import: the suite imports this module, too, as it looks for doctests. And before the modules of tests are
    # imported, which make tensors.
    install()
    OnDevice().__enter__()
