from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import FusionError
from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.ops import loss
from hfusion.ops.norm import batch_norm_alone
from hfusion.ops.rule import MemberScalars
from hfusion.passes.batch import batch
from tests.alone import assert_trained_alone
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten

STATISTICS = (t(3, grad=False), t(3, kind="positive", grad=False))

CASES = [
    Case(aten.batch_norm.default, (t(4, 3, 2, 3), t(3), None, *STATISTICS, False, 0.1, 1e-5, False), members=(1, 3)),
    Case(aten.instance_norm.default, (t(4, 3, 5), None, t(3), *STATISTICS, False, 0.1, 1e-5, False), members=(3,)),
    Case(aten.batch_norm.default, (t(4, 3, 2, 3), t(3), t(3), None, None, True, 0.1, 1e-5, False)),
    Case(aten.batch_norm.default, (t(4, 3, 5), None, t(3), None, None, True, 0.1, 1e-5, False)),
    Case(aten.batch_norm.default, (t(4, 3), t(3), None, None, None, True, 0.1, 1e-3, False)),
    Case(aten.batch_norm.default, (t(4, 3, 2, 2, 2), None, None, None, None, True, 0.1, 1e-3, False)),
    # Of one dim torch takes empty tensors only.
    Case(aten.batch_norm.default, (t(0), None, None, None, None, True, 0.1, 1e-5, False)),
    Case(aten.instance_norm.default, (t(4, 6, 3, 2), t(6), t(6), None, None, True, 0.1, 1e-5, False)),
    Case(aten.instance_norm.default, (t(4, 3, 5), None, None, None, None, True, 0.1, 1e-5, False)),
    Case(aten.group_norm.default, (t(4, 6, 3, 2), 3, t(6), t(6))),
    Case(aten.group_norm.default, (t(4, 6), 2, t(6), t(6), 1e-3)),
    Case(aten.group_norm.default, (t(4, 6, 5), 2)),
    Case(aten.layer_norm.default, (t(4, 3, 5), [5], t(5), t(5))),
    Case(aten.layer_norm.default, (t(4, 3, 5), [3, 5], t(3, 5), None, 1e-3)),
    Case(aten.layer_norm.default, (t(5), [5], t(5), t(5))),
    Case(aten.layer_norm.default, (t(4, 3), [3])),
    Case(aten.layer_norm.default, (t(2, 64, 128), [128], t(128), t(128)), members=(2,)),
    Case(aten.rms_norm.default, (t(4, 3, 5), [5], t(5))),
    Case(aten.rms_norm.default, (t(4, 3, 5), [3, 5], t(3, 5), 1e-3)),
    Case(aten.rms_norm.default, (t(4, 5), [5])),
    Case(aten.rms_norm.default, (t(2, 64, 128), [128], t(128)), members=(2,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm(case: Case) -> None:
    check(case)


MEMBERS, CHANNELS = 3, 4
SHAPES = [(5, 4), (5, 4, 6), (5, 4, 2, 3)]
LAYOUTS = list(itertools.product(list(Layout), [Layout.SHARED, Layout.STACKED], [Layout.SHARED, Layout.STACKED]))


def statistics(layout: Layout) -> tuple[Tensor, Tensor]:
    shape = (CHANNELS,) if layout is Layout.SHARED else (MEMBERS, CHANNELS)
    return torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64) + 0.5


def rows(x: Tensor, layout: Layout) -> list[Tensor]:
    return [x.clone()] * MEMBERS if layout is Layout.SHARED else [row.clone() for row in x]


def arranged(x: Tensor, layout: Layout) -> Any:
    return x if layout in (Layout.SHARED, Layout.STACKED) else CONVERSIONS[Layout.STACKED, layout](x, MEMBERS)


def run(
    target: Any,
    shape: tuple[int, ...],
    layouts: tuple[Layout, Layout, Layout],
    training: bool,
    scalars: Any = (0.1, 1e-5),
) -> None:
    """Outputs and running statistics after two calls equal those of single members."""
    of_input, of_weight, of_running = layouts
    x = torch.randn(*(() if of_input is Layout.SHARED else (MEMBERS,)), *shape, dtype=torch.float64)
    weight, bias = statistics(of_weight)
    mean, var = statistics(of_running)
    first = [scalar.values[0] if isinstance(scalar, MemberScalars) else scalar for scalar in scalars]
    case = Case(target, (t(*shape), *[t(CHANNELS)] * 4, training, *first, False))
    examples = [torch.zeros(shape, dtype=torch.float64), *[torch.ones(CHANNELS, dtype=torch.float64)] * 4]
    graph = member_graph(case, examples)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["arguments"] = ((*node.args[:6], *scalars, False), {})
    module = batch(graph, [of_input, of_weight, of_weight, of_running, of_running], MEMBERS)
    singles = [rows(value, layout) for value, layout in ((mean, of_running), (var, of_running))]
    for _ in range(2):
        (output,) = module(arranged(x, of_input), weight, bias, mean, var)
        xs, weights, biases = rows(x, of_input), rows(weight, of_weight), rows(bias, of_weight)
        stacked_running = of_running is not Layout.SHARED
        expected = []
        for b in range(MEMBERS):
            options = [s.values[b] if isinstance(s, MemberScalars) else s for s in scalars]
            running = [single[b] if stacked_running or b == 0 else single[b].clone() for single in singles]
            expected.append(target(xs[b], weights[b], biases[b], *running, training, *options, False))
        expected_output = torch.stack(expected)
        torch.testing.assert_close(output.expand_as(expected_output), expected_output, rtol=1e-9, atol=1e-11)
    for value, single in zip((mean, var), singles, strict=True):
        expected_output = single[0] if of_running is Layout.SHARED else torch.stack(single)
        torch.testing.assert_close(value, expected_output, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda mix: "-".join(layout.value for layout in mix))
def test_batch_norm_statistics(layouts: Any, shape: tuple[int, ...], training: bool) -> None:
    run_or_refuse(aten.batch_norm.default, shape, layouts, training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda mix: "-".join(layout.value for layout in mix))
def test_instance_norm_statistics(layouts: Any, training: bool) -> None:
    run_or_refuse(aten.instance_norm.default, (5, 4, 6), layouts, training)


def run_or_refuse(target: Any, shape: Any, layouts: Any, training: bool) -> None:
    if training and layouts[2] is Layout.SHARED:
        with pytest.raises(FusionError, match="one tensor for all 3 models"):
            run(target, shape, layouts, training)
    else:
        run(target, shape, layouts, training)


@pytest.mark.parametrize(
    "scalars", [(MemberScalars((0.1, 0.3, 0.9)), 1e-5), (0.1, MemberScalars((1e-5, 1e-3, 1e-1)))], ids=str
)
@pytest.mark.parametrize("target", [aten.batch_norm.default, aten.instance_norm.default], ids=str)
@pytest.mark.parametrize("layout", list(Layout))
def test_scalars_of_each_member(layout: Layout, target: Any, scalars: Any) -> None:
    run(target, (5, 4, 6), (layout, Layout.STACKED, Layout.STACKED), True, scalars)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 5, 6, 3)], ids=str)
