"""Objects of user classes whose methods raise: no method is called to look into them."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf


def _raise(*_: Any) -> Any:
    raise NotImplementedError


SPECIAL = ["__iter__", "__len__", "__contains__", "__getitem__", "__eq__", "__hash__", "__bool__", "__repr__"]
SPECIAL += ["items", "keys", "values", "count", "index"]


def raising(base: type, *values: Any) -> Callable[[], Any]:
    """Return a function that makes an object of a subclass of ``base`` whose methods raise."""
    kind = types.new_class("Raising", (base,), exec_body=lambda space: space.update(dict.fromkeys(SPECIAL, _raise)))
    return lambda: kind(*values)


class Irrep(tuple[int, int]):
    def __len__(self) -> int:
        raise NotImplementedError


class LazyMapping(collections.OrderedDict[str, Any]):
    def items(self) -> Any:
        raise ImportError("a package that is not installed")


class Slotted:
    __slots__ = ("tau",)

    def __init__(self) -> None:
        object.__setattr__(self, "tau", 1.0)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") else _raise()


class Dynamic:
    __getattr__ = _raise


class Hidden:
    __dict__ = property(_raise)  # type: ignore[assignment]


class Walking:
    __iter__ = __next__ = __reduce_ex__ = __repr__ = _raise


class Key:
    __repr__ = _raise


class Unnamed:
    pass


class Proxy:
    pass


Unnamed.__module__ = None  # type: ignore[assignment]
Proxy.__module__ = property(_raise)  # type: ignore[assignment]

VALUES: Mapping[str, Callable[[], Any]] = {
    "tuple": lambda: Irrep((1, 2)),
    "OrderedDict": lambda: LazyMapping(tau=1.0),
    **{kind.__name__: raising(kind, [1]) for kind in (list, tuple, set, frozenset, collections.deque)},
    **{f"{kind.__name__} with items": raising(kind, [("tau", 1.0)]) for kind in (dict, collections.OrderedDict)},
    "Mapping": raising(Mapping),
    "UserDict": raising(collections.UserDict),
    **{kind.__name__: raising(kind, "1") for kind in (int, float, str)},
    "object": raising(object),
    "slots": Slotted,
    "__getattr__": Dynamic,
    "__dict__": Hidden,
    "iterator": Walking,
    "class without a file": Unnamed,
    "class with a property for its file": Proxy,
    "key": lambda: {Key(): 1.0},
    "proxy": lambda: types.MappingProxyType(LazyMapping(tau=1.0)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_variables_may_be_objects_whose_methods_raise(kind: str) -> None:
    value, held = VALUES[kind](), [VALUES[kind]()]

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if held is not None and held[0] is not value else -y

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean() if value is not held else output.sum()

    torch.manual_seed(0)
    models, x = [Model(3, 2).double() for _ in range(2)], torch.randn(4, 3, dtype=torch.float64)
    fused, target = hf.fuse(models), torch.zeros(4, 2, dtype=torch.float64)
    expected = torch.stack([loss(model(x), target) for model in models])
    torch.testing.assert_close(hf.per_model(loss)(fused(x), target), expected, rtol=1e-12, atol=0)
    fused[0].extra = 1.0
    torch.testing.assert_close(hf.per_model(loss)(fused(x), target), expected, rtol=1e-12, atol=0)
    fused.unfuse()


@pytest.mark.parametrize("kind", VALUES)
def test_attributes_may_be_objects_whose_methods_raise(kind: str) -> None:
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.held, self.calls = [VALUES[kind]()], 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.held else x

    models, x = [Model().double() for _ in range(2)], torch.randn(4, 3, dtype=torch.float64)
    # Python cannot copy some of them itself, and a counter is refused in words.
    with pytest.raises(hf.FusionError, match=r"deep-copied|calls"):
        hf.fuse(models)(x)


def test_functions_that_name_one_another() -> None:
    space: dict[str, Any] = {"__name__": "chained"}
    for k in range(200):
        exec(f"def f{k}(x): return f{k + 1}(x) if x is not None else x", space)
    space["f200"] = torch.tanh

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return first(super().forward(x))  # type: ignore[no-any-return]

    first = space["f0"]
    models, x = [Model(3, 2).double() for _ in range(2)], torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))
