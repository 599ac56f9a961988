"""Forwards that write into their own parameters: projections, averages of a student, norms that are bounded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from tests.alone import assert_alone, call, looped, normal
from tests.trained import Way, assert_same, machine, momentum, plain, planned, task


def assign_data(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(min=0)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(min=0)


@torch.no_grad()
def clamp(weight: nn.Parameter) -> None:
    weight.clamp_(min=0)


@torch.no_grad()
def copy_relu(weight: nn.Parameter) -> None:
    weight.copy_(weight.relu())


@torch.no_grad()
def bound_rows(weight: nn.Parameter) -> None:
    norms = weight.norm(dim=1, keepdim=True)
    weight.mul_(norms.clamp(max=0.5) / norms)


@torch.no_grad()
def clamp_first_row(weight: nn.Parameter) -> None:
    weight[0].clamp_(min=0)


@torch.no_grad()
def set_where_negative(weight: nn.Parameter) -> None:
    weight[weight < 0] = 0


@torch.no_grad()
def clamp_out(weight: nn.Parameter) -> None:
    torch.clamp(weight, min=0, out=weight)


@torch.no_grad()
def keep_all(weight: nn.Parameter) -> None:
    """A write that changes no value."""
    weight.clamp_(min=-1e9)


def renorm(weight: nn.Parameter) -> None:
    weight.data = torch.renorm(weight.data, 2, 0, 0.5)


def initialise(weight: nn.Parameter) -> None:
    nn.init.constant_(weight, 0.5)


PROJECTIONS = (
    assign_data,
    clamp_data,
    clamp,
    copy_relu,
    bound_rows,
    clamp_first_row,
    set_where_negative,
    clamp_out,
    keep_all,
    renorm,
    initialise,
)


class Convex(nn.Module):
    """Input convex: its inner weights are projected in each forward. ``loops``: it runs member by member."""

    def __init__(self, project: Callable[[nn.Parameter], None], loops: bool = False, times: int = 1) -> None:
        super().__init__()
        self.project, self.loops, self.times = project, loops, times
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Any = 0
        for _ in range(self.times):
            self.project(self.inner.weight)
            h = F.softplus(self.inner(F.softplus(self.first(x))))
            y = y + self.last(h if not self.loops or h.sum() < 1e9 else -h)
        return y + self.inner.weight.square().sum()  # type: ignore[no-any-return]


class Projecting(Convex):
    """Projects after it has used the weights."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.softplus(self.inner(F.softplus(self.first(x)))))
        self.project(self.inner.weight)
        return y


def average(teacher: nn.Module, student: nn.Module) -> None:
    for target, source in zip(teacher.parameters(), student.parameters(), strict=True):
        target.data = target.data * 0.9 + source.data * 0.1


@torch.no_grad()
def average_in_place(teacher: nn.Module, student: nn.Module) -> None:
    for target, source in zip(teacher.parameters(), student.parameters(), strict=True):
        target.mul_(0.9).add_(source, alpha=0.1)


@torch.no_grad()
def average_by_foreach(teacher: nn.Module, student: nn.Module) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


class Distilling(nn.Module):
    """A student and its average, which starts as a copy of it, and learns nothing itself."""

    def __init__(self, average: Callable[[nn.Module, nn.Module], None], first: bool = True) -> None:
        super().__init__()
        self.average, self.first = average, first
        self.student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", normal(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.first:
                self.average(self.teacher, self.student)
            target = self.teacher(x * 0.9)
            if not self.first:
                self.average(self.teacher, self.student)
        logits = self.student(x) @ self.queue.clone()
        self.queue[:, :2] = target[:2].T
        return logits - target.sum(1, keepdim=True)


