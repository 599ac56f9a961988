"""The deep ensemble at a small size: what it learns, and that its members are those of the plain loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import hfusion as hf
from examples import deep_ensemble
from examples.deep_ensemble import Data, Gaussians, Network

SEEDS = [3, 4, 5]
DECAYS = [1.0, 5.0, 30.0]


@pytest.fixture(scope="module")
def data() -> Data:
    return deep_ensemble.load(0)


def trained_alone(data: Data, epochs: int) -> list[Network]:
    """Reference for ``train``: train one member after the other with torch.optim."""
    networks = []
    for b, (seed, decay) in enumerate(zip(SEEDS, DECAYS, strict=True)):
        torch.manual_seed(seed)
        network = Network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=deep_ensemble.LEARNING_RATE, weight_decay=decay)
        for features, targets in deep_ensemble.bootstrap(data.train, len(SEEDS), epochs, seed=0):
            optimizer.zero_grad()
            deep_ensemble.gaussian_nll(network(features[b]), targets[b]).backward()
            optimizer.step()
        networks.append(network)
    return networks


def double(data: Data) -> Data:
    train, test = ((part[0].double(), part[1].double()) for part in (data.train, data.test))
    return Data(train, test, data.mean.double(), data.std.double())


def test_members_equal_their_solo_runs(data: Data) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exact = double(data)
        fused = hf.build(Network, seeds=SEEDS)
        deep_ensemble.train(fused, exact, DECAYS, epochs=2, seed=0)
        alone = trained_alone(exact, epochs=2)
    finally:
        torch.set_default_dtype(default)
    for member, network in zip(fused.unfuse(), alone, strict=True):
        for actual, expected in zip(member.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_every_member_has_its_own_sample(data: Data) -> None:
    features, targets = next(deep_ensemble.bootstrap(data.train, 2, 1, seed=0))
    assert features.shape == (2, deep_ensemble.BATCH, 10)
    assert targets.shape == (2, deep_ensemble.BATCH)
    assert not torch.equal(targets[0], targets[1])


def test_ensemble_beats_the_mean_member(data: Data) -> None:
    fused = hf.build(Network, seeds=range(6))
    losses = deep_ensemble.train(fused, data, [5.0] * 6, epochs=10, seed=0)
    assert losses[-1].mean() < losses[0].mean()
    targets = data.test[1] * data.std + data.mean
    members = deep_ensemble.predict(fused, data)
    scores = [deep_ensemble.score(members[b], targets) for b in range(6)]
    ensemble = deep_ensemble.score(deep_ensemble.combine(members), targets)
    # Not a law for the Gaussian with the moments of the mixture, but what ensembles are for.
    assert ensemble.nll < sum(score.nll for score in scores) / 6
    # By Jensen's inequality, this holds always.
    assert ensemble.rmse < math.sqrt(sum(score.rmse**2 for score in scores) / 6)
    # A constant guess is off by the standard deviation.
    assert ensemble.rmse < 0.85 * float(targets.std())
    assert 0.75 < ensemble.coverage < 0.99


def test_moments_of_the_mixture() -> None:
    members = Gaussians(torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [6.0]]))
    mixture = deep_ensemble.combine(members)
    assert mixture.mean.tolist() == [2.0]
    # The mean variance, and the variance of the means.
    assert mixture.variance.tolist() == [6.0]


def test_coverage_of_a_true_gaussian() -> None:
    targets = 3 * torch.randn(20_000) + 1
    truth = Gaussians(torch.ones(20_000), torch.full((20_000,), 9.0))
    for level in (0.5, 0.9):
        assert deep_ensemble.coverage(truth, targets, level) == pytest.approx(level, abs=0.02)


def test_main_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "ensemble.png"
    deep_ensemble.main(["--members", "3", "--epochs", "2", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for words in ("ensemble of 3", "best member", "a Network on its own", "in the array's own memory"):
        assert words in printed


@pytest.mark.parametrize("option", ["--members", "--epochs"])
def test_refuses_nothing_to_do(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        deep_ensemble.main([option, "0"])
    assert f"{option} is 0; it must be at least 1" in capsys.readouterr().err
