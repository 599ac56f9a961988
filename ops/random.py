"""Dropout and random numbers. Every member draws its own, through `hfusion.random.draw`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.core.layout import Layout, Listed, packed_to_stacked, stacked_to_packed
from hfusion.core.member_random import MemberSeeds, draw, member_seeds
from hfusion.ops.lowering import View
from hfusion.ops.rule import (
    Call,
    MemberScalars,
    Rule,
    RuleTable,
    Site,
    Value,
    has_per_member,
    in_order,
    loop,
    map_values,
    scalars_alike,
    table,
)
from hfusion.ops.saved import NOTHING

aten = torch.ops.aten

STACKED = Layout.STACKED

# One probability for all members, or one for each.
Probability: TypeAlias = float | tuple[float, ...]

# Minus the limit of SELU at minus infinity; Klambauer et al., "Self-Normalizing Neural Networks" (2017).
SELU_LIMIT = 1.7580993408473766


def bernoulli(like: Tensor, keep: float | Tensor) -> Tensor:
    """Zeros and ones, 1 with probability ``keep``, in the shape ``[B, *S]``, dtype and memory order of ``like``."""
    source = member_seeds()
    if source is not None:
        return (source.uniform(like.shape, like.dtype) < keep).to(like.dtype)
    # On a CPU comparing uniform numbers takes half the time of torch's bernoulli_; low-precision floats have
    # too few uniform numbers for it.
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        return torch.rand_like(like, requires_grad=False).lt_(keep)
    return torch.empty_like(like, requires_grad=False).bernoulli_(keep)


def dropout_off(x: Any) -> Any:
    """Return ``x`` unchanged: a dropout that is off."""
    return x


def dropout(feature: bool, alpha: bool) -> Rule:
    """`torch.dropout`; whole channels if ``feature``, keeping the mean and variance of SELU if ``alpha``."""

    def rule(site: Site, input: Value, p: Any, train: Any) -> Call:
        if isinstance(train, MemberScalars):
            call = loop(site, {"input": input, "p": p, "train": train})
            return replace(call, lowering=replace(call.lowering, view=View.PERHAPS))
        if not train or p == 0:
            return site.call(dropout_off, (input,), input.layout, "off", saves=NOTHING, view=View.ALWAYS)
        if isinstance(p, MemberScalars):
            x = input if input.layout is Layout.LISTED else input.to(STACKED)
            number: Probability = tuple(map(float, p.values))
        else:
            x = input.to(STACKED) if input.shared else input
            number = float(p)
        layout = STACKED if x is not input else input.layout
        text = "own draws" if isinstance(number, float) else "own draws, own p"
        return site.call(DROPOUTS[layout], (x, number, site.members, feature, alpha), layout, text)

    return rule


def dropout_stacked(x: Tensor, p: Probability, members: int, feature: bool, alpha: bool) -> Tensor:
    """``x [B, *S]`` -> ``[B, *S]``."""
    if p == 1 or x.numel() == 0:
        return x * 0
    like = _channels(x, 3) if feature else x
    keep = 1 - p if isinstance(p, float) else 1 - column(p, x)
    return dropped(x, draw(lambda: bernoulli(like, keep)), p, alpha)


def dropout_packed(x: Tensor, p: float, members: int, feature: bool, alpha: bool) -> Tensor:
    """``x [N, B*C, ...]`` -> ``[N, B*C, ...]``."""
    if p == 1 or x.numel() == 0:
        return x * 0
    like = _channels(x, 2) if feature else x
    noise = draw(lambda: bernoulli(packed_to_stacked(like, members), 1 - p))
    return dropped(x, stacked_to_packed(noise, members), p, alpha)


def dropout_listed(x: Listed, p: Probability, members: int, feature: bool, alpha: bool) -> Listed:
    """B times ``S`` -> B times ``S``."""
    if p == 1 or x[0].numel() == 0:
        return Listed(row * 0 for row in x)
    like = x[0].detach().expand(members, *x[0].shape)
    keep = 1 - p if isinstance(p, float) else 1 - column(p, like)
    noise = draw(lambda: bernoulli(_channels(like, 3) if feature else like, keep))
    probabilities = (p,) * members if isinstance(p, float) else p
    # Views of one tensor would count each other's changes; autograd refuses what changed since it was saved.
    rows = [row.squeeze(0) for row in noise.unsafe_split(1)]
    return Listed(dropped(row, n, q, alpha) for row, n, q in zip(x, rows, probabilities, strict=True))


DROPOUTS: dict[Layout, Callable[..., Any]] = {
    Layout.STACKED: dropout_stacked,
    Layout.PACKED: dropout_packed,
    Layout.LISTED: dropout_listed,
}


def _channels(x: Tensor, leading: int) -> Tensor:
    """The first element of every channel, the channel being the last of ``leading`` dims."""
    for dim in range(leading, x.dim()):
        x = x.narrow(dim, 0, 1)
    return x


def column(numbers: tuple[float, ...], x: Tensor) -> Tensor:
    """One number per member, to be broadcast against ``x [B, *S]``."""
    return torch.tensor(numbers, dtype=x.dtype, device=x.device).view(-1, *(1,) * (x.dim() - 1))


def dropped(x: Tensor, noise: Tensor, p: Probability, alpha: bool) -> Tensor:
    """``x`` where ``noise`` is 1, rescaled as torch does; ``noise`` is changed."""
    if isinstance(p, float):
        scale: Any = _scale(p, alpha)
        shift: Any = SELU_LIMIT * scale
        drop: Any = p
    else:
        scale = column(tuple(_scale(q, alpha) for q in p), x)
        shift = SELU_LIMIT * scale
        drop = column(p, x)
    if not alpha:
        return x * noise.mul_(scale)
    offset = noise.sub(1).mul_(shift).add_(shift * drop)
    return x * noise.mul_(scale) + offset


def _scale(p: float, alpha: bool) -> float:
    """Return the factor by which torch scales the kept elements; 0 if ``p`` is 1."""
    if p == 1:
        return 0.0
    return float(((SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5) if alpha else 1 / (1 - p)


@scalars_alike
def native_dropout(site: Site, input: Value, p: Any, train: Any) -> Call:
    return site.call(native_dropout_stacked, (input.to(STACKED), float(p), train), STACKED, "own draws")


def native_dropout_stacked(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Drop out elements of ``x [B, *S]``; returns the values and the mask of kept elements, both ``[B, *S]``."""
    if train is False or p == 0 or x.numel() == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = draw(lambda: bernoulli(x, 1 - p)).bool()
    return x * mask * _scale(p, False), mask


