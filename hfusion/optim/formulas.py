"""The optimizers, in the order of torch's operations. The steps of all but Muon are elementwise.

Half precision is rounded after each operator, as in torch's ``foreach`` implementations, which run on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import New, add, addcdiv, addcmul, ascent, decayed, for_all, per_member
from hfusion.optim.hyper import HyperValue, ParamGroup


def _complements(h: Any) -> dict[str, Any]:
    """Return the hyper-parameters, and what is left of 1, which float32 would round too coarsely."""
    return {**h._asdict(), "fresh1": 1 - h.beta1, "fresh2": 1 - h.beta2, "shrink": 1 - h.lr * h.weight_decay}


class Elementwise(FusedOptimizer):
    """Base class of the optimizers that update each element by itself."""

    maximize: bool = for_all(default=False, kw_only=True)


class SGD(Elementwise):
    """``torch.optim.SGD`` with a value of each hyper-parameter per member.

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``momentum``, ``dampening`` and
    ``weight_decay``: one value, or one per member. ``nesterov`` and ``maximize`` are set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1e-3)
    momentum: HyperValue = per_member(default=0.0)
    dampening: HyperValue = per_member(default=0.0, low=-float("inf"))
    weight_decay: HyperValue = per_member(default=0.0)
    nesterov: bool = for_all(default=False)

    torch_class = torch.optim.SGD
    counts_steps = False

    @staticmethod
    def check(h: Any, o: Any) -> None:
        if o.nesterov and (h.momentum <= 0 or h.dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum above 0 and no dampening, and a member has momentum={h.momentum}, "
                f"dampening={h.dampening}"
            )

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("momentum_buffer",) if h.momentum != 0 else ()

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "first": n.step == 1, "fresh": 1 - h.dampening}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        grad = decayed(ascent(grad, o.maximize), param, s.weight_decay)
        if not state:
            return add(param, grad, -s.lr), {}
        old = state["momentum_buffer"]
        mean = torch.where(s.first != 0, grad, add(s.momentum * old, grad, s.fresh))
        step = add(grad, mean, s.momentum) if o.nesterov else mean
        # Members without momentum keep what they have.
        step, mean = torch.where(s.momentum != 0, step, grad), torch.where(s.momentum != 0, mean, old)
        return add(param, step, -s.lr), {"momentum_buffer": mean}


class AdaptiveMoments(Elementwise):
    """Base class of Adam and its relatives, which keep running means of the gradient and of its square."""

    lr: HyperValue = per_member(default=1e-3)
    betas: Sequence[HyperValue] = per_member(default=(0.9, 0.999), high=1.0, below=True, names=("beta1", "beta2"))
    eps: HyperValue = per_member(default=1e-8)
    weight_decay: HyperValue = per_member(default=0.0)

    moments = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {
            **_complements(h),
            "correction": (1 - h.beta2**n.step).sqrt(),
            "step_size": h.lr / (1 - h.beta1**n.step),
        }


class Adam(AdaptiveMoments):
    """``torch.optim.Adam`` with a value of each hyper-parameter per member (Kingma and Ba, 2015).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and each
    of ``betas``: one value, or one per member. ``amsgrad`` and ``maximize`` are set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    amsgrad: bool = for_all(default=False)

    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Do the same as in torch. Raises ValueError for a group with the other class's weight decay."""
        decoupled, other = (True, "Adam") if isinstance(self, AdamW) else (False, "AdamW")
        if isinstance(param_group, dict) and param_group.get("decoupled_weight_decay", decoupled) != decoupled:
            raise ValueError(f"decoupled_weight_decay={not decoupled} of a param group: take {other}")
        super().add_param_group(param_group)

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * o.amsgrad)

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        return _adam(param, decayed(ascent(grad, o.maximize), param, s.weight_decay), state, s, o)


class AdamW(Adam):
    """``torch.optim.AdamW`` with a value of each hyper-parameter per member (Loshchilov and Hutter, 2019).

    Like :class:`Adam`, with decoupled weight decay.
    """

    weight_decay: HyperValue = per_member(default=1e-2)

    torch_class = torch.optim.AdamW

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        return _adam(s.shrink * param, ascent(grad, o.maximize), state, s, o)


