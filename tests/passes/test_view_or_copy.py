"""Writes next to operators that give a view or a copy, depending on how an input lies in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf

# Of a [N, 4, 6, 6] tensor.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda v: v.flatten(2)[:, :, :4],
    "Flatten": lambda v: nn.Flatten()(v),
    "reshape": lambda v: v.reshape(v.shape[0], -1)[:, ::3],
    "reshape of transposed": lambda v: v.mT.reshape(v.shape[0], -1),
    "ravel": lambda v: v.ravel(),
    "reshape_as": lambda v: v.transpose(1, 2).reshape_as(v),
    "contiguous": lambda v: v.contiguous(),
    "contiguous, channels last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "to channels last": lambda v: v.to(memory_format=torch.channels_last),
    "to its dtype": lambda v: v.to(v.dtype),
    "flatten of permuted": lambda v: v.permute(0, 2, 3, 1).flatten(0, 2),
    "always a view": lambda v: v.transpose(0, 1)[1:],
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "samples last": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


class Writes(nn.Module):
    """Writes into a tensor, or into what ``view`` makes of it, and reads both."""

    def __init__(self, view: Callable[[Tensor], Tensor], into_view: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.float64))
        self.view, self.into_view = view, into_view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x * self.scale
        part = self.view(whole)
        (part if self.into_view else whole).sin_()
        return whole * 2, part * 3


@pytest.mark.parametrize("into_view", [True, False], ids=["into the view", "into the tensor"])
@pytest.mark.parametrize("view", VIEWS)
def test_each_memory_layout_has_its_own_program(view: str, into_view: bool) -> None:
    models = [Writes(VIEWS[view], into_view) for _ in range(2)]
    fused = hf.fuse(models)
    for size in (3, 5):
        for layout in LAYOUTS:
            x = LAYOUTS[layout](torch.randn(size, 4, 6, 6, dtype=torch.float64))
            for inputs in (x, hf.stacked([x, x])):
                outputs = fused(inputs)
                rows = [x, x] if inputs is x else list(inputs.tensor)
                for k, output in enumerate(outputs):
                    expected = torch.stack([model(row)[k] for model, row in zip(models, rows, strict=True)])
                    torch.testing.assert_close(output, expected, msg=f"{layout}, output {k}")


def test_a_compiled_step_follows_the_layout() -> None:
    models = [Writes(VIEWS["flatten"], True) for _ in range(2)]
    fused = hf.fuse(models)

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return (output[0].mean() - target) ** 2 + output[1].sum()

    step = hf.train_step(fused, loss, hf.optim.SGD(fused.parameters(), lr=0.0), compile=True)
    target = torch.zeros((), dtype=torch.float64)
    for layout in ("contiguous", "samples last", "contiguous"):
        x = LAYOUTS[layout](torch.randn(3, 4, 6, 6, dtype=torch.float64))
        expected = torch.stack([loss(model(x), target) for model in models])
        torch.testing.assert_close(step(x, target), expected.detach())


def test_inputs_of_any_layout_share_a_program_where_no_write_depends_on_it() -> None:
    models = [
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)) for _ in range(2)
    ]
    fused = hf.fuse(models)
    x = torch.randn(3, 4, 6, 6)
    fused(x)
    fused(x.contiguous(memory_format=torch.channels_last))
    assert len(fused._compiler.programs) == 1
