"""What comes back from another process is of the classes and functions that this one has."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

cloudpickle = pytest.importorskip("cloudpickle")

from hfusion.cluster.serialization import pack_message, unpack_message  # noqa: E402

FACTOR = 2.0


def doubled(x: Tensor) -> Tensor:
    return x * FACTOR


class Color(enum.Enum):
    RED = 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.function, self.color = nn.Linear(2, 2), doubled, Color.RED
        power = 2
        self.last = lambda x: x**power * FACTOR

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.linear(x)))


class Refused(Exception):
    pass


def local() -> nn.Module:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * FACTOR

    return Local()


@pytest.fixture(autouse=True)
def _by_value() -> Any:
    """Send this module's classes and functions as those of a script or a notebook are sent."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    "value",
    [Net(), local(), Refused("no"), Color.RED, doubled, Net],
    ids=["model", "local class", "error", "enum", "function", "class"],
)
def test_what_was_sent_comes_back_as_what_it_is(value: Any) -> None:
    names = dict(vars(type(value)))
    back = unpack_message(pack_message(value))
    assert type(back) is type(value)
    assert dict(vars(type(value))) == names
    if not isinstance(value, nn.Module | Refused):
        assert back is value


def test_functions_read_the_variables_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after these have changed, and functions that have no name here."""
    model = unpack_message(pack_message(Net()))
    assert model.function is doubled
    assert FACTOR == 2.0
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    x = torch.ones(1, 2)
    torch.testing.assert_close(model(x), (model.linear(x) * 3) ** 2 * 3)


def test_a_function_of_the_same_name_with_other_code_is_another() -> None:
    space: dict[str, Any] = {"__name__": __name__}
    exec("def doubled(x):\n    return x * 7", space)
    assert unpack_message(pack_message(space["doubled"]))(1) == 7


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["file", "-c"])
def test_a_script_trains_what_it_defines(way: str) -> None:
    script = Path(__file__).with_name("own_script.py")
    command = [str(script)] if way == "file" else ["-c", script.read_text()]
    place = {**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=place, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["all classes are the script's"], done.stderr
