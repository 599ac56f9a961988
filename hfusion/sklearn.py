"""Ensembles of networks as scikit-learn estimators. Members differ in initial weights and in their order of samples.

``hfusion.sklearn`` needs scikit-learn, which the extra ``hfusion[sklearn]`` installs.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.array.fuse import build
from hfusion.array.module import FusedModule
from hfusion.core.calls import stacked
from hfusion.core.step_arguments import Compile
from hfusion.device.backend import draws_kept, seed_in_use
from hfusion.device.calibrate import is_present
from hfusion.optim import AdamW
from hfusion.population.weights import member_tensors
from hfusion.step.train_step import train_step

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin, is_classifier
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("hf.sklearn needs scikit-learn: pip install scikit-learn (extra: hfusion[sklearn])") from error

MakeModule = Callable[[int, int], nn.Module]

# Samples per forward in prediction, so that the outputs ``[members, samples, outputs]`` stay small.
_SAMPLES = 4096


def mlp(inputs: int, outputs: int, hidden: Sequence[int]) -> nn.Module:
    """Return linear layers with ReLU between them."""
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = []
    for in_features, out_features in itertools.pairwise(sizes):
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Context manager: seed torch's generators, and restore their states at the end."""
    with draws_kept():
        seed_in_use(seed)
        yield


