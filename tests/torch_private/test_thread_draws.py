"""A thread that draws from its own generator gets the numbers that torch's generator would give."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.torch_private.thread_draws import drawing_from

ONES = torch.ones(4, 3)


def forked() -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        inside = torch.rand(3)
    return torch.stack([inside, torch.rand(3)])


def seeded_by_itself() -> Tensor:
    seed = torch.seed()
    first = torch.rand(3)
    torch.manual_seed(seed)
    return first - torch.rand(3)


def put_back() -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return first - torch.rand(3)


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "rand into": lambda: torch.rand(3, out=torch.empty(3)),
    "rand, of torch's generator": lambda: torch.rand(3, generator=torch.default_generator),
    "rand, of another": lambda: torch.rand(3, generator=torch.Generator().manual_seed(5)),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn, complex": lambda: torch.randn(3, dtype=torch.complex64),
    "randint": lambda: torch.randint(2, 90, (5,)),
    "randperm": lambda: torch.randperm(9),
    "random_, as samplers": lambda: torch.empty((), dtype=torch.int64).random_(),
    "normal of tensors": lambda: torch.normal(ONES, ONES),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "multinomial": lambda: torch.multinomial(ONES, 2),
    "poisson": lambda: torch.poisson(ONES),
    "binomial": lambda: torch.binomial(ONES * 9, ONES / 2),
    "gamma": lambda: torch.distributions.Gamma(1.0, 2.0).sample((3,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "in place": lambda: [torch.empty(3).uniform_(), torch.empty(3).exponential_(), torch.empty(3).geometric_(0.5)],
    "dropout": lambda: [F.dropout(ONES), F.alpha_dropout(ONES, training=True), F.dropout1d(ONES)],
    "rrelu": lambda: F.rrelu(-ONES, training=True),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout_p=0.5),
    "below vmap": lambda: torch.vmap(lambda x: Doubled.apply(x + torch.rand_like(x)), randomness="different")(ONES),
    "a new layer": lambda: nn.LSTM(2, 2, 2, dropout=0.5)(torch.ones(3, 2, 2))[0].detach(),
    "the seed": lambda: torch.tensor(torch.initial_seed()),
    "the state": torch.get_rng_state,
    "rand, of torch.random's generator": lambda: torch.rand(3, generator=torch.random.default_generator),
    "the state of torch.random's generator": lambda: torch.random.default_generator.get_state(),
    "fork_rng": forked,
    "seed": seeded_by_itself,
    "set_rng_state": put_back,
}


class Doubled(torch.autograd.Function):
    """An operator of Python, to torch.vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def same(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_from_its_own(name: str) -> None:
    """The same as from torch's with that seed, which it leaves alone; and the next draw, too."""
    draw = DRAWS[name]
    torch.manual_seed(3)
    expected = draw(), torch.rand(2)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    with drawing_from(generator, nullcontext):
        drawn = draw(), torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(drawn[0], expected[0])
    if name != "seed":
        assert torch.equal(drawn[1], expected[1])


def _is_torchs_own() -> bool:
    """Check that `torch.random` has torch's generator under its name, for those who read it and for its functions."""
    shared = torch.default_generator
    return torch.random.default_generator is shared and vars(torch.random)["default_generator"] is shared


def test_an_error_ends_it() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), drawing_from(torch.Generator(), nullcontext):
        raise ValueError("inside")
    assert _is_torchs_own()
    torch.rand(3)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_goes_on_from_there() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    with drawing_from(generator, nullcontext):
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(torch.rand(3), expected) and _is_torchs_own() else 1)
    assert os.waitpid(child, 0)[1] == 0
