"""Numbers and texts that forward reads out of tensors decide in each call of each member as they do alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, call, net, normal
from tests.capture.test_export import Sevenfold


def total(x: Tensor) -> Any:
    return x.sum().item()


CONDITIONS: dict[str, Callable[[Tensor], Any]] = {
    "v != v": lambda x: (v := total(x)) != v,
    "v == v": lambda x: (v := total(x)) == v,
    "v - v": lambda x: total(x) - total(x) != 0,
    "v * 0": lambda x: total(x) * 0 != 0,
    "v % 1": lambda x: total(x) % 1 > 0.5,
    "text of a number": lambda x: str(total(x))[0] == "-",
    "format of a number": lambda x: f"{total(x)}"[0] == "-",
    "key of a dict": lambda x: {0.0: True}.get(total(x) * 0, False),
    "kind of a number": lambda x: isinstance(total(x), float) and total(x) != total(x),
    "list": lambda x: any(v != v for v in x.flatten().tolist()),
    "list of lists": lambda x: (v := x.tolist())[0][0] != v[0][0],
    "integer": lambda x: int(x.nan_to_num().sum().item() * 10) % 2,
    "text of a tensor": lambda x: repr(x.sum())[7] == "-",
    "format of a tensor": lambda x: f"{x.sum()}"[0] == "-",
    "truth": lambda x: x.isnan().any().item() is True,
}


def batches() -> list[Tensor]:
    x = torch.arange(12, dtype=torch.float64).view(3, 4).sin()
    return [x, -x - 1, x.masked_fill(x > 0.9, torch.nan), x * 3]


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_on_a_number(name: str) -> None:
    condition = CONDITIONS[name]
    make = net(lambda self, x: self.fc(x).nan_to_num() * (2 if condition(x) else 1))
    array = assert_alone([make() for _ in range(2)], *batches())
    assert "loop over members, forward: " in str(array.report())


COMPUTED: dict[str, Callable[[Tensor, Any], Any]] = {
    "compared": lambda y, n: y / 2 if n > 0 else y,
    "equal": lambda y, n: y / 2 if n == 0.0 else y,
    "multiplied": lambda y, n: y * (2 * n - 1),
    "divided": lambda y, n: y / (1 / (n * n + 1)),
    "power": lambda y, n: y + (n**2) % 3 // 1,
    "negated": lambda y, n: y + -n + abs(n),
    "minimum": lambda y, n: y.clamp(max=max(n, 0.5)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_report_names_a_number_that_python_computes_with(name: str) -> None:
    compute = COMPUTED[name]
    make = net(lambda self, x: compute(y := self.fc(x), y.sum().item()))
    array = assert_alone([make() for _ in range(2)], normal(3, 4), -normal(3, 4))
    assert "reads a number out of a tensor, by item() or tolist(), and computes with it" in str(array.report())


@pytest.mark.parametrize("zero", [lambda v: v * 0, lambda v: v - v])
def test_a_number_that_is_zero_but_for_nan(zero: Callable[[Any], Any]) -> None:
    make = net(lambda self, x: self.fc(x.nan_to_num()) + zero(total(x)))
    assert_alone([make() for _ in range(2)], *batches())


def kept_for_a_log(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.fc(x)
    values = [h.mean().item(), h.abs().amax(0).tolist()]
    del values
    return h


def known(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.fc(x)
    return h * 2 if torch.tensor(2.0).item() > 1 else h


@pytest.mark.parametrize("forward", [kept_for_a_log, known])
def test_unused_reads_cause_no_loop(forward: Callable[..., Tensor]) -> None:
    make = net(forward)
    array = assert_alone([make() for _ in range(2)], normal(3, 4), normal(3, 4))
    assert "loop over members" not in str(array.report())


def test_the_report_names_the_line() -> None:
    make = net(lambda self, x: self.fc(x) * total(x))
    array = assert_alone([make() for _ in range(2)], normal(3, 4))
    assert f"test_python_reads.py:{total.__code__.co_firstlineno + 1} reads a number" in str(array.report())


REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "_version": lambda self, x: self.fc.weight._version,
    "_is_view": lambda self, x: x.t()._is_view(),
    "_base": lambda self, x: x._base is None,
    "grad": lambda self, x: self.fc.bias.grad is None,
    "is_inference": lambda self, x: x.is_inference(),
    "is_leaf": lambda self, x: x.is_leaf,
    "grad_fn": lambda self, x: getattr(x, "grad_fn") is None,  # noqa: B009
}


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_reads_that_an_array_cannot_answer_are_refused(name: str, looped: bool) -> None:
    ask = REFUSED[name]

    def forward(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x) * (total(x) if looped else 1)
        return h * 2 if ask(self, x) else h

    make = net(forward)
    with pytest.raises(hf.FusionError, match=rf"test_python_reads.py:\d+ reads {name} of a tensor of shape"):
        hf.fuse([make() for _ in range(2)])(normal(3, 4).requires_grad_())


def of_its_own_tensors(self: Any, x: Tensor) -> Tensor:
    """Asks what an array answers as a member: of tensors that forward makes, and of inputs without gradients."""
    h: Tensor = self.fc(x)
    h = h * 2 if x.is_leaf and x.grad_fn is None else h
    return h * 3 if h.is_inference() else h


def of_memory(self: Any, x: Tensor) -> Tensor:
    """Asks about writes into, and views of, tensors that forward makes."""
    h: Tensor = self.fc(x)
    h.add_(1.0)
    rows = h.view(-1, 2)
    return h * (2 if rows._is_view() and rows._base is h else 3) * (1 + h._version)


def of_a_buffer(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.fc(x)
    return h * 2 if self.buffer.grad is None else h


def all_checked(self: Any, x: Tensor) -> Tensor:
    torch._check_tensor_all(x < 100, lambda: "too large")
    torch._check(x.dim() == 2, lambda: "no matrix")
    h: Tensor = self.fc(x)
    return h


@pytest.mark.parametrize("forward", [of_its_own_tensors, of_memory, of_a_buffer, all_checked])
def test_reads_that_an_array_can_answer_are_fused(forward: Callable[..., Tensor]) -> None:
    make = net(forward)
    models = [make() for _ in range(2)]
    for model in models:
        model.register_buffer("buffer", normal(3))
    array = assert_alone(models, normal(3, 4))
    assert "loop over members" not in str(array.report())


def test_a_failed_check_of_all_values_raises_the_error_of_the_member() -> None:
    array = hf.fuse([net(all_checked)() for _ in range(2)])
    array(normal(3, 4))
    with pytest.raises(RuntimeError, match="too large"):
        array(normal(3, 4) + 1000)


def test_a_looped_submodule_is_asked_of_its_input_as_alone() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + x._version) * (2 if total(x) > 0 else 1)

    make = net(lambda self, x: self.asking(self.fc(x).add_(1.0)))
    models = [make() for _ in range(2)]
    for model in models:
        model.asking = Asking()
    assert_alone(models, normal(3, 4))


@pytest.mark.parametrize("ask", [lambda x: x.storage_offset() > 0, lambda x: x.untyped_storage().nbytes() > 100])
def test_the_memory_of_an_input_is_asked_in_a_loop(ask: Callable[[Tensor], bool]) -> None:
    make = net(lambda self, x: self.fc(x) * (2 if ask(x) else 1))
    x = normal(5, 4)
    assert_alone([make() for _ in range(2)], x[:3].clone(), x[2:], x[:3].clone(), grads=False)


class Strided(nn.Module):
    """Runs as own code, and asks how its input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sevenfold.apply(x)
        y = y * 2 if x.is_contiguous() else y
        return y * 3 if x.stride(0) == 1 else y