def _adam(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
    new = _moments(grad, state, s)
    square = new["exp_avg_sq"]
    if o.amsgrad:
        square = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
    return addcdiv(param, new["exp_avg"], square.sqrt() / s.correction + s.eps, -s.step_size), new


def _moments(grad: Tensor, state: Mapping[str, Tensor], s: Any) -> dict[str, Tensor]:
    """Return the running means of ``grad`` and of its square."""
    return {
        "exp_avg": torch.lerp(state["exp_avg"], grad, s.fresh1),
        "exp_avg_sq": addcmul(s.beta2 * state["exp_avg_sq"], grad, grad, s.fresh2),
    }


def _decay(param: Tensor, grad: Tensor, s: Any, o: Any) -> tuple[Tensor, Tensor]:
    """Return the parameter and the gradient of a step with decoupled weight decay, or with that of SGD."""
    grad = ascent(grad, o.maximize)
    if o.decoupled_weight_decay:
        return s.shrink * param, grad
    return param, decayed(grad, param, s.weight_decay)


class NAdam(AdaptiveMoments):
    """``torch.optim.NAdam`` with a value of each hyper-parameter per member (Dozat, 2016).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay``,
    ``momentum_decay`` and each of ``betas``: one value, or one per member. ``decoupled_weight_decay`` and
    ``maximize`` are set per param group. Raises ValueError if parameters do not belong to a fused module, or if
    values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=2e-3)
    momentum_decay: HyperValue = per_member(default=4e-3, low=-float("inf"))
    decoupled_weight_decay: bool = for_all(default=False)

    numbers: ClassVar[Mapping[str, float]] = {"step": 0.0, "mu_product": 1.0}
    torch_class = torch.optim.NAdam

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        mu, mu_next = (h.beta1 * (1 - 0.5 * 0.96 ** (step * h.momentum_decay)) for step in (n.step, n.step + 1))
        # torch rounds the product to float32, and so the factor, too.
        mu_product = n.mu_product * mu.to(n.mu_product)
        product = mu_product.double()
        return {
            **AdaptiveMoments.scalars(h, o, n),
            "mu_product": mu_product,
            "of_grad": h.lr * (1 - mu) / (1 - product),
            "of_mean": h.lr * mu_next / (1 - product * mu_next),
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        param, grad = _decay(param, grad, s, o)
        new = _moments(grad, state, s)
        scale = new["exp_avg_sq"].sqrt() / s.correction + s.eps
        return addcdiv(addcdiv(param, grad, scale, -s.of_grad), new["exp_avg"], scale, -s.of_mean), new


class RAdam(AdaptiveMoments):
    """``torch.optim.RAdam`` with a value of each hyper-parameter per member (Liu and others, 2020).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and each
    of ``betas``: one value, or one per member. ``decoupled_weight_decay`` and ``maximize`` are set per param group.
    Raises ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    decoupled_weight_decay: bool = for_all(default=False)

    torch_class = torch.optim.RAdam

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        common, power = AdaptiveMoments.scalars(h, o, n), h.beta2**n.step
        longest = 2 / (1 - h.beta2) - 1
        length = longest - 2 * n.step * power / (1 - power)
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rectification = torch.where(length <= 5, 1.0, rectified).sqrt()
        # Too few steps to know the variance: the mean alone.
        rectified_size = common["step_size"] * common["correction"] * rectification
        return {**common, "plain": length <= 5, "rectified_size": rectified_size}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        param, grad = _decay(param, grad, s, o)
        new = _moments(grad, state, s)
        rectified = 1 / ((new["exp_avg_sq"].sqrt() + s.eps) / -s.rectified_size)
        return torch.addcmul(param, new["exp_avg"], torch.where(s.plain != 0, -s.step_size, rectified)), new


class Adamax(AdaptiveMoments):
    """``torch.optim.Adamax`` with a value of each hyper-parameter per member (Kingma and Ba, 2015).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and each
    of ``betas``: one value, or one per member. ``maximize`` is set per param group. Raises ValueError if parameters
    do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=2e-3)

    torch_class = torch.optim.Adamax
    moments = ("exp_avg", "exp_inf")

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        grad = decayed(ascent(grad, o.maximize), param, s.weight_decay)
        mean = torch.lerp(state["exp_avg"], grad, s.fresh1)
        largest = torch.maximum(s.beta2 * state["exp_inf"], grad.abs() + s.eps)
        return addcdiv(param, mean, largest, -s.step_size), {"exp_avg": mean, "exp_inf": largest}


class Adagrad(Elementwise):
    """``torch.optim.Adagrad`` with a value of each hyper-parameter per member (Duchi, Hazan and Singer, 2011).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``lr_decay``, ``weight_decay``,
    ``initial_accumulator_value`` and ``eps``: one value, or one per member. ``maximize`` is set per param group.
    Raises ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1e-2)
    lr_decay: HyperValue = per_member(default=0.0)
    weight_decay: HyperValue = per_member(default=0.0)
    initial_accumulator_value: HyperValue = per_member(default=0.0)
    eps: HyperValue = per_member(default=1e-10)

    torch_class = torch.optim.Adagrad
    moments = ("sum",)

    @staticmethod
    def begin(h: Any, o: Any) -> Mapping[str, float]:
        return {"sum": h.initial_accumulator_value}

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "rate": h.lr / (1 + (n.step - 1) * h.lr_decay)}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        grad = decayed(ascent(grad, o.maximize), param, s.weight_decay)
        total = torch.addcmul(state["sum"], grad, grad)
        return torch.addcdiv(param, -s.rate * grad, total.sqrt() + s.eps), {"sum": total}


