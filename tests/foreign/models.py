"""Models of other packages, small and in float64: each with its batches, and a loss of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

BATCH = 4


@dataclass(frozen=True)
class Batch:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Foreign:
    """A row of the table.

    Attributes:
        make: a model; skips the test where its package is missing.
        batch: inputs of one minibatch.
        loss: a number from what the model gives.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor]


def squares(outputs: Any) -> Tensor:
    found = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.square().mean() for leaf in found]).sum()


def numbers(*shape: int) -> Callable[[], Batch]:
    return lambda: Batch((torch.randn(BATCH, *shape),))


def tokens() -> Batch:
    return Batch(kwargs={"input_ids": torch.randint(2, 17, (BATCH, 6))})


def next_token(logits: Tensor) -> Tensor:
    # Losses of transformers round to float32.
    return F.cross_entropy(logits.flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % 17)


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


def rows() -> Batch:
    categories = [torch.randint(0, count, (BATCH,)) for count in (4, 3, 5)]
    return Batch((torch.stack(categories, 1), torch.randn(BATCH, 6)))


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


def observations() -> Batch:
    return Batch((torch.randn(BATCH, 4),), {"deterministic": True})


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
    model = transformers.LongformerForMaskedLM(config)
    for name, parameter in model.named_parameters():
        # Their gradients are zero but for rounding, which Adam enlarges.
        parameter.requires_grad_(not name.endswith(("key.bias", "key_global.bias")))
    return Logits(model).double()


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


FOREIGN = {
    "tab-transformer-pytorch": Foreign(tab_transformer, rows, squares),
    "iTransformer": Foreign(i_transformer, numbers(8, 3), squares),
    "stable-baselines3 ActorCriticPolicy": Foreign(actor_critic, observations, squares),
    "ncps LTC": Foreign(ltc, numbers(5, 3), squares),
    "torch spectral_norm": Foreign(spectral_norm, numbers(2, 8), squares),
    "peft prefix tuning": Foreign(prefix_tuning, tokens, next_token),
    "transformers RecurrentGemma": Foreign(recurrent_gemma, tokens, next_token),
    "transformers Bloom": Foreign(bloom, tokens, next_token),
    "transformers Longformer": Foreign(longformer, tokens, next_token),
    "gpytorch variational GP": Foreign(variational_gp, numbers(2), squares),
}