def test_batch_norm_of_a_member_that_lies_channel_by_channel(shape: tuple[int, ...], training: bool) -> None:
    """As the product of one member gives it: the same values, gradients and statistics, in the same order of memory."""
    sample = torch.randn(shape, dtype=torch.float64).transpose(0, 1).contiguous().transpose(0, 1)
    weight, bias, seed = torch.randn(5).double(), torch.randn(5).double(), torch.randn(shape).double()
    outcomes = []
    for norm, x in ((batch_norm_alone, sample), (torch.batch_norm, sample.contiguous())):
        leaf, mean, var = x.detach().requires_grad_(), torch.zeros(5).double(), torch.ones(5).double()
        y = norm(leaf, weight, bias, mean, var, training, 0.1, 1e-5, False)
        outcomes.append((y, torch.autograd.grad(y, leaf, seed)[0], mean, var))
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    assert outcomes[0][0].stride() == sample.stride()


@pytest.mark.parametrize("members", [1, 2, 20])
@pytest.mark.parametrize("dims", [2, 3])
def test_group_norm_of_what_needs_no_gradient(members: int, dims: int) -> None:
    """In channels_last, as a frozen convolution gives it, torch's own backward would crash the process."""
    conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
    torch.manual_seed(0)
    models = [nn.Sequential(conv(4, 4, 3).requires_grad_(False), nn.GroupNorm(2, 4)).double() for _ in range(members)]
    array, x = hf.fuse(models), torch.randn(3, 4, *[6] * dims, dtype=torch.float64)
    array(x).sin().sum().backward()
    for member, model in enumerate(models):
        model(x).sin().sum().backward()
        for name, param in array.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(param.grad[member], model.get_parameter(name).grad)


