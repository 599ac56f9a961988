"""State that a trial run of forward changes is restored, and numbers in nested containers and far functions count."""

from __future__ import annotations

import importlib
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.python_state import restored, variables
from hfusion.capture.reachable_code import CodeSearch
from tests.alone import net, normal

OWN: dict[str, int] = {}
HELPERS: list[int] = []
OTHERS: dict[str, int] = {}


def help_out(x: Tensor) -> Tensor:
    HELPERS.append(len(HELPERS))
    return x


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        global MADE
        MADE = 1
        OWN["calls"] = OWN.get("calls", 0) + 1
        Counting.calls += 1
        self.last: Any = x
        return help_out(x)


def test_variables_that_forward_names_are_restored() -> None:
    module = Counting()
    search = CodeSearch([module])
    before = variables(search)
    with restored(module, search):
        module(torch.zeros(1))
        OTHERS["elsewhere"] = 1
        assert variables(search) != before
    assert (OWN, HELPERS, Counting.calls) == ({}, [], 0)
    assert "MADE" not in globals()
    assert not hasattr(module, "last")
    assert OTHERS == {"elsewhere": 1}
    assert variables(search) == before


class Adding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.highest = x.max().item()  # type: ignore[attr-defined]
        SEEN.parts = Row([x])  # type: ignore[attr-defined]
        return x


def test_attributes_that_forward_adds_to_an_object_are_variables() -> None:
    search = CodeSearch([Adding()])
    before = variables(search)
    with restored(Adding(), search):
        Adding()(torch.zeros(1))
        after = variables(search)
    assert {name.rpartition(".")[2] for name in after if name not in before} == {"highest", "parts"}
    assert vars(SEEN).keys() == {"samples"}


class Table(dict[Any, Any]):
    """A dict that refuses item assignment, clear and update."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("a Table is never overwritten")

    clear = update = __setitem__  # type: ignore[assignment]


class Row(list[Any]):
    pass


@pytest.mark.parametrize("make", [dict, Table, Counter, OrderedDict, list, Row, deque, set])
def test_containers_of_any_class_come_back(make: Callable[..., Any]) -> None:
    module = nn.Module()
    module.held = make({"a": 1, "b": 2})
    # Python promises no order of a set of strings.
    ordered = sorted if make is set else list
    before = ordered(module.held)
    with restored(module):
        base = next(kind for kind in (OrderedDict, dict, list, deque, set) if isinstance(module.held, kind))
        base.clear(module.held)
        (base.update if base not in (list, deque) else base.extend)(module.held, {"c": 3})
        assert list(module.held) == ["c"]
    assert ordered(module.held) == before
    if isinstance(module.held, dict):
        assert list(module.held.items()) == [("a", 1), ("b", 2)]


def test_a_deque_of_any_length_comes_back() -> None:
    module = nn.Module()
    module.held = deque([1], maxlen=1000)
    with restored(module):
        module.held.append(2)
    assert module.held == deque([1])


def test_the_order_of_an_ordered_dict_comes_back() -> None:
    module = nn.Module()
    module.held = OrderedDict(a=1, b=2)
    with restored(module):
        module.held.move_to_end("a")
    assert list(module.held) == ["a", "b"]


class Seen:
    def __init__(self) -> None:
        self.samples = 0


SEEN = Seen()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if SEEN.samples >= 0 else x * Seen().samples


def test_variables_that_are_only_read_are_not_restored() -> None:
    with restored(Reading()):
        SEEN.samples += 1
    assert SEEN.samples == 1


class Options(dict[str, Any]):
    pass


class Slotted:
    __slots__ = ("held",)


class Config:
    pass


def attribute_of(value: Any) -> Callable[[Any], Any]:
    def holding(inner: Any) -> Any:
        holder = value()
        holder.held = inner
        return holder

    return holding


def function() -> Callable[[Tensor], Tensor]:
    return lambda x: x


# How a value holds another one, and the expression that reads it.
HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda inner: [0.0, inner], "[1]"),
    "dict": (lambda inner: {"a": 0.0, "held": inner}, "['held']"),
    "deque": (lambda inner: deque([inner]), "[0]"),
    "attribute of a list": (attribute_of(lambda: Row([0.0])), ".held"),
    "attribute of a dict": (attribute_of(lambda: Options(a=0.0)), ".held"),
    "object": (attribute_of(Config), ".held"),
    "slot": (attribute_of(Slotted), ".held"),
    "namespace": (attribute_of(types.SimpleNamespace), ".held"),
    "function": (attribute_of(function), ".held"),
    "tensor": (attribute_of(lambda: torch.ones(2)), ".held"),
}
OUTSIDE = {**HOLDERS, "module": (attribute_of(nn.Identity), ".held")}
PATHS = st.lists(st.sampled_from(sorted(HOLDERS)), min_size=1, max_size=3)
PATHS_OUTSIDE = st.lists(st.sampled_from(sorted(OUTSIDE)), min_size=1, max_size=3)


def nested(path: list[str], number: float) -> tuple[Any, str]:
    """Return a value that holds ``number`` behind the holders ``path``, and the expression that leads to it."""
    value: Any = number
    for kind in reversed(path):
        value = OUTSIDE[kind][0](value)
    return value, "".join(OUTSIDE[kind][1] for kind in path)


def functions(text: str, space: dict[str, Any]) -> dict[str, Any]:
    """Return a forward and a loss that read the expression ``text``, and a function that assigns it."""
    source = f"""
