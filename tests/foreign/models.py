"""Models of other packages, small and in float64, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.alone import Call, call

BATCH = 4


def numbers(*shape: int) -> Callable[[], Call]:
    return lambda: call(torch.randn(BATCH, *shape))


def tokens() -> Call:
    return call(input_ids=torch.randint(2, 17, (BATCH, 6)))


class Logits(nn.Module):
    """A language model without the cache among its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits  # type: ignore[no-any-return]


def tab_transformer() -> nn.Module:
    package = pytest.importorskip("tab_transformer_pytorch")
    model = package.TabTransformer(
        categories=(4, 3, 5),
        num_continuous=6,
        dim=8,
        dim_out=1,
        depth=2,
        heads=2,
        dim_head=4,
        attn_dropout=0.0,
        ff_dropout=0.0,
        mlp_act=nn.ReLU(),
    )
    # Its first call makes an attribute.
    model(*rows().args)
    return model  # type: ignore[no-any-return]


def rows() -> Call:
    categories = [torch.randint(0, count, (BATCH,)) for count in (4, 3, 5)]
    return call(torch.stack(categories, 1), torch.randn(BATCH, 6))


def i_transformer() -> nn.Module:
    package = pytest.importorskip("iTransformer")
    return package.iTransformer(  # type: ignore[no-any-return]
        num_variates=3,
        lookback_len=8,
        dim=8,
        depth=2,
        heads=2,
        dim_head=4,
        pred_length=(4,),
        num_tokens_per_variate=1,
        use_reversible_instance_norm=True,
        attn_dropout=0.0,
        ff_dropout=0.0,
    )


def actor_critic() -> nn.Module:
    policies = pytest.importorskip("stable_baselines3.common.policies")
    spaces = pytest.importorskip("gymnasium").spaces

    class Policy(policies.ActorCriticPolicy):  # type: ignore[misc, name-defined]
        def extract_features(self, obs: Tensor, features_extractor: Any = None) -> Any:
            # Past the rounding of observations to float32.
            return (features_extractor or self.features_extractor)(obs)

    return Policy(spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)), lambda _: 1e-3, net_arch=[8]).double()  # type: ignore[no-any-return]


def observations() -> Call:
    return call(torch.randn(BATCH, 4), deterministic=True)


def ltc() -> nn.Module:
    package, wirings = pytest.importorskip("ncps.torch"), pytest.importorskip("ncps.wirings")
    return package.LTC(3, wirings.AutoNCP(8, 2), batch_first=True).double()  # type: ignore[no-any-return]


def spectral_norm() -> nn.Module:
    normed = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(normed(nn.Conv1d(2, 4, 3)), nn.ReLU(), nn.Flatten(), normed(nn.Linear(24, 3)))


def prefix_tuning() -> nn.Module:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(
        vocab_size=17,
        n_positions=32,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    tuning = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return Logits(peft.get_peft_model(transformers.GPT2LMHeadModel(config), tuning)).double()


def recurrent_gemma() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=3,
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        lru_width=8,
        attention_window_size=8,
    )
    return Logits(transformers.RecurrentGemmaForCausalLM(config)).double()


def bloom() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(
        vocab_size=17, hidden_size=8, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False
    )
    return Logits(transformers.BloomForCausalLM(config)).double()


def longformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LongformerConfig(
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        attention_window=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
    )
    return Logits(transformers.LongformerForMaskedLM(config)).double()


def variational_gp() -> nn.Module:
    gpytorch = pytest.importorskip("gpytorch")
    variational = gpytorch.variational

    class Process(gpytorch.models.ApproximateGP):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            distribution = variational.CholeskyVariationalDistribution(5)
            super().__init__(variational.VariationalStrategy(self, torch.randn(5, 2), distribution))
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    class Moments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.process = Process()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found = self.process(x)
            return found.mean, found.variance, self.process.variational_strategy.kl_divergence()

    model = Moments().double()
    # The first call initialises the variational distribution.
    model(torch.randn(BATCH, 2))
    return model


# How to make a model, which skips the test where its package is missing, and the inputs of one minibatch.
FOREIGN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "tab-transformer-pytorch": (tab_transformer, rows),
    "iTransformer": (i_transformer, numbers(8, 3)),
    "stable-baselines3 ActorCriticPolicy": (actor_critic, observations),
    "ncps LTC": (ltc, numbers(5, 3)),
    "torch spectral_norm": (spectral_norm, numbers(2, 8)),
    "peft prefix tuning": (prefix_tuning, tokens),
    "transformers RecurrentGemma": (recurrent_gemma, tokens),
    "transformers Bloom": (bloom, tokens),
    "transformers Longformer": (longformer, tokens),
    "gpytorch variational GP": (variational_gp, numbers(2)),
}