class Bounded(nn.Module):
    def __init__(self, table: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.table, self.last = table(6, 4, max_norm=0.5), nn.Linear(4, 2)
        self.double()

    def forward(self, indices: Tensor) -> Tensor:
        return self.last(self.table(indices))  # type: ignore[no-any-return]


# What forward does, its input, and what runs in a loop.
WRITERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    **{f.__name__: (lambda f=f: Convex(f), lambda: normal(5, 4), set()) for f in PROJECTIONS},
    **{
        f"{f.__name__} in a loop": (lambda f=f: Convex(f, loops=True), lambda: normal(5, 4), {"forward"})
        for f in (assign_data, clamp_data, clamp, clamp_first_row)
    },
    "three times": (lambda: Convex(clamp_data, times=3), lambda: normal(5, 4), set()),
    "below what is captured": (
        lambda: nn.Sequential(nn.Linear(4, 4).double(), Convex(assign_data, loops=True)),
        lambda: normal(5, 4),
        {"1"},
    ),
    "after its use": (lambda: Projecting(assign_data), lambda: normal(5, 4), set()),
    "after its use, before its backward": (lambda: Projecting(clamp_data), lambda: normal(5, 4), {"forward"}),
    "teacher": (lambda: Distilling(average), lambda: normal(5, 4), set()),
    "teacher in place": (lambda: Distilling(average_in_place), lambda: normal(5, 4), set()),
    "teacher, later": (lambda: Distilling(average_in_place, first=False), lambda: normal(5, 4), set()),
    "teacher by foreach": (lambda: Distilling(average_by_foreach), lambda: normal(5, 4), {"forward"}),
    "embedding": (lambda: Bounded(nn.Embedding), lambda: torch.randint(6, (5, 3)), set()),
    "bag": (lambda: Bounded(nn.EmbeddingBag), lambda: torch.randint(6, (5, 3)), set()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_parameters_have_what_forward_writes(name: str) -> None:
    make, draw, expected = WRITERS[name]
    fused = assert_alone([make() for _ in range(3)], *[call(draw()) for _ in range(3)])
    (part, *_) = fused.report().parts
    assert looped(part) == expected
    assert "self-check passed" in part.check or "forward" in expected


def test_a_loop_that_writes_lies_in_the_memory_of_the_array() -> None:
    """To look for writes is not to address memory, for which each member would get copies."""
    fused, x = hf.fuse([Convex(clamp, loops=True) for _ in range(2)]), normal(5, 4)
    fused(x)
    assert not any(operation.addresses for operation in fused.compiled(Arguments.of((x,), {})).opaque)


@pytest.mark.parametrize("name", ["clamp", "clamp in a loop", "teacher", "embedding"])
def test_evaluation_writes_as_well(name: str) -> None:
    make, draw, _ = WRITERS[name]
    models = [make().eval() for _ in range(3)]
    with torch.no_grad():
        assert_alone(models, draw(), draw(), grads=False)


def train_alone(model: nn.Module, batches: list[Tensor]) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("name", ["bound_rows", "teacher in place", "embedding"])
def test_a_compiled_step_writes_as_well(name: str) -> None:
    make, draw, _ = WRITERS[name]
    models, batches = [make() for _ in range(2)], [draw() for _ in range(4)]
    fused = hf.fuse(models)
    step = hf.train_step(
        fused,
        lambda y, _: y.square().mean(),
        hf.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9),
        parts=1,
        compile=True,
    )
    for x in batches:
        step(x, x)
    assert "one program" in str(step.report())
    for index, model in enumerate(models):
        train_alone(model, batches)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(fused.state_dict()[key][index], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("name", ["bound_rows", "teacher in place", "teacher by foreach"])
def test_a_step_that_does_not_count_writes_nothing(name: str, bad: int) -> None:
    make, draw, _ = WRITERS[name]
    pop = hf.Population(
        [make() for _ in range(2)],
        optimizer=lambda parameters: hf.optim.SGD(parameters, lr=0.1),
        loss=lambda y, t: (y * t).square().mean(),
        compile=False,
    )
    for step in range(4):
        before = {key: value.clone() for key, value in pop.fused.state_dict().items()}
        scale = torch.ones(2, 1, dtype=torch.float64)
        if step == bad:
            scale[1] = torch.nan
        pop.step(draw(), hf.stacked(scale))
        changed = {key for key, value in pop.fused.state_dict().items() if not torch.equal(value[1], before[key][1])}
        assert bool(changed) == (step < bad), changed


@pytest.mark.parametrize("name", ["bound_rows", "teacher", "teacher by foreach", "below what is captured"])
def test_tasks_write_as_well(name: str) -> None:
    make, draw, _ = WRITERS[name]
    array = hf.fuse([make() for _ in range(3)], verify=False)
    loader = [(draw(), torch.zeros(())) for _ in range(3)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean() + target

    def evaluate(_: Callable[..., Tensor]) -> None:
        array.eval()
        with torch.no_grad():
            array(loader[0][0])
        array.train()

    expected = plain(array, Way(momentum), loader, loss, evaluate)
    sharded = task(array, Way(momentum), loader, loss=loss, eval_loader=loader[:1])
    for resident in (True, False):
        assert_same([array], [sharded], [expected], machine(), planned([sharded], machine(), [1], [resident]))
    with pytest.raises(hf.PlanError, match=r"writes into the parameter .* which shards of it cannot follow"):
        hf.train([sharded], machine(), plan=planned([sharded], machine(), [3], [False]))


def rarely_written(weight: nn.Parameter) -> None:
    if weight.abs().max() > 5:
        weight.data = weight.data / 2


def test_a_loop_writes_what_it_did_not_when_it_was_captured() -> None:
    models = [Convex(rarely_written) for _ in range(2)]
    alone = copy.deepcopy(models)
    fused, x = hf.fuse(models), normal(5, 4)
    for scale in (1.0, 20.0, 1.0):
        with torch.no_grad():
            fused.get_parameter("inner.weight").mul_(scale)
            for model in alone:
                model.inner.weight.mul_(scale)
        torch.testing.assert_close(fused(x), torch.stack([model(x) for model in alone]), rtol=1e-9, atol=0)
        torch.testing.assert_close(
            fused.get_parameter("inner.weight"), torch.stack([m.inner.weight for m in alone]), rtol=1e-9, atol=0
        )


class Late(nn.Module):
    """Gets a layer and a buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer, self.scale = nn.Linear(x.shape[1], 3).double(), normal(3)
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [Late, lambda: nn.LazyLinear(3).double(), lambda: nn.Sequential(nn.LazyBatchNorm1d()).double()]
)
def test_tensors_created_by_a_first_call_are_present_after_it(make: Callable[[], nn.Module]) -> None:
    def called() -> nn.Module:
        model = make()
        model(normal(5, 4))
        return model

    with pytest.raises(hf.FusionError, match="call each model once before fusing"):
        hf.fuse([make() for _ in range(2)])(normal(5, 4))
    assert_alone([called() for _ in range(2)], normal(5, 4), normal(5, 4))
    assert hf.build(called, seeds=[0, 1])(normal(5, 4)).shape[:2] == (2, 5)


def replaced(self: Any, x: Tensor) -> Tensor:
    self.inner.weight = nn.Parameter(self.inner.weight.clamp(min=0))
    return x


def shared(self: Any, x: Tensor) -> Tensor:
    self.inner.weight.data = self.first.weight.data
    return x


def of_another_shape(self: Any, x: Tensor) -> Tensor:
    self.inner.weight.data = self.inner.weight.data[:2]
    return x


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (replaced, "makes inner.weight another parameter"),
        (shared, "makes .* share memory; assign a clone"),
        (of_another_shape, "changes shape of inner.weight"),
    ],
)
def test_reassignments_that_no_stack_can_follow_are_refused(forward: Callable[..., Tensor], message: str) -> None:
    models = [type("Refused", (Convex,), {"forward": forward})(clamp) for _ in range(2)]
    with pytest.raises(hf.FusionError, match=message):
        hf.fuse(models)(normal(5, 4))


class Moving(nn.Module):
    """With a buffer that forward moves to another device."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", normal(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.offset
        self.offset = self.offset.to("meta")
        return y


def test_a_buffer_that_moves_to_another_device_is_refused() -> None:
    with pytest.raises(hf.FusionError, match="changes device of offset from cpu to meta"):
        hf.fuse([Moving() for _ in range(2)])(normal(5, 4))


def test_a_parameter_of_all_members_is_not_written() -> None:
    models = [Distilling(average_in_place) for _ in range(2)]
    models[1].teacher = models[0].teacher
    with pytest.raises(hf.FusionError, match="is one object in all members"):
        hf.fuse(models)(normal(5, 4))