def forward(self, x):
    return self.fc(x) * {text}

def loss(y, target):
    return (y - target).square().mean() * {text}

def put(number):
    {text} = number
"""
    exec(compile(source, "<nested>", "exec"), space)
    return space


@given(path=PATHS, other=st.sampled_from([1.5, 2.5]))
@settings(deadline=None, max_examples=15)
def test_members_may_differ_in_a_nested_number(path: list[str], other: float) -> None:
    text = nested(path, 0.0)[1]
    kind = net(functions(f"self.config{text}", {"__name__": __name__})["forward"])
    models: list[Any] = [kind() for _ in range(2)]
    for model, number in zip(models, (1.5, other), strict=True):
        model.config = nested(path, number)[0]
    x = normal(3, 4)
    torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))


@given(path=PATHS_OUTSIDE)
@settings(deadline=None, max_examples=15)
def test_a_nested_number_outside_of_the_models_counts_at_each_call(path: list[str]) -> None:
    value, text = nested(path, 1.5)
    space = functions(f"CONFIG{text}", {"CONFIG": value, "__name__": __name__})
    models, x = [net(space["forward"])() for _ in range(2)], normal(3, 4)
    fused, plain, losses = hf.fuse(models), hf.fuse([nn.Linear(4, 4).double() for _ in range(2)]), space["loss"]
    for number in (1.5, 2.5, 1.5):
        space["put"](number)
        torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]))
        outputs = plain(x)
        expected = torch.stack([losses(output, x) for output in outputs])
        torch.testing.assert_close(hf.per_model(losses)(outputs, x), expected)


# The number of functions of the package that call one another.
LENGTH = 250

SOURCE = "\n".join(
    [
        "LEVEL, FAR_LEVEL, IS_READ = 1.0, 1.0, False",
        "def last(x): return x * FAR_LEVEL if IS_READ else x",
        *(
            f"def f{k}(x): return x if x is None else {f'f{k + 1}' if k < LENGTH else 'last'}(x)"
            for k in range(LENGTH + 1)
        ),
        "def scale(x): return f0(x) * LEVEL",
    ]
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "chained_functions.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("chained_functions")
    monkeypatch.delitem(sys.modules, "chained_functions")


def scaled() -> list[nn.Module]:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            import chained_functions

            return chained_functions.scale(super().forward(x))  # type: ignore[no-any-return]

    return [Scaled(3, 2).double() for _ in range(2)]


@pytest.mark.parametrize("name", ["LEVEL", "FAR_LEVEL"])
def test_variables_of_a_package(package: types.ModuleType, name: str) -> None:
    """What forward's own code calls is followed; what is far away costs no capture when it changes."""
    models, x = scaled(), torch.randn(4, 3, dtype=torch.float64)
    fused = hf.fuse(models)
    for value in range(1, 8):
        setattr(package, name, float(value))
        torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]), rtol=1e-12, atol=0)
    assert ("more than 4 values" in str(fused.report())) == (name == "LEVEL")


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
