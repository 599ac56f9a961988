"""The estimators of hfusion.sklearn: scikit-learn's own checks, and what they promise beyond."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import train_test_split
from sklearn.utils.estimator_checks import parametrize_with_checks

from hfusion.sklearn import EnsembleClassifier, EnsembleRegressor

SMALL: dict[str, Any] = {"n_estimators": 2, "hidden_layer_sizes": (16,), "max_iter": 25, "learning_rate_init": 0.03}


@parametrize_with_checks([EnsembleClassifier(**SMALL), EnsembleRegressor(**SMALL)])
def test_what_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def _data() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 3))
    return x, np.where(x[:, 0] * x[:, 1] > 0, "same", "other")


def test_digits() -> None:
    x, y = load_digits(return_X_y=True)
    seen, unseen, labels, wanted = train_test_split(x, y, random_state=0)
    model = EnsembleClassifier(n_estimators=4, max_iter=15, learning_rate_init=3e-3, random_state=0).fit(seen, labels)
    assert model.score(unseen, wanted) > 0.93
    right = model.predict(unseen) == wanted
    doubt = model.uncertainty(unseen)
    assert doubt[~right].mean() > 2 * doubt[right].mean()
    noise = np.random.default_rng(0).permuted(unseen, axis=1)
    assert model.uncertainty(noise).mean() > 3 * doubt.mean()


def test_a_fit_repeats_and_is_pickled() -> None:
    x, y = _data()
    model = EnsembleClassifier(**SMALL, bootstrap=True, random_state=3).fit(x, y)
    again = clone(model).fit(x, y)
    assert np.array_equal(model.predict_proba(x), again.predict_proba(x))
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(x), model.predict_proba(x))
    other = clone(model).set_params(random_state=4).fit(x, y)
    assert not np.allclose(other.predict_proba(x), model.predict_proba(x))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    clone(model).fit(x, y)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("targets", [1, 2])
def test_weights_are_those_of_the_plain_loop(targets: int) -> None:
    x, _ = _data()
    y = x[:, :targets] ** 2
    weights = np.random.default_rng(1).integers(0, 4, len(x)) * 0.7
    model = EnsembleRegressor(
        lambda features, outputs: nn.Linear(features, outputs), n_estimators=2, max_iter=4, random_state=0
    ).fit(x, y, sample_weight=weights)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    mean, shift = np.average(x, 0, weights), np.average(y, 0, weights)
    scale, spread = (np.sqrt(np.average((a - b) ** 2, 0, weights)) for a, b in ((x, mean), (y, shift)))
    inputs, target = torch.tensor((x - mean) / scale), torch.tensor((y - shift) / spread)
    for member in range(2):
        torch.manual_seed(seed + member)
        network = nn.Linear(3, targets).double()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-4)
        for _ in range(4):
            optimizer.zero_grad()
            each = (network(inputs) - target).square().mean(1)
            (each * torch.tensor(weights / weights.sum())).sum().backward()
            optimizer.step()
        wanted = network(inputs).detach().numpy() * spread + shift
        assert np.allclose(model.member_predictions(x)[member], wanted, rtol=1e-9, atol=1e-11)


def test_the_curve_is_the_mean_over_samples() -> None:
    x, y = np.random.default_rng(0).normal(size=(10, 3)), np.arange(10.0)
    curves = [
        EnsembleRegressor(n_estimators=2, learning_rate_init=0.0, batch_size=size, max_iter=1, random_state=0)
        .fit(x, y)
        .loss_curve_
        for size in (4, 10)
    ]
    np.testing.assert_allclose(*curves, rtol=1e-9)


def test_a_member_that_diverges_is_left_out() -> None:
    x, _ = _data()
    y = x[:, 0]
    model = EnsembleRegressor(**{**SMALL, "learning_rate_init": [1e-2, 1e200]}, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"members \[1\] diverged; the ensemble is the other 1"):
        model.fit(x, y)
    assert np.isfinite(model.predict(x)).all()
    model.set_params(learning_rate_init=1e200)
    with pytest.raises(ValueError, match="every member's training diverged"):
        model.fit(x, y)


def test_what_is_not_fitted_says_so() -> None:
    with pytest.raises(NotFittedError):
        EnsembleRegressor().predict([[1.0]])