class Twice(nn.Module):
    """Calls one normalization for features, which need gradients, and for the input of all members, which does not."""

    def __init__(self, norm: nn.Module, uses_both: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.used = nn.Conv1d(4, 4, 3, padding=1), norm, uses_both

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(self.conv(x)), self.norm(x)
        return first + second if self.used else first


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("uses_both", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda size: nn.InstanceNorm1d(size, track_running_stats=True)])
def test_a_norm_that_is_called_again_before_its_backward(norm: Any, uses_both: bool, compiled: bool) -> None:
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    models = [Twice(norm(4), uses_both).double() for _ in range(3)]
    assert_trained_alone(models, F.mse_loss, [(x, x)] * 3, compile=compiled)


NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = (NONE, MEAN, SUM)


def labels(*shape: int, high: int = 4) -> Draw:
    return t(*shape, kind="integers", high=high)


def fixed(*shape: int, kind: str = "normal") -> Draw:
    return t(*shape, kind=kind, grad=False)


WEIGHTS = fixed(4, kind="positive")
FEW = (1, 3)

LOSSES = [
    *(
        case
        for r in REDUCTIONS
        for case in (
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), None, r)),
            Case(aten.multi_margin_loss.default, (t(), t(kind="integers", high=1), 1, 1, None, r), members=FEW),
            Case(aten.multilabel_margin_loss.default, (t(), t(kind="integers", high=1), r), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), None, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), None, r, 2, 0.1), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 20), labels(5, high=20), None, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), WEIGHTS, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), WEIGHTS, r, 2, 0.1), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), t(5, 4, kind="unit"), None, r), members=FEW),
            Case(
                aten.cross_entropy_loss.default,
                (t(2, 4, 3), t(2, 4, 3, kind="unit"), WEIGHTS, r, -100, 0.1),
                members=FEW,
            ),
            Case(aten.cross_entropy_loss.default, (t(4), t(4, kind="unit"), None, r), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(4), labels(), None, r), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(4), labels(), WEIGHTS, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(2, 4, 3), labels(2, 3), None, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(2, 4, 3, 2), labels(2, 3, 2), WEIGHTS, r), members=FEW),
            Case(aten.nll_loss_nd.default, (t(5, 4), labels(5), WEIGHTS, r, 2), members=FEW),
            Case(aten.nll_loss_nd.default, (t(4), labels(), None, r), members=FEW),
            Case(aten.nll_loss_nd.default, (t(2, 4, 3), labels(2, 3), None, r, 2), members=FEW),
            Case(aten.nll_loss.default, (t(5, 4), labels(5), None, r), members=FEW),
            Case(aten.nll_loss2d.default, (t(2, 4, 3, 2), labels(2, 3, 2), WEIGHTS, r, 2), members=FEW),
            Case(aten.mse_loss.default, (t(3, 4), t(3, 4), r)),
            Case(aten.mse_loss.default, (t(), t(), r), members=FEW),
            Case(aten.l1_loss.default, (t(3, 4), t(3, 4), r), members=FEW),
            Case(aten.smooth_l1_loss.default, (t(3, 4), t(3, 4), r, 0.5), members=FEW),
            Case(aten.huber_loss.default, (t(3, 4), t(3, 4), r, 0.5), members=FEW),
            Case(aten.binary_cross_entropy.default, (t(3, 4, kind="unit"), fixed(3, 4, kind="unit"), None, r)),
            Case(
                aten.binary_cross_entropy.default,
                (t(3, 4, kind="unit"), fixed(3, 4, kind="unit"), fixed(4, kind="positive"), r),
                members=FEW,
            ),
            Case(aten.binary_cross_entropy_with_logits.default, (t(3, 4), t(3, 4, kind="unit"), None, None, r)),
            Case(
                aten.binary_cross_entropy_with_logits.default,
                (t(3, 4), t(3, 4, kind="unit"), fixed(3, 1, kind="positive"), fixed(4, kind="positive"), r),
                members=FEW,
            ),
            Case(aten.kl_div.default, (t(3, 4), t(3, 4, kind="unit"), r), members=FEW),
            Case(aten.kl_div.default, (t(3, 4), t(3, 4), r), {"log_target": True}, members=FEW),
            Case(aten.poisson_nll_loss.default, (t(3, 4), t(3, 4, kind="positive"), True, True, 1e-8, r), members=FEW),
            Case(aten.soft_margin_loss.default, (t(3, 4), t(3, 4, kind="sign"), r), members=FEW),
            Case(aten.hinge_embedding_loss.default, (t(3, 4), t(3, 4, kind="sign"), 1.0, r), members=FEW),
            Case(aten.margin_ranking_loss.default, (t(3), t(3), t(3, kind="sign"), 0.5, r), members=FEW),
            Case(aten.triplet_margin_loss.default, (t(3, 4), t(3, 4), t(3, 4), 1.0, 2.0, 1e-6, True, r), members=FEW),
            Case(aten.triplet_margin_loss.default, (t(4), t(4), t(4), 1.0, 2.0, 1e-6, False, r), members=FEW),
            Case(aten.cosine_embedding_loss.default, (t(3, 4), t(3, 4), t(3, kind="sign"), 0.5, r), members=FEW),
            Case(aten.cosine_embedding_loss.default, (t(4), t(4), t(kind="sign"), 0.5, r), members=FEW),
            Case(aten.multi_margin_loss.default, (t(3, 4), labels(3), 1, 1.0, WEIGHTS, r), members=FEW),
            Case(aten.multi_margin_loss.default, (t(3, 4), labels(3), 2, 1.0, None, r), members=FEW),
            Case(aten.multilabel_margin_loss.default, (t(3, 4), labels(3, 4), r), members=FEW),
            Case(aten.multilabel_margin_loss.default, (t(4), labels(4), r), members=FEW),
        )
    )
]


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_loss(case: Case) -> None:
    check(case)


def cross_entropy(x: Tensor, target: Tensor, shared: bool, reduction: int = MEAN) -> Tensor:
    return loss.of_indices(aten.cross_entropy_loss.default, reduction, x, target, shared, None, (-100, 0.0))


@pytest.mark.parametrize("feature_major", [True, False])
def test_a_member_whose_targets_are_all_ignored_is_nan_alone(feature_major: bool) -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64).mT if feature_major else torch.randn(2, 3, 4, dtype=torch.float64)
    target = torch.tensor([[0, 1, -100], [-100, -100, -100]])
    losses = cross_entropy(x, target, shared=False)
    assert losses[1].isnan()
    torch.testing.assert_close(losses[0], F.cross_entropy(x[0], target[0]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("feature_major", [True, False])
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_target_out_of_range_raises_as_in_torch(feature_major: bool, wrong: int) -> None:
    x = torch.randn(2, 4, 3).mT if feature_major else torch.randn(2, 3, 4)
    target = torch.tensor([0, wrong, 1])
    with pytest.raises(IndexError, match="out of bounds") as expected:
        F.cross_entropy(x[0], target)
    with pytest.raises(IndexError, match=str(expected.value)):
        cross_entropy(x, target, shared=True)