@scalars_alike
def rrelu(site: Site, **arguments: Any) -> Call:
    self, lower, upper, training, generator = arguments.values()
    if training and generator is not None:
        return loop(site, arguments)
    if training:
        return site.call(rrelu_stacked, (self.to(STACKED), lower, upper), STACKED, "own draws")
    x = self.to(STACKED) if self.layout is Layout.LISTED else self
    return site.call(F.leaky_relu, (x, (lower + upper) / 2), x.layout)


def rrelu_stacked(x: Tensor, lower: float, upper: float) -> Tensor:
    """``x [B, *S]`` -> ``[B, *S]``; the draws are the slopes, 1 where ``x`` is positive (Xu et al. 2015)."""
    slopes = draw(lambda: torch.where(x > 0, 1, _slopes(x, lower, upper)).detach())
    return x * slopes


def _slopes(x: Tensor, lower: float, upper: float) -> Tensor:
    source = member_seeds()
    if source is not None:
        return (lower + (upper - lower) * source.uniform(x.shape, x.dtype)).to(x.dtype)
    return torch.empty_like(x).uniform_(lower, upper)


def drawn(target: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call ``target``, an operator whose results are all random, as one draw of the array."""
    source = member_seeds()
    if source is not None and target in FROM_SEEDS:
        return draw(lambda: FROM_SEEDS[target](source, *args, **kwargs))
    return draw(lambda: target(*args, **kwargs))


def _uniform_like(source: MemberSeeds, like: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _uniform(source, like.shape, dtype or like.dtype)


def _uniform(source: MemberSeeds, size: Sequence[Any], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    result_dtype = dtype or torch.get_default_dtype()
    return source.uniform(size, result_dtype).to(result_dtype)


def _normal_like(source: MemberSeeds, like: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _normal(source, like.shape, dtype or like.dtype)


def _normal(source: MemberSeeds, size: Sequence[Any], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    result_dtype = dtype or torch.get_default_dtype()
    return source.normal(size, result_dtype).to(result_dtype)


def _bernoulli(source: MemberSeeds, like: Tensor, p: float | None = None, **_: Any) -> Tensor:
    return (source.uniform(like.shape, like.dtype) < (like if p is None else p)).to(like.dtype)


# Operators that can draw from the seeds of the members, with the member dim first.
FROM_SEEDS: Mapping[Any, Callable[..., Tensor]] = {
    aten.rand.default: _uniform,
    aten.randn.default: _normal,
    aten.rand_like.default: _uniform_like,
    aten.randn_like.default: _normal_like,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
}


@scalars_alike
def elementwise(site: Site, **arguments: Any) -> Call:
    """Draw one number for each element of the operands; shared operands are repeated for each member."""
    if "memory_format" in arguments:
        arguments["memory_format"] = None
    stacked = map_values(arguments, lambda v: v.to(STACKED, rank=site.rank))
    args, kwargs = in_order(site, stacked)
    return site.call(drawn, (site.target, *args), STACKED, "own draws", kwargs)


@scalars_alike
def factory(site: Site, size: Any, **arguments: Any) -> Call:
    """Draw random numbers of a given shape for each member."""
    args, kwargs = in_order(site, {"size": [site.members, *size], **arguments})
    return site.call(drawn, (site.target, *args), STACKED, "own draws", kwargs)


@scalars_alike
def randperm(site: Site, n: Any, **arguments: Any) -> Call:
    return site.call(permutations, (site.members, n), STACKED, "own draws", arguments)


def permutations(members: int, n: int, **options: Any) -> Tensor:
    """One permutation of ``range(n)`` for each member, ``[B, n]``."""
    return draw(lambda: torch.stack([aten.randperm.default(n, **options) for _ in range(members)]))


@scalars_alike
def multinomial(site: Site, **arguments: Any) -> Call:
    self, num_samples, replacement, generator = arguments.values()
    if generator is not None:
        return loop(site, arguments)
    return site.call(multinomial_stacked, (self.to(STACKED), num_samples, replacement), STACKED, "own draws")


def multinomial_stacked(weights: Tensor, samples: int, replacement: bool) -> Tensor:
    """``weights [B, *, C]`` -> ``samples`` classes for each row, ``[B, *, samples]``."""
    rows = weights.reshape(-1, weights.shape[-1])
    return draw(lambda: torch.multinomial(rows, samples, replacement).view(*weights.shape[:-1], samples))


# Only the shape and kind of their draws is that of a tensor.
LIKE = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)

ELEMENTWISE = (
    *LIKE,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.bernoulli.Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.normal_functional.default,
    aten.uniform.default,
    aten.exponential.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.geometric.default,
    aten.random.default,
    aten.random.to,
    getattr(aten.random, "from"),
    aten.poisson.default,
    aten.binomial.default,
)

FACTORIES = (aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.normal.float_float)

_DROPOUTS = frozenset(
    {
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
        aten.native_dropout.default,
        aten.scaled_dot_product_attention.default,
    }
)


def seedable(target: Any, arguments: Mapping[str, Any], example: Any) -> bool:
    """True if an operator with the result ``example`` can draw from the seeds of the members, if they have seeds."""
    if target in _DROPOUTS:
        return not isinstance(arguments.get("train"), MemberScalars)
    supported = target in FROM_SEEDS or target is aten.rrelu.default
    real = isinstance(example, Tensor) and example.dtype.is_floating_point
    return supported and real and not has_per_member(arguments)


RULES: RuleTable = {
    aten.dropout.default: dropout(feature=False, alpha=False),
    aten.feature_dropout.default: dropout(feature=True, alpha=False),
    aten.alpha_dropout.default: dropout(feature=False, alpha=True),
    aten.feature_alpha_dropout.default: dropout(feature=True, alpha=True),
    aten.native_dropout.default: native_dropout,
    aten.rrelu.default: rrelu,
    aten.randperm.default: randperm,
    aten.multinomial.default: multinomial,
    **table(ELEMENTWISE, elementwise),
    **table(FACTORIES, factory),
}
