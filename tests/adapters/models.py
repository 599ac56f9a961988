"""Small bases with random weights, in float64, and peft alone as the oracle."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

VOCABULARY = 40


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config).double()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).double()


class Averaged(nn.Module):
    """Normalises by an average of its own, and has a table that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(36, 6), nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("table", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scaled(self.inner(x.flatten(1)))
        if not self.training:
            return self.outer(hidden - self.average)
        self.average.lerp_(hidden.detach().mean(0), 0.1)
        return self.outer(hidden - hidden.mean(0))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.table


def averaged() -> nn.Module:
    torch.manual_seed(0)
    return Averaged().double()


def next_token(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def labelled(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(getattr(out, "logits", out), target)


@dataclasses.dataclass(frozen=True)
class Base:
    """A base, a batch ``[members, ...]`` and a loss."""

    make: Callable[[], Any]
    data: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


def tokens(members: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (members, 2, 5))
    return ids, ids


def documents(members: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (members, 4, 6)), torch.randint(3, (members, 4))


def images(members: int) -> tuple[Tensor, Tensor]:
    return torch.randn(members, 4, 1, 6, 6, dtype=torch.float64), torch.randint(3, (members, 4))


LLAMA = Base(llama, tokens, next_token)
BERT = Base(bert, documents, labelled)
GPT2 = Base(gpt2, tokens, next_token)
AVERAGED = Base(averaged, images, labelled)
CONVOLUTIONS = Base(convolutions, images, labelled)


@dataclasses.dataclass(frozen=True)
class Run:
    """How members are trained: one value each of everything."""

    rates: Sequence[float]
    clips: Sequence[float]
    data: Sequence[tuple[Tensor, Tensor]]

    @staticmethod
    def of(base: Base, members: int, steps: int = 3) -> Run:
        torch.manual_seed(1)
        rates = [1e-2 * 1.7**b for b in range(members)]
        clips = [0.1 + 0.2 * b for b in range(members)]
        return Run(rates, clips, [base.data(members) for _ in range(steps)])


def alone(base: Base, config: Any, seed: int, run: Run, member: int) -> Any:
    """The member as peft and torch.optim train it."""
    from peft import get_peft_model

    base_model = base.make()
    torch.manual_seed(seed)
    model = get_peft_model(base_model, copy.deepcopy(config))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=run.rates[member], weight_decay=0.1)
    for inputs, target in run.data:
        optimizer.zero_grad()
        base.loss(model(inputs[member]), target[member]).backward()
        torch.nn.utils.clip_grad_norm_(trained, run.clips[member])
        optimizer.step()
    return model


def population(base: Base, adapters: Any, run: Run) -> hf.Population:
    return hf.Population(
        adapters,
        optimizer=lambda params: hf.optim.AdamW(params, lr=run.rates, weight_decay=0.1),
        loss=base.loss,
        clip_norm=run.clips,
        compile=False,
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Every tensor of two models, by name."""
    actual_state, expected_state = actual.state_dict(), expected.state_dict()
    assert actual_state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        torch.testing.assert_close(actual_state[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
