"""Buffers whose values forward reads in Python: fused, each member by its own, and never by a value of before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture import export
from hfusion.compiler.fill_scalars import MAX_CAPTURES


class _TopK(nn.Module):
    """An autoencoder that keeps the ``k`` largest features, a buffer."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 12).double(), nn.Linear(12, 6).double()
        self.register_buffer("k", torch.tensor(k))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        values, indices = z.topk(self.k, dim=-1)
        return self.decoder(torch.zeros_like(z).scatter(-1, indices, values.relu()))


class _Item(_TopK):
    """The same, with the number read by `item`, and used as a tensor, too."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        values, indices = z.topk(int(self.k.item()), dim=-1)
        return self.decoder(torch.zeros_like(z).scatter(-1, indices, values)) * self.k


class _Sizes(nn.Module):
    """A buffer of several numbers, read by `tolist`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.register_buffer("k", torch.tensor([first, 6 - first]))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).split(self.k.tolist(), dim=-1)
        return torch.cat([left.relu(), right.tanh()], dim=-1)


class _Written(_TopK):
    """A buffer that forward writes is no number of the member's own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.k.sub_(1)
        return y


class _Nested(nn.Module):
    """Two blocks, each with a number."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_TopK(k), _TopK(k + 1)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class _Reads(nn.Module):
    """A function of hidden features and of a number."""

    def __init__(self, read: Callable[[Tensor, Any], Tensor], k: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12).double()
        self.read = read
        self.register_buffer("k", torch.tensor(k))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x), self.k)


def _joined(z: Tensor, k: Any) -> Tensor:
    return torch.cat([z.topk(k, -1)[0], z.topk(k + 1, -1)[0]], -1).logsumexp(-1)


def _mean(z: Tensor, k: Any) -> Tensor:
    values = z.topk(k, -1)[0]
    return values.sum(-1) / values.shape[-1]


READS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "slice": lambda z, k: z[:, :k].mean(1),
    "pool": lambda z, k: F.avg_pool1d(z[:, None], int(k), stride=1).mean(-1),
    "roll": lambda z, k: z.roll(int(k), 1),
    "repeat": lambda z, k: z.repeat(1, int(k)).sum(1),
    "samples": lambda z, k: z[:k].mean(0) + z.sum(0),
    "remainder": lambda z, k: z * (z.shape[0] % k),
    "branch": lambda z, k: z.sum(-1) if k > 3 else z.mean(-1),
    "branch on a size": lambda z, k: z.topk(k, -1)[0].sum(-1) if z.topk(k, -1)[0].shape[-1] > 3 else z.mean(-1),
    "product": lambda z, k: z[:, :k] @ z[:, :k].T,
    "squeeze": lambda z, k: z[:, :k].squeeze(-1).reshape(z.shape[0], -1).sum(-1),
    "joined": _joined,
    "mean": _mean,
}


def _alone(fused: hf.FusedModule, x: Tensor) -> Tensor:
    return torch.stack([model(x) for model in fused.unfuse()])