class Adadelta(Elementwise):
    """``torch.optim.Adadelta`` with a value of each hyper-parameter per member (Zeiler, 2012).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``rho``, ``eps`` and
    ``weight_decay``: one value, or one per member. ``maximize`` is set per param group. Raises ValueError if
    parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1.0)
    rho: HyperValue = per_member(default=0.9, high=1.0)
    eps: HyperValue = per_member(default=1e-6)
    weight_decay: HyperValue = per_member(default=0.0)

    torch_class = torch.optim.Adadelta
    moments = ("square_avg", "acc_delta")

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "fresh": 1 - h.rho}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        grad = decayed(ascent(grad, o.maximize), param, s.weight_decay)
        moved = state["acc_delta"]
        square = addcmul(s.rho * state["square_avg"], grad, grad, s.fresh)
        delta = (moved + s.eps).sqrt() / (square + s.eps).sqrt() * grad
        moved = addcmul(s.rho * moved, delta, delta, s.fresh)
        return add(param, delta, -s.lr), {"square_avg": square, "acc_delta": moved}


class RMSprop(Elementwise):
    """``torch.optim.RMSprop`` with a value of each hyper-parameter per member (Tieleman and Hinton, 2012).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``alpha``, ``eps``, ``weight_decay``
    and ``momentum``: one value, or one per member. ``centered`` and ``maximize`` are set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1e-2)
    alpha: HyperValue = per_member(default=0.99)
    eps: HyperValue = per_member(default=1e-8)
    weight_decay: HyperValue = per_member(default=0.0)
    momentum: HyperValue = per_member(default=0.0)
    centered: bool = for_all(default=False)

    torch_class = torch.optim.RMSprop

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("square_avg", *["grad_avg"] * o.centered, *["momentum_buffer"] * (h.momentum > 0))

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "fresh": 1 - h.alpha}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        grad = decayed(ascent(grad, o.maximize), param, s.weight_decay)
        square = addcmul(s.alpha * state["square_avg"], grad, grad, s.fresh)
        new = {"square_avg": square}
        if o.centered:
            mean = new["grad_avg"] = torch.lerp(state["grad_avg"], grad, s.fresh)
            square = torch.addcmul(square, mean, mean, value=-1)
        scale = square.sqrt() + s.eps
        plain = addcdiv(param, grad, scale, -s.lr)
        if "momentum_buffer" not in state:
            return plain, new
        old = state["momentum_buffer"]
        step = torch.addcdiv(s.momentum * old, grad, scale)
        # Members without momentum keep what they have.
        new["momentum_buffer"] = torch.where(s.momentum > 0, step, old)
        return torch.where(s.momentum > 0, add(param, step, -s.lr), plain), new


