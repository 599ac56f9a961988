"""Objects from another process come back with the classes and functions of this one."""

from __future__ import annotations

import enum
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

cloudpickle = pytest.importorskip("cloudpickle")

import hfusion as hf  # noqa: E402
from hfusion.cluster.messages import pack, unpack  # noqa: E402
from hfusion.device.worker_process import Failure, pack_message, unpack_message  # noqa: E402


class Refused(Exception):
    """Is made with other arguments than its message."""

    def __init__(self, code: int) -> None:
        super().__init__(f"refused with {code}")


class Known(Exception):
    pass


class Color(enum.Enum):
    RED = 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.color = nn.Linear(2, 2), Color.RED


def doubled(x: Tensor) -> Tensor:
    return x * 2


def copied(name: str) -> Any:
    """A second class or function of this module with this name, as another process has that was sent it by value."""
    space = dict(globals())
    exec(inspect.getsource(space[name]), space)
    return space[name]


@pytest.mark.parametrize("name", ["Net", "Color", "doubled"])
def test_classes_and_functions_come_back_as_those_of_this_process(name: str) -> None:
    received, original = copied(name), globals()[name]
    assert received is not original
    assert unpack_message(pack_message(received)) is original


def test_objects_come_back_with_the_classes_of_this_process() -> None:
    sent = copied("Net")()
    sent.color = copied("Color").RED
    back = unpack_message(pack_message(sent))
    assert type(back) is Net
    assert back.color is Color.RED
    assert torch.equal(back.linear.weight, sent.linear.weight)


def test_a_function_that_this_process_lacks_is_an_error() -> None:
    def local() -> None:
        pass

    with pytest.raises(AttributeError, match="<locals>"):
        unpack_message(pack_message(local))


def local_error() -> Exception:
    class Local(Exception):
        pass

    return Local("no")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (KeyError("no"), KeyError, "'no'"),
        (hf.PlanError("no"), hf.PlanError, "no"),
        (copied("Known")("no"), Known, "no"),
        (Refused(3), hf.HFusionError, "Refused: refused with 3"),
        (local_error(), hf.HFusionError, "Local: no"),
        (ValueError(threading.Lock()), hf.HFusionError, "ValueError: <unlocked"),
    ],
    ids=["builtin", "package", "script", "other arguments", "local", "lock"],
)
def test_errors_come_back_with_their_traceback(error: Exception, kind: type[Exception], text: str) -> None:
    back: BaseException = unpack_message(pack_message(Failure(error))).error_of("a process")
    assert type(back) is kind
    assert str(back).startswith(text)
    assert back.__notes__[-1].startswith("in a process:\n")


def tensors() -> dict[str, Tensor]:
    base = torch.arange(12.0).reshape(3, 4)
    marked = nn.Parameter(base.clone())
    marked.no_decay = True  # type: ignore[attr-defined]
    return {
        "plain": base.clone(),
        "trained": base.clone().requires_grad_(),
        "parameter": nn.Parameter(base.clone()),
        "frozen": nn.Parameter(base.clone(), requires_grad=False),
        "marked": marked,
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "part": base[1:],
        "transposed": base.t(),
        "expanded": torch.zeros(1, 4).expand(3, 4),
        "half": base.to(torch.bfloat16),
        "whole": torch.tensor([[1, -2]]),
        "truth": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize(
    "sent", [lambda value: unpack(pack("it", value, {})), lambda value: unpack_message(pack_message(value))]
)
def test_tensors_are_what_they_were(name: str, sent: Any) -> None:
    tensor = tensors()[name]
    first, second = sent([tensor, tensor])
    assert first is second
    assert type(first) is type(tensor)
    assert torch.equal(first, tensor)
    for attribute in ("dtype", "shape", "requires_grad"):
        assert getattr(first, attribute) == getattr(tensor, attribute)
    assert first.stride() == tensor.stride()
    assert vars(first) == vars(tensor)
    with torch.no_grad():
        first.untyped_storage().fill_(0)
