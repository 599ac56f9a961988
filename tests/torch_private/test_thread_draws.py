"""A thread that draws from its own generator gets the numbers that torch's generator would give."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.torch_private.thread_draws import drawing_from, seen_in_modes

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


def test_other_threads_draw_from_torchs() -> None:
    """Both draw in turns."""
    torch.manual_seed(1)
    expected = torch.rand(6)
    torch.manual_seed(1)
    generator, meet, from_thread = torch.Generator().manual_seed(2), Barrier(2), []

    def aside() -> None:
        with drawing_from(generator, nullcontext):
            for _ in range(3):
                meet.wait()
                from_thread.append(torch.rand(2))
                meet.wait()

    thread = Thread(target=aside)
    thread.start()
    from_main = []
    for _ in range(3):
        meet.wait()
        meet.wait()
        from_main.append(torch.rand(2))
    thread.join()
    assert torch.equal(torch.cat(from_main), expected)
    assert torch.equal(torch.cat(from_thread), torch.rand(6, generator=torch.Generator().manual_seed(2)))


class Replaced(TorchDispatchMode):
    """Gives random numbers in place of all results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with seen_in_modes():
            return torch.stack([torch.rand(3), torch.rand(3, out=torch.empty(3))])


@pytest.mark.parametrize("redirected", [False, True])
def test_a_mode_draws_from_the_generator_of_its_thread(redirected: bool) -> None:
    expected = torch.rand(6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2 if redirected else 1)
    before = torch.get_rng_state()
    with drawing_from(torch.Generator().manual_seed(1), nullcontext) if redirected else nullcontext(), Replaced():
        drawn = torch.rand(3)
    assert torch.equal(drawn, expected.view(2, 3))
    assert torch.equal(torch.get_rng_state(), before) == redirected


def _is_torchs_own() -> bool:
    """Check that `torch.random` has torch's generator under its name, for those who read it and for its functions."""
    shared = torch.default_generator
    return torch.random.default_generator is shared and vars(torch.random)["default_generator"] is shared


def test_torchs_generator_stays_one_for_all_threads() -> None:
    """Another thread reads torch's generator while one draws from its own, and afterwards so does each."""
    thread_generator, read_generators = torch.Generator(), []

    def read() -> None:
        from torch.random import default_generator

        torch.randn(2, generator=default_generator)
        read_generators.extend([default_generator, torch.random.default_generator])

    with drawing_from(thread_generator, nullcontext), drawing_from(thread_generator, nullcontext):
        assert torch.random.default_generator is thread_generator
        thread = Thread(target=read)
        thread.start()
        thread.join()
    assert all(generator is torch.default_generator for generator in read_generators)
    assert len(read_generators) == 2
    assert _is_torchs_own()
    assert type(torch.random) is type(os)


def test_one_within_another() -> None:
    outer, inner = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    with drawing_from(outer, nullcontext):
        with drawing_from(inner, nullcontext):
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(2)))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_an_error_ends_it() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), drawing_from(torch.Generator(), nullcontext):
        raise ValueError("inside")
    assert _is_torchs_own()
    torch.rand(3)
    assert not torch.equal(torch.get_rng_state(), before)


def test_threads_that_end_in_any_order_leave_torch_as_it_was() -> None:
    """The first that ends takes nothing from those that still draw from their own."""
    meet = Barrier(2)
    seeds: list[int] = []

    def aside() -> None:
        with drawing_from(torch.Generator().manual_seed(7), nullcontext):
            meet.wait()
            meet.wait()
            seeds.append(torch.initial_seed())

    thread = Thread(target=aside)
    with drawing_from(torch.Generator(), nullcontext):
        thread.start()
        meet.wait()
    meet.wait()
    thread.join()
    assert seeds == [7]
    assert _is_torchs_own()


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
