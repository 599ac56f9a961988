"""Side effects of a submodule in a loop equal those of the member alone, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, looped, normal
from tests.capture.test_export import Sevenfold

FAR = 1e9


class Counter(nn.Module):
    """Counts in a buffer, by a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(4))
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n.mul_(0.9).add_(x.mean(0) + 1)
        return Sevenfold.apply(x * self.w * self.n.clone())


class Flagging(Counter):
    """Makes a buffer require a gradient, which then gets one that nothing reads."""

    def __init__(self, loops: bool, flag: bool = False) -> None:
        super().__init__()
        self.loops = loops
        self.n = torch.zeros(4, dtype=torch.float64, requires_grad=flag)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n.requires_grad_()
        y: Tensor = (x * self.w).pow(2) + self.n
        return Sevenfold.apply(y) if self.loops else y


class Silent(Counter):
    """Gives nothing."""

    def forward(self, x: Tensor) -> None:
        if x.sum() < FAR:
            self.n += x.detach().mean(0)


class Assigning(Counter):
    """Uses a buffer, then assigns another."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.n
        self.n = self.n + x.detach().mean(0)
        return Sevenfold.apply(y + self.w)


class Table(nn.Module):
    """Takes no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 4))

    def forward(self, count: int) -> Tensor:
        return Sevenfold.apply(self.rows[:count])


