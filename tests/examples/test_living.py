"""The examples of arrays that live, each at a small size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from examples import customers, kfold, population, resume


def test_every_fold_is_trained_as_alone() -> None:
    torch.manual_seed(3)
    x, y = torch.randn(203, 64), torch.randint(10, (203,))
    parts = [trained for trained, _ in kfold.folds(203, 3, seed=0)]
    assert sorted(map(len, parts)) == [135, 135, 136]
    pop = kfold.train(x, y, parts, epochs=2, compile=False)
    torch.manual_seed(0)
    models = [kfold.make_model() for _ in parts]
    for member, model in enumerate(models):
        opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        loader = kfold.minibatches(x, y, parts[member], member)
        for _ in range(2):
            for inputs, target in loader:
                opt.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                opt.step()
    for fold_model, model in zip(pop.models, models, strict=True):
        assert fold_model is not None
        for actual, expected in zip(fold_model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_kfold_learns() -> None:
    accuracies = kfold.main(["--folds", "3", "--epochs", "8", "--eager"])
    assert min(accuracies) > 0.8


def test_a_population_does_better_than_fixed_rates() -> None:
    means = population.main(["--members", "8", "--rounds", "5", "--eager"])
    assert means["population"] > means["fixed rates"] + 0.05


def test_a_killed_run_ends_as_the_other() -> None:
    resumed, whole = resume.main(["--steps", "30"])
    assert resumed == whole
    assert resumed.startswith("ends with losses")


def test_a_model_for_each_customer() -> None:
    common, per_customer = customers.main(["--customers", "50", "--days", "12", "--eager"])
    assert per_customer < 0.7 * common
