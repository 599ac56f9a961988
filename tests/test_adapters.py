"""hf.lora: an array of adapters trains as peft alone, and saves what peft loads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

pytest.importorskip("peft")
pytest.importorskip("transformers")
# Of peft and transformers themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

QV = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


# Small bases with random weights, in float64, and peft alone as the oracle.

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


CASES: dict[str, tuple[Base, dict[str, Any], list[dict[str, Any]]]] = {
    "ranks, alphas, layers": (
        LLAMA,
        {"r": 4, "lora_alpha": 8, **QV},
        [{"r": 2}, {"r": 5, "lora_alpha": 3}, {"target_modules": ["q_proj", "o_proj"]}, {"layers_to_transform": [1]}],
    ),
    "patterns": (
        LLAMA,
        {"r": 4, "use_rslora": True, "init_lora_weights": "gaussian", **QV},
        [{"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"layers.1.self_attn.v_proj": 5.5}, "r": 3}],
    ),
    "all": (
        LLAMA,
        {"r": 4, "init_lora_weights": "orthogonal", "target_modules": "all-linear", "task_type": "CAUSAL_LM"},
        [{}, {"r": 2}],
    ),
    "dora": (LLAMA, {"r": 4, "use_dora": True, **QV}, [{"r": 2}, {"r": 4, "lora_alpha": 1}]),
    "bias of adapters": (
        BERT,
        {"r": 4, "lora_bias": True, "target_modules": ["query", "output.dense"], "task_type": "SEQ_CLS"},
        [{}, {"r": 2, "init_lora_weights": False}],
    ),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "q_proj"]}, [{"r": 3}, {"r": 2, "lora_alpha": 2}]),
    "a head of its own": (
        BERT,
        {"r": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", "bias": "lora_only"},
        [{"r": 4}, {"r": 1, "lora_alpha": 32}],
    ),
    "biases": (BERT, {"target_modules": ["query"], "bias": "all"}, [{"r": 3}, {"r": 2}]),
    "conv1d": (GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}, [{"r": 2}, {"r": 3}]),
    "running average": (AVERAGED, {"target_modules": ["inner"]}, [{"r": 2}, {"r": 3}]),
    "convolution": (CONVOLUTIONS, {"target_modules": ["0"], "modules_to_save": ["5"]}, [{"r": 2}, {"r": 3}]),
}


def lora_config(**fields: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**fields)


@pytest.mark.parametrize("case", CASES)
def test_members_train_as_alone_and_are_saved_for_peft(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base, fields, changes = CASES[case]
    seeds = [7 + b for b in range(len(changes))]
    config, run = lora_config(**fields), Run.of(base, len(changes))
    adapters = hf.lora(base.make(), config, changes, seeds=seeds)
    pop = population(base, adapters, run)
    for inputs, target in run.data:
        pop.step(hf.stacked(inputs), hf.stacked(target))
    operators = {row.operator for part in pop.fused.report().parts for row in part.rows}
    assert operators
    assert not any("opaque" in operator for operator in operators)
    for b, change in enumerate(changes):
        reference = alone(base, dataclasses.replace(config, **change), seeds[b], run, b)
        assert_same(pop.models[b].plain(), reference)  # type: ignore[union-attr]
        pop.models[b].save_pretrained(tmp_path / str(b))  # type: ignore[union-attr]
        inputs = run.data[0][0][b]
        # In train mode, as peft saves no running statistics.
        expected = reference.train()(inputs)
        for model in (PeftModel.from_pretrained(base.make(), tmp_path / str(b)), adapters.load(tmp_path / str(b))):
            torch.testing.assert_close(logits(model.train()(inputs)), logits(expected), rtol=1e-9, atol=1e-11)


def logits(out: Any) -> Any:
    return getattr(out, "logits", out)


def test_members_join_leave_and_are_copied() -> None:
    base, config = LLAMA, lora_config(r=4, **QV)
    run = Run.of(base, 3, steps=6)
    adapters = hf.lora(base.make(), config, [{"r": 2}, {"r": 4}, {"r": 1}], seeds=[1, 2, 3], max_rank=6)
    pop = population(base, adapters, run)
    late = Run(run.rates, run.clips, run.data[2:])
    for step, (inputs, target) in enumerate(run.data):
        if step == 2:
            pop.stop(1)
            joins = adapters.member(r=6, lora_alpha=2, seed=9)
            pop.start(1, joins, lr=run.rates[1], clip_norm=run.clips[1])
        pop.step(hf.stacked(inputs), hf.stacked(target))
    assert_same(pop.models[1].plain(), alone(base, lora_config(r=6, lora_alpha=2, **QV), 9, late, 1))  # type: ignore[union-attr]
    assert_same(pop.models[0].plain(), alone(base, lora_config(r=2, **QV), 1, run, 0))  # type: ignore[union-attr]
    pop.copy(1, 2)
    copied: Any = pop.models[2]
    assert copied.plain().peft_config["default"].r == 6
    assert_same(copied.plain(), pop.models[1].plain())  # type: ignore[union-attr]
    stopped = pop.stop(2)
    base_name = "base_model.model.lm_head.weight"
    assert stopped.get_parameter(base_name).data_ptr() == pop.fused.get_parameter(base_name).data_ptr()
    assert_same(stopped.plain(), pop.models[1].plain())  # type: ignore[union-attr]


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, 2, "computes the start of an adapter from the weights of the base"),
    "tokens": ({"trainable_token_indices": [1]}, 2, "trainable_token_indices"),
    "rslora": ({}, [{}, {"use_rslora": True}], "member 1 has use_rslora=True.*lora_alpha"),
    "one dora": ({}, [{}, {"use_dora": True}], "member 1 has use_dora=True"),
    "dora elsewhere": ({"use_dora": True}, [{}, {"target_modules": ["k_proj"]}], "does not train .*magnitude"),
    "inference": ({"inference_mode": True}, 2, "inference_mode=True leaves nothing to train"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_members_that_do_not_compose_are_refused(case: str) -> None:
    fields, members, message = REFUSED[case]
    with pytest.raises(hf.FusionError, match=message):
        hf.lora(llama(), lora_config(**{**QV, **fields}), members)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none": (0, {}, "members=0"),
    "empty": ([], {}, "members is an empty list"),
    "one dict": ({"r": 2}, {}, "members={'r': 2}"),
    "unknown": ([{"rank": 2}], {}, "'rank' is no field of LoraConfig"),
    "seeds": (2, {"seeds": [1]}, "1 seeds for 2 members"),
    "room": (2, {"max_rank": 2}, "max_rank=2 is less than the rank 8"),
    "no config": ([1], {}, "member 0 must be a peft.LoraConfig, got int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    members, options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        hf.lora(llama(), lora_config(**QV), members, **options)