class Doing(nn.Module):
    """Does with its input what only a loop can do."""

    def __init__(self, action: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = action
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.what(x) if x.sum() < FAR else x * 1


def doubled(x: Tensor) -> Tensor:
    return x.mul_(2)


def doubled_past_autograd(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x * 3


def sometimes_doubled(x: Tensor) -> Tensor:
    return x * 3 if x.sum() > 0 else x.mul_(2) * 3


def sometimes_itself(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x * 2


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = Sevenfold.apply(x)
    return y, y


def net(inner: Callable[[], nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.fc = nn.Linear(4, 4)
        self.inner = inner()
        self.double()

    return type("Net", (nn.Module,), {"__init__": init, "forward": forward})


def warm_up(self: Any, x: Tensor) -> Tensor:
    self.inner(self.fc(x))
    return self.fc(x)


def warm_up_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.inner(x)
    return self.fc(x)


def only_its_shape(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) * self.inner(self.fc(x)).shape[0]


def buffer_between(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    view = self.inner.n[:2]
    a = self.inner(self.fc(x))
    b = self.fc(x) * self.inner.n.clone()
    self.inner.n.mul_(2)
    c = self.inner(a.tanh()) + view.sum()
    return a, b, c, self.inner.n * view.sum()


def plain(self: Any, x: Tensor) -> Tensor:
    return self.fc(self.inner(self.fc(x)))


def first(self: Any, x: Tensor) -> Tensor:
    return self.fc(self.inner(x))


def residual(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    return h + self.inner(h)


def changed(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.fc(x)).add_(1) * 2


def changed_beside(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    y = self.inner(h)
    y.add_(1)
    return y * 2 + h.sum()


def input_changed(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    part = h[:3]
    y = self.inner(h)
    h.add_(1)
    return y.sum() + h.sum() + part


def one_of_two_changed(self: Any, x: Tensor) -> Tensor:
    a, b = self.inner(self.fc(x))
    a.add_(1)
    return a + b


def buffer_changed(self: Any, x: Tensor) -> Tensor:
    inner_output = self.inner(self.fc(x))
    self.inner.n.add_(1)
    return self.fc(x) * inner_output


def giving(action: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Doing(action)


class GivingBuffer(Counter):
    def forward(self, x: Tensor) -> Tensor:
        return self.n if x.sum() < FAR else x


# What runs in a loop, what forward does, and which it then is: the submodule, or all of forward.
KEPT: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str]] = {
    "buffer with a gradient": (lambda: Flagging(True), plain, "inner"),
    "buffer with a gradient, captured": (lambda: Flagging(False), plain, ""),
    "buffer with a gradient from the start": (lambda: Flagging(True, True), plain, "inner"),
    "buffer with a gradient from the start, captured": (lambda: Flagging(False, True), plain, ""),
    "unused": (Counter, warm_up, "inner"),
    "unused, of nothing": (Silent, warm_up_without_gradients, "inner"),
    "unused but for its shape": (Counter, only_its_shape, "inner"),
    "unused average": (lambda: nn.BatchNorm1d(4, momentum=None), warm_up, "inner"),
    "unused statistics": (lambda: nn.BatchNorm1d(4), warm_up_without_gradients, ""),
    "unused power iteration": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        warm_up,
        "",
    ),
    "buffer between": (Counter, buffer_between, "inner"),
    "buffer assigned after its use": (Assigning, plain, "inner"),
    "no tensor": (Table, lambda self, x: self.fc(x) + self.inner(2)[:1], "inner"),
    "shared input": (giving(lambda x: Sevenfold.apply(x)), first, "inner"),
    "input given back": (giving(lambda x: x), changed, "inner"),
    "input given back and used": (giving(lambda x: x), changed_beside, "forward"),
    "view given back and input changed": (giving(lambda x: x[:2]), input_changed, "forward"),
    "one tensor twice": (giving(twice), one_of_two_changed, "forward"),
    "buffer given back": (GivingBuffer, buffer_changed, "forward"),
    "sometimes the input": (giving(sometimes_itself), changed, "inner"),
    "write into the input": (giving(doubled), plain, "inner"),
    "write into an input that is used": (giving(lambda x: x.mul_(2) * 3), residual, "forward"),
    "write past autograd": (giving(doubled_past_autograd), plain, "inner"),
    "write past autograd that is used": (giving(doubled_past_autograd), residual, "forward"),
}


@pytest.mark.parametrize("name", KEPT)
def test_members_own_code_is_as_alone(name: str) -> None:
    inner, forward, island = KEPT[name]
    make = net(inner, forward)
    array = assert_alone([make() for _ in range(3)], normal(5, 4), hf.stacked(normal(3, 5, 4)))
    (part, *_) = array.report().parts
    assert looped(part) == ({island} if island else set())
    assert "self-check passed" in part.check or island == "forward"


@pytest.mark.parametrize("loops", [True, False])
def test_a_flag_of_a_buffer_that_the_next_call_reads_is_refused(loops: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = 2 if self.inner.n.requires_grad else 1
        return self.fc(self.inner(x)) * scale

    make = net(lambda: Flagging(loops), forward)
    with pytest.raises(hf.FusionError, match=r"inner\.n\.requires_grad, with which output 0 differs in another call"):
        hf.fuse([make() for _ in range(2)])(normal(5, 4))


def past_autograd(x: Tensor) -> Tensor:
    if x.sum() < 0:
        x.data.mul_(2)
    return x * 3


def through_numpy(x: Tensor) -> Tensor:
    if x.sum() < 0:
        x.detach().numpy()[0] = 7.0
    return x * 3


def through_out(x: Tensor) -> Tensor:
    if x.sum() < 0:
        torch.add(x, 1, out=x)
    return x * 3


def through_a_view(x: Tensor) -> Tensor:
    if x.sum() < 0:
        x.view(-1)[:2].zero_()
    return x * 3


@pytest.mark.parametrize("write", [past_autograd, through_numpy, through_out, through_a_view])
@pytest.mark.parametrize("forward", [first, lambda self, x: self.inner(x)], ids=["inner", "all"])
@pytest.mark.parametrize("stacked", [False, True], ids=["shared", "stacked"])
def test_a_later_write_into_the_callers_tensor_is_refused(
    write: Callable[[Tensor], Tensor], forward: Callable[..., Any], stacked: bool
) -> None:
    make = net(giving(write), forward)
    array = hf.fuse([make() for _ in range(3)])
    x = normal(3, 5, 4).abs() if stacked else normal(5, 4).abs()
    array(hf.stacked(x) if stacked else x)
    if stacked:
        # Member 1 alone takes the other branch.
        x[1] *= -1
    else:
        x *= -1
    before = x.clone()
    with pytest.raises(hf.FusionError, match="writes into its input"):
        array(hf.stacked(x) if stacked else x)
    assert torch.equal(x, before)


def test_a_later_write_into_what_others_read_is_refused() -> None:
    make = net(giving(sometimes_doubled), lambda self, x: x + self.inner(x * 1) + x)
    array = hf.fuse([make() for _ in range(2)])
    x = normal(2, 5, 4).abs()
    array(hf.stacked(x))
    x[1] *= -1
    with pytest.raises(hf.FusionError, match=r"inner of model 1 .* writes into its input"):
        array(hf.stacked(x))


def test_a_later_alias_that_matters_is_refused() -> None:
    make = net(giving(lambda x: x * 2 if x.sum() > 0 else x), lambda self, x: changed_beside(self, x))
    array = hf.fuse([make() for _ in range(2)])
    for model in range(2):
        with torch.no_grad():
            array.get_parameter("fc.weight")[model].copy_(torch.eye(4))
            array.get_parameter("fc.bias")[model].zero_()
    x = normal(2, 5, 4).abs()
    array(hf.stacked(x))
    x[1] *= -1
    with pytest.raises(hf.FusionError, match="inner of model 1 gives back its input"):
        array(hf.stacked(x))


def test_outputs_of_a_loop_are_the_callers() -> None:
    make = net(giving(lambda x: x), lambda self, x: self.inner(x))
    array, x = hf.fuse([make() for _ in range(2)]), normal(5, 4)
    before = x.clone()
    array(x).add_(1)
    assert torch.equal(x, before)


def test_one_buffer_for_all_members_is_not_written() -> None:
    make, buffer = net(Counter, plain), torch.zeros(4, dtype=torch.float64)
    models: list[Any] = [make() for _ in range(2)]
    for model in models:
        model.inner.n = buffer
    with pytest.raises(hf.FusionError, match="inner is one object in all members"):
        hf.fuse(models)(normal(5, 4))


def test_a_step_keeps_unused_calls() -> None:
    make = net(Counter, warm_up)
    models: list[Any] = [make() for _ in range(2)]
    array = hf.fuse(models)
    opt = hf.optim.SGD(array.parameters(), lr=0.1)
    step, x = hf.train_step(array, F.mse_loss, opt, compile=True), torch.ones(5, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="inner runs in a loop over members"):
        step(x, x)
    for _ in range(2):
        step(x, x)
    alone = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for _ in range(3):
        alone.zero_grad()
        sum(F.mse_loss(model(x), x) for model in models).backward()  # type: ignore[union-attr]
        alone.step()
    torch.testing.assert_close(array.get_buffer("inner.n"), torch.stack([model.inner.n for model in models]))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).to_sparse()


def test_sparse_results_that_need_a_gradient_are_refused() -> None:
    array = hf.fuse([Sparse(), Sparse()])
    with pytest.raises(hf.FusionError, match=r"layout torch.sparse_coo that needs a gradient.*to_dense"):
        array(torch.ones(2, 4))


class Switching(nn.Module):
    """Freezes a part while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.last.requires_grad_(False)
        x = self.last(self.first(x))
        self.last.requires_grad_(True)
        return x


def test_a_flag_that_forward_switches_off_and_on_is_refused() -> None:
    fused = hf.fuse([Switching() for _ in range(2)])
    with pytest.raises(hf.FusionError, match="switches requires_grad of a parameter"):
        fused(torch.randn(4, 3))