def _equal(fused: hf.FusedModule, x: Tensor) -> None:
    torch.testing.assert_close(fused(x), _alone(fused, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [_TopK, _Item, _Sizes, _Nested])
@pytest.mark.parametrize("numbers", [(4, 4, 4), (2, 5, 4)])
def test_fuses(kind: type[nn.Module], numbers: tuple[int, ...]) -> None:
    fused, x = hf.fuse([kind(k) for k in numbers]), torch.randn(8, 6, dtype=torch.float64)
    _equal(fused, x)
    assert "opaque" not in str(fused.report())


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_numbers_go_wherever_they_are_read(read: Callable[[Tensor, Any], Tensor]) -> None:
    fused = hf.fuse([_Reads(read, k) for k in (1, 2, 3, 5, 6)])
    for samples in (8, 8, 5, 3, 16):
        _equal(fused, torch.randn(samples, 6, dtype=torch.float64))


def test_outputs_of_different_sizes_are_refused() -> None:
    fused = hf.fuse([_Reads(lambda z, k: z[:, :k], k) for k in (1, 2, 3, 5)])
    with pytest.raises(hf.FusionError, match="different results for the members"):
        fused(torch.randn(8, 6, dtype=torch.float64))


def test_members_are_not_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    exported = export._exported

    def counted(module: nn.Module, *args: Any) -> Any:
        names.append(type(module).__name__)
        return exported(module, *args)

    monkeypatch.setattr(export, "_exported", counted)
    fused = hf.fuse([_TopK(k) for k in range(1, 13)])
    _equal(fused, torch.randn(8, 6, dtype=torch.float64))
    # Some find the buffer; of the members with their values one is captured, and others prove its places.
    assert len(names) <= 2 + MAX_CAPTURES


def test_follows_writes() -> None:
    fused, x = hf.fuse([_TopK(k) for k in (2, 5, 4)]), torch.randn(8, 6, dtype=torch.float64)
    _equal(fused, x)
    fused.get_buffer("k").fill_(3)
    _equal(fused, x)
    fused[1].k.fill_(7)
    _equal(fused, x)
    fused.k.data[2] = 1
    _equal(fused, x)
    state = {key: value.clone() for key, value in fused.state_dict().items()}
    fused.load_state_dict({**state, "k": torch.tensor([6, 1, 2])})
    _equal(fused, x)
    fused.load_state_dict({**state, "k": torch.tensor([3, 2, 3])}, assign=True)
    _equal(fused, x)
    other = copy.deepcopy(fused)
    other.k.fill_(5)
    _equal(other, x)
    _equal(fused, x)


def test_follows_members() -> None:
    fused, x = hf.fuse([_TopK(k) for k in (2, 5, 4)]), torch.randn(8, 6, dtype=torch.float64)
    _equal(fused, x)
    fused.keep([2, 0])
    _equal(fused, x)
    fused.append([_TopK(7)])
    _equal(fused, x)
    fused.copy(0, 1)
    _equal(fused, x)
    fused.put(0, _TopK(9))
    _equal(fused, x)
    _equal(fused[1:3], x)


def test_many_values_run_member_by_member() -> None:
    fused, x = hf.fuse([_TopK(2), _TopK(3)]), torch.randn(8, 6, dtype=torch.float64)
    for k in range(1, 12):
        fused.k.fill_(k)
        _equal(fused, x)
    assert "sets of values" in str(fused.report())


def test_written_buffer_runs_member_by_member() -> None:
    fused, x = hf.fuse([_Written(8), _Written(6)]), torch.randn(8, 6, dtype=torch.float64)
    models = fused.unfuse()
    for _ in range(3):
        expected = torch.stack([model(x) for model in models])
        torch.testing.assert_close(fused(x), expected, rtol=1e-9, atol=1e-12)
    assert fused.k.tolist() == [model.k.item() for model in models]


@pytest.mark.parametrize("compile", [False, True])
def test_trains_as_alone(compile: bool) -> None:
    fused = hf.fuse([_TopK(k) for k in (2, 5, 4)])
    models, rates = fused.unfuse(), [0.01, 0.02, 0.03]
    step = hf.train_step(fused, F.mse_loss, hf.optim.Adam(fused.parameters(), lr=rates), compile=compile)
    optimizers = [torch.optim.Adam(model.parameters(), lr=lr) for model, lr in zip(models, rates, strict=True)]
    for minibatch in range(6):
        if minibatch == 3:
            fused.k[1] = 8
            models[1].k.fill_(8)
        x = torch.randn(8, 6, dtype=torch.float64)
        losses = step(x, x)
        for model, optimizer, expected in zip(models, optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-9, atol=0)
    for row, model in enumerate(models):
        torch.testing.assert_close(fused.decoder.weight[row], model.decoder.weight, rtol=1e-9, atol=1e-12)