class AroundStrided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.strided = nn.Linear(4, 4), nn.Linear(5, 4), Strided()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        turned = self.strided(self.first(x).mT).mT + self.strided(x)
        return turned + self.strided(self.last(x.mT).mT).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [AroundStrided, net(lambda self, x: Strided()(x) + self.fc(x))])
def test_own_code_is_asked_of_inputs_that_lie_as_alone(make: Callable[[], nn.Module]) -> None:
    models = [make() for _ in range(2)]
    x, wide = normal(5, 4), normal(5, 8)
    stacked = torch.stack([x.mT, x.mT * 2]).mT
    inputs = (
        x,
        x.mT.contiguous().mT,
        wide[:, ::2],
        call(hf.stacked(stacked)),
        call(hf.stacked(stacked.contiguous())),
        x,
    )
    array = assert_alone(models, *inputs)
    assert "loop over members" in str(array.report())


class Formatted(nn.Module):
    """Asks for the memory format of what its convolution gives, which is that of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv(x)
        return h * 2 if h.is_contiguous(memory_format=torch.channels_last) else h


def test_memory_formats_of_parameters_are_not_asked_for() -> None:
    models = [Formatted().to(memory_format=torch.channels_last) for _ in range(2)]
    x = normal(2, 2, 5, 5)
    with pytest.raises(hf.FusionError, match=r"reads is_contiguous .*\.to\(memory_format=torch.contiguous_format\)"):
        hf.fuse(models)(x)
    converted = [model.to(memory_format=torch.contiguous_format) for model in models]
    assert_alone(converted, x, x.to(memory_format=torch.channels_last), x)


CLASS_QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "isinstance": lambda x: isinstance(x, nn.Parameter),
    "type": lambda x: type(x) is Tensor,
    "__class__": lambda x: x.__class__ is nn.Parameter,
}


class AsksClass(nn.Module):
    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.question = nn.Linear(3, 2).double(), question

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if self.question(x) else y


@pytest.mark.parametrize("question", CLASS_QUESTIONS)
def test_the_class_of_an_input_that_is_a_parameter(question: str) -> None:
    """After a call with a tensor of the same shape, whose program it must not run."""
    models = [AsksClass(CLASS_QUESTIONS[question]) for _ in range(3)]
    fused = hf.fuse(models)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(fused(x), expected)
    with pytest.raises(hf.FusionError, match=r"input 0 is an nn\.Parameter"):
        fused(nn.Parameter(x))
    torch.testing.assert_close(fused(nn.Parameter(x).view_as(x)), expected)


def test_a_parameter_as_input_of_code_that_does_not_ask() -> None:
    models = [nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double() for _ in range(3)]
    fused = hf.fuse(models)
    image = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    fused(image).sum().backward()
    fused_grad, image.grad = image.grad, None
    sum(model(image).sum() for model in models).backward()
    torch.testing.assert_close(fused_grad, image.grad)


class AsksClassOfWeight(AsksClass):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if self.question(self.linear.weight) else y


@pytest.mark.parametrize("question", [lambda w: type(w) is nn.Parameter, lambda w: w.__class__ is nn.Parameter])
def test_the_exact_class_of_a_parameter(question: Callable[[Tensor], bool]) -> None:
    fused = hf.fuse([AsksClassOfWeight(question) for _ in range(3)])
    with pytest.raises(hf.FusionError, match=r"ask isinstance\(parameter, nn\.Parameter\)"):
        fused(torch.randn(4, 3, dtype=torch.float64))


def test_whether_a_weight_is_a_parameter() -> None:
    models = [AsksClassOfWeight(lambda w: isinstance(w, nn.Parameter)) for _ in range(3)]
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))