@dataclass(eq=False, repr=False)
class _Estimator(BaseEstimator):  # type: ignore[misc]
    """Base class of both estimators. Features are standardised; the regressor standardises targets, too."""

    module: MakeModule | None = None
    _: KW_ONLY
    n_estimators: int = 10
    hidden_layer_sizes: int | Sequence[int] = (100,)
    learning_rate_init: float | Sequence[float] = 1e-3
    weight_decay: float | Sequence[float] = 1e-4
    batch_size: int | str = "auto"
    max_iter: int = 200
    bootstrap: bool = False
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    random_state: Any = None
    device: Any = "cpu"
    compile: Compile = None

    def _train(self, x: Any, target: Tensor, outputs: int, loss: Callable[..., Any], weights: Any) -> None:
        """Build and train the members on floats ``x [N, features]``. ``weights [N]`` are above 0; None: unweighted."""
        for name, least in (("n_estimators", 1), ("max_iter", 1), ("n_iter_no_change", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name}={value!r}: it must be a whole number of at least {least}")
        if self.device is not None and not is_present(torch.device(self.device)):
            raise ValueError(f"device={self.device!r}: this machine has no such device")
        self._seed = seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        held: tuple[Any, ...] = ()
        if self.early_stopping:
            options = {"test_size": self.validation_fraction, "random_state": seed}
            labels = target if is_classifier(self) else None
            given = [x, target.numpy()] if weights is None else [x, target.numpy(), weights]
            parts = train_test_split(*given, stratify=labels, **options)
            (x, kept, *kept_weights), held = parts[::2], tuple(parts[1::2])
            target, weights = torch.from_numpy(kept), kept_weights[0] if kept_weights else None
        self._mean, self._scale = _moments(x, weights)
        inputs = self._tensor(x)
        dtype = inputs.dtype
        fused = build(
            lambda: self._network(x.shape[1], outputs).to(self.device, dtype),
            [seed + b for b in range(self.n_estimators)],
        )
        with _drawing(seed):
            self._check_outputs(fused, inputs[:1], outputs)
        fused.train()
        targets, objective = [target.to(self.device)], loss
        if weights is not None:
            # Scaled to a mean of 1, so that the learning rate has the same effect as without weights.
            targets.append(torch.tensor(weights / weights.mean(), dtype=dtype, device=self.device))
            objective = functools.partial(_weighted, loss)
        stopping = _EarlyStopping(fused, self.n_iter_no_change, self.tol) if held else None
        generator, count = torch.Generator().manual_seed(seed), len(x)
        shape = len(fused), count
        sample_indices = torch.arange(count, device="cpu").expand(shape)
        if self.bootstrap:
            sample_indices = torch.randint(count, shape, generator=generator, device="cpu")
        batch = 200 if self.batch_size == "auto" else self.batch_size
        if not isinstance(batch, int | np.integer) or batch < 1:
            raise ValueError(f'batch_size={batch!r}: it must be "auto" or a whole number of at least 1')
        parts = -(-count // min(int(batch), count))
        optimizer = AdamW(fused.parameters(), lr=self.learning_rate_init, weight_decay=self.weight_decay)
        compile = False if self.compile is None and self.random_state is not None else self.compile
        step, curve = train_step(fused, objective, optimizer, compile=compile), []
        with _drawing(seed):
            for _ in range(self.max_iter):
                order = torch.rand(shape, generator=generator, device="cpu").argsort(1)
                losses = torch.zeros(len(fused), dtype=torch.float64, device="cpu")
                for chosen in torch.tensor_split(sample_indices.gather(1, order), parts, dim=1):
                    rows = chosen.to(self.device)
                    drawn = tuple(stacked(tensor[rows]) for tensor in targets)
                    member_losses = step(stacked(inputs[rows]), drawn if len(drawn) > 1 else drawn[0])
                    losses += member_losses.double().cpu() * chosen.shape[1]
                curve.append(losses / count)
                if stopping is not None and stopping.update(self._scores(fused, *held)):
                    break
        # The mean losses [epochs, members].
        self.loss_curve_ = torch.stack(curve).numpy()
        self.n_iter_ = len(self.loss_curve_)
        if stopping is not None:
            self.validation_scores_, self.best_validation_scores_ = stopping.restore()
        self.members_ = _finite(fused).eval()

    def _network(self, features: int, outputs: int) -> nn.Module:
        """Return the network of a new member. Raises ValueError if ``module`` or ``hidden_layer_sizes`` makes none."""
        if self.module is None:
            sizes = np.atleast_1d(self.hidden_layer_sizes).tolist()
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError(f"hidden_layer_sizes={self.hidden_layer_sizes!r}: give whole numbers of at least 1")
            return mlp(features, outputs, sizes)
        if isinstance(self.module, nn.Module) or not callable(self.module):
            raise ValueError(f"module={self.module!r}: give a function that makes one from n_features and n_outputs")
        network: Any = self.module(features, outputs)
        if not isinstance(network, nn.Module):
            raise ValueError(f"module({features}, {outputs}) gave {type(network).__name__}: return an nn.Module")
        return network

    @torch.no_grad()
    def _check_outputs(self, fused: FusedModule, sample: Tensor, outputs: int) -> None:
        """Raise ValueError if a member's outputs for ``sample [1, features]`` are not ``[1, outputs]``."""
        with fused.evaluating():
            result = fused[0](sample)
        if not isinstance(result, Tensor) or result.shape != (1, outputs):
            kind = f"shape {list(result.shape)}" if isinstance(result, Tensor) else f"type {type(result).__name__}"
            raise ValueError(
                f"module({sample.shape[1]}, {outputs}) has outputs of {kind} for one sample, expected [1, {outputs}]. "
                "Return a network with n_outputs outputs from module(n_features, n_outputs)."
            )

    @torch.no_grad()
    def _scores(self, fused: FusedModule, x: Any, target: Any, weights: Any = None) -> Tensor:
        """Return the members' validation scores ``[members]``, accuracy or R2; NaN for a member that diverged."""
        with fused.evaluating():
            outputs = torch.cat([fused(part) for part in self._tensor(x).split(_SAMPLES)], 1).double().cpu().numpy()
        scores = []
        for output in outputs:
            if not np.isfinite(output).all():
                scores.append(np.nan)
            elif is_classifier(self):
                scores.append(accuracy_score(target, output.argmax(1), sample_weight=weights))
            else:
                scores.append(r2_score(target, output, sample_weight=weights))
        return torch.tensor(scores, dtype=torch.float64, device="cpu")

    def _tensor(self, x: Any) -> Tensor:
        return torch.tensor((x - self._mean) / self._scale, dtype=_dtype(x), device=self.device)

    @torch.no_grad()
    def _outputs(self, x: Any) -> Tensor:
        """Return each member's outputs ``[members, N, outputs]``, float64 on the CPU."""
        check_is_fitted(self)
        inputs = self._tensor(validate_data(self, x, reset=False, dtype=[np.float64, np.float32], order="C"))
        parameter = next(self.members_.parameters())
        with _drawing(self._seed):
            parts = [self.members_(part.to(parameter.dtype)).double().cpu() for part in inputs.split(_SAMPLES)]
        return torch.cat(parts, 1)


class _EarlyStopping:
    """Keeps each member's weights of the epoch with its best validation score.

    As in scikit-learn's MLPs, a member stops after more than ``patience`` consecutive epochs without improvement.
    """

    def __init__(self, fused: FusedModule, patience: int, tol: float) -> None:
        self._fused, self._patience, self._tol = fused, patience, tol
        self._best = torch.full((len(fused),), -torch.inf, dtype=torch.float64, device="cpu")
        self._waited = torch.zeros(len(fused), dtype=torch.int64, device="cpu")
        self._history: list[Tensor] = []
        self._weights = {name: stack.clone() for name, stack in member_tensors(fused)}

    def update(self, scores: Tensor) -> bool:
        """Record the scores ``[members]`` of an epoch. Return whether all members have stopped."""
        goes_on = self._waited <= self._patience
        scores = torch.where(goes_on, scores, torch.nan)
        self._history.append(scores)
        # NaN is no improvement.
        self._waited = torch.where(scores >= self._best + self._tol, 0, self._waited + goes_on)
        better = scores > self._best
        self._best = torch.where(better, scores, self._best)
        for name, stack in member_tensors(self._fused):
            rows = better.to(stack.device)
            self._weights[name][rows] = stack[rows]
        return bool((self._waited > self._patience).all())

    @torch.no_grad()
    def restore(self) -> tuple[Any, Any]:
        """Restore the best weights. Return all scores ``[epochs, members]``, NaN after a member's end, and the best."""
        scored = self._best > -torch.inf
        for name, stack in member_tensors(self._fused):
            rows = scored.to(stack.device)
            stack[rows] = self._weights[name][rows]
        return torch.stack(self._history).numpy(), self._best.numpy()


class EnsembleClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A deep ensemble as a classifier: the mean of its members' probabilities (Lakshminarayanan et al., 2017).

    Args:
        module: ``module(n_features, n_classes)`` returns a network with logits ``[N, n_classes]``; by default an MLP.
        n_estimators: the number of members.
        hidden_layer_sizes: the hidden sizes of the MLP, or the only one.
        learning_rate_init, weight_decay: arguments of AdamW; one value, or one per member.
        batch_size: samples per minibatch; "auto" is 200, or all samples if there are fewer.
        max_iter: the maximum number of epochs.
        bootstrap: train each member on its own bootstrap sample, instead of all data in its own order.
        early_stopping: hold out ``validation_fraction`` of the samples, and end each member when its score on them has
            not improved by ``tol`` for more than ``n_iter_no_change`` consecutive epochs, as scikit-learn's MLPs do.
            Each member's best weights are restored.
        random_state: as in scikit-learn: an int, a RandomState, or None. An int makes a fit and its predictions
            repeatable, also for modules that draw, as dropout does. torch's random state is not changed.
        device: the torch device to train on.
        compile: see `hfusion.train_step`. None compiles if that pays and ``random_state`` is None. With an int it does
            not compile, since the step at which a program is ready, and so the last bits, would depend on timing.

    Attributes: ``classes_``, ``members_`` (the fused module), ``loss_curve_`` ``[epochs, members]``, ``n_iter_``; with
    ``early_stopping`` ``validation_scores_`` ``[epochs, members]`` and ``best_validation_scores_`` ``[members]``.

    Example:
        >>> import numpy as np
        >>> from hfusion.sklearn import EnsembleClassifier
        >>> x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
        >>> model = EnsembleClassifier(n_estimators=2, max_iter=30, learning_rate_init=0.05, random_state=0)
        >>> model.fit(x, ["no", "no", "yes", "yes"]).predict([[-1.5], [1.5]]).tolist()
        ['no', 'yes']
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EnsembleClassifier:
        """Train on ``X [N, features]`` and labels ``y [N]`` of any type. Returns self.

        ``sample_weight [N]`` multiplies the samples' losses and weights the means by which features are standardised.
        Samples of weight 0 are left out. Only the ratios of weights matter.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], order="C")
        check_classification_targets(y)
        self.classes_, target = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        X, target, weights = _weighed(X, target, sample_weight)
        self._train(X, torch.tensor(target, device="cpu"), len(self.classes_), F.cross_entropy, weights)
        return self

    def member_probabilities(self, X: Any) -> Any:
        """Return each member's probabilities: ``[members, N, classes]``."""
        return self._outputs(X).softmax(-1).numpy()

    def predict_proba(self, X: Any) -> Any:
        """Return the mean of the members' probabilities: ``[N, classes]``."""
        return self.member_probabilities(X).mean(0)

    def predict(self, X: Any) -> Any:
        """Return the most probable labels: ``[N]``."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def uncertainty(self, X: Any) -> Any:
        """Return the members' disagreement in nats: ``[N]``.

        The mutual information of label and member: the entropy of the mean minus the mean of the entropies.
        """
        probabilities = torch.from_numpy(self.member_probabilities(X))
        result = torch.special.entr(probabilities.mean(0)).sum(-1) - torch.special.entr(probabilities).sum(-1).mean(0)
        return result.clamp(min=0).numpy()


class EnsembleRegressor(MultiOutputMixin, RegressorMixin, _Estimator):  # type: ignore[misc]
    """A deep ensemble as a regressor: the mean of its members. Arguments are the same as for `EnsembleClassifier`.

    ``module(n_features, n_targets)`` returns a network with outputs ``[N, n_targets]``. It is trained with the squared
    error of standardised targets.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EnsembleRegressor:
        """Train on ``X [N, features]`` and ``y [N]`` or ``[N, targets]``; ``sample_weight`` as in the classifier.

        Returns self.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], order="C", multi_output=True, y_numeric=True)
        self._flat = y.ndim == 1
        X, wide, weights = _weighed(X, y.reshape(len(y), -1).astype(np.float64), sample_weight)
        self._shift, self._spread = _moments(wide, weights)
        target = torch.tensor((wide - self._shift) / self._spread, dtype=_dtype(X), device="cpu")
        self._train(X, target, wide.shape[1], F.mse_loss, weights)
        return self

    def member_predictions(self, X: Any) -> Any:
        """Return each member's predictions: ``[members, N]`` or ``[members, N, targets]``."""
        predictions = self._outputs(X).numpy() * self._spread + self._shift
        return predictions[..., 0] if self._flat else predictions

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the members' mean, ``[N]`` or ``[N, targets]``; with ``return_std`` their standard deviation, too."""
        predictions = self.member_predictions(X)
        return (predictions.mean(0), predictions.std(0)) if return_std else predictions.mean(0)

    def uncertainty(self, X: Any) -> Any:
        """Return the members' standard deviation, in units of ``y``."""
        return self.predict(X, return_std=True)[1]


def _weighed(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return the samples, targets and weights whose weight is above 0; the weights are None if none are given."""
    if sample_weight is None:
        return x, y, None
    weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
    positive = weights > 0
    if not positive.any():
        raise ValueError(f"sample_weight is 0 for all {len(weights)} samples: nothing is left to train on")
    return x[positive], y[positive], weights[positive]


def _weighted(loss: Callable[..., Any], output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over samples of loss times weight."""
    expected, weights = target
    losses = loss(output, expected, reduction="none")
    sample_losses: Tensor = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
    return (sample_losses * weights).mean()


def _moments(x: Any, weights: Any) -> tuple[Any, Any]:
    """Return the weighted mean and the scale of each column: its standard deviation, or 1 if it is constant."""
    mean = x.mean(0) if weights is None else np.average(x, 0, weights).astype(x.dtype)
    scale = x.std(0) if weights is None else np.sqrt(np.average((x - mean) ** 2, 0, weights)).astype(x.dtype)
    # As in scikit-learn, constant columns are not scaled.
    return mean, np.where(scale > 10 * np.finfo(scale.dtype).eps * np.abs(x).max(0), scale, 1.0).astype(scale.dtype)


def _dtype(x: Any) -> torch.dtype:
    return torch.float32 if x.dtype == np.float32 else torch.float64


def _finite(fused: FusedModule) -> FusedModule:
    """Return the members whose parameters are all finite, and warn of others. Raises ValueError if there are none."""
    whole = torch.stack([param.detach().flatten(1).isfinite().all(1).cpu() for param in fused.parameters()]).all(0)
    kept, lost = (rows.nonzero().reshape(-1).tolist() for rows in (whole, ~whole))
    if not lost:
        return fused
    if not kept:
        raise ValueError(
            "every member's training diverged: a smaller learning_rate_init, or targets and features of a usual size, "
            "may help"
        )
    warnings.warn(
        f"the training of members {lost} diverged; the ensemble is the other {len(kept)}",
        ConvergenceWarning,
        stacklevel=4,
    )
    fused.keep(kept)
    return fused