class Lion(Elementwise):
    """Lion with a value of each hyper-parameter per member (Chen and others, 2023).

    Source: "Symbolic Discovery of Optimization Algorithms", algorithm 2.

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``weight_decay``, which is
    decoupled, and each of ``betas``: one value, or one per member. ``maximize`` is set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1e-4)
    betas: Sequence[HyperValue] = per_member(default=(0.9, 0.99), high=1.0, below=True, names=("beta1", "beta2"))
    weight_decay: HyperValue = per_member(default=0.0)

    moments = ("exp_avg",)

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return _complements(h)

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        grad, mean = ascent(grad, o.maximize), state["exp_avg"]
        direction = torch.lerp(mean, grad, s.fresh1).sign()
        return add(s.shrink * param, direction, -s.lr), {"exp_avg": torch.lerp(mean, grad, s.fresh2)}


# Muon for an array of models.


class Muon(FusedOptimizer):
    """``torch.optim.Muon`` with a value of each hyper-parameter per member (Jordan and others, 2024).

    ``params``: parameters of one fused module that are matrices in each member, or param groups of them. ``lr``,
    ``weight_decay``, ``momentum`` and ``eps``: one value, or one per member. ``nesterov``, ``ns_coefficients``,
    ``ns_steps`` and ``adjust_lr_fn`` are set per param group. Members' matrices are orthogonalised
    separately, in one batch. Raises ValueError if parameters do not belong to a fused module or are not matrices,
    or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1e-3)
    weight_decay: HyperValue = per_member(default=0.1)
    momentum: HyperValue = per_member(default=0.95)
    nesterov: bool = for_all(default=True)
    ns_coefficients: tuple[float, float, float] = for_all(default=(3.4445, -4.7750, 2.0315))
    eps: HyperValue = per_member(default=1e-7)
    ns_steps: int = for_all(default=5)
    adjust_lr_fn: str | None = for_all(default=None)

    torch_class = torch.optim.Muon
    moments = ("momentum_buffer",)
    counts_steps = False
    elementwise = False

    @staticmethod
    def check(h: Any, o: Any) -> None:
        if o.adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={o.adjust_lr_fn!r}: it must be None, 'original' or 'match_rms_adamw'")
        if len(o.ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={o.ns_coefficients!r}: give three numbers")
        if not 0 <= o.ns_steps < 100:
            raise ValueError(f"ns_steps={o.ns_steps}: it must be at least 0 and below 100")

    @staticmethod
    def check_param(name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        if len(shape) != 2 or dtype.is_complex:
            raise ValueError(
                f"parameter {name!r} is {str(dtype).removeprefix('torch.')} {list(shape)} in each member: Muon trains "
                "matrices of real numbers; give the others to another optimizer, such as hf.optim.AdamW"
            )

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "shrink": 1 - h.lr * h.weight_decay, "fresh": 1 - h.momentum}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> New:
        mean = torch.lerp(state["momentum_buffer"], grad, s.fresh)
        step = torch.lerp(grad, mean, s.momentum) if o.nesterov else mean
        step = _orthogonalised(step, s.eps, o.ns_coefficients, o.ns_steps)
        # Steps of matrices of all shapes become equally large.
        rows, columns = param.shape[-2:]
        adjustment = math.sqrt(max(1.0, rows / columns))
        if o.adjust_lr_fn == "match_rms_adamw":
            adjustment = 0.2 * math.sqrt(max(rows, columns))
        return add(param * s.shrink, step.to(param.dtype), -s.lr * adjustment), {"momentum_buffer": mean}


def _orthogonalised(matrices: Tensor, eps: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The nearest orthogonal matrix of each of ``[B, m, n]``, by Newton-Schulz iterations in bfloat16 as in torch."""
    a, b, c = coefficients
    iterate = matrices.bfloat16()
    tall = iterate.shape[-2] > iterate.shape[-1]
    if tall:
        iterate = iterate.mT
    iterate = iterate / iterate.norm(dim=(-2, -1), keepdim=True).clamp(min=eps.to(iterate.dtype))
    for _ in range(steps):
        gram = iterate @ iterate.mT
        iterate = torch.baddbmm(iterate, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.mT if tall else iterate
