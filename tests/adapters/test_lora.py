"""hf.lora: an array of adapters trains as peft alone, and saves what peft loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfusion as hf
from tests.adapters.models import (
    AVERAGED,
    BERT,
    CONVOLUTIONS,
    GPT2,
    LLAMA,
    Averaged,
    Base,
    Run,
    alone,
    assert_same,
    convolutions,
    llama,
    population,
)

pytest.importorskip("peft")
pytest.importorskip("transformers")
# Of peft and transformers themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

QV = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}

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


def test_the_base_is_kept_once_and_stays_as_it_is() -> None:
    base = llama()
    before = {name: (tensor, tensor.clone(), tensor.requires_grad) for name, tensor in base.named_parameters()}
    adapters = hf.lora(base, lora_config(**QV), 3)
    fused = hf.fuse(adapters)
    for name, (tensor, value, grad) in before.items():
        assert dict(base.named_parameters())[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.requires_grad is grad
    places = {tensor.data_ptr() for tensor in base.parameters()}
    frozen = [parameter for parameter in fused.parameters() if not parameter.requires_grad]
    assert {parameter.data_ptr() for parameter in frozen} == places
    assert base.config.use_cache
    plain: Any = adapters[0].plain()
    assert plain.config.use_cache
    merged = adapters[0].merge_and_unload()
    assert not {parameter.data_ptr() for parameter in merged.parameters()} & places
    from peft import get_peft_model

    get_peft_model(base, lora_config(**QV))  # as it changes the base, and not what the array knows of it
    assert_same(adapters.member(seed=3).plain(), hf.lora(llama(), lora_config(**QV), seeds=[3])[0].plain())
    with pytest.raises(hf.FusionError, match="merge_adapter would write into the base"):
        adapters[0].merge_adapter()


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


def test_adapters_that_do_not_fit_the_array_are_refused(tmp_path: Path) -> None:
    adapters = hf.lora(llama(), lora_config(r=2, **QV), 2)
    with pytest.raises(hf.FusionError, match=r"rank 4 does not fit an array whose largest rank is 2.*max_rank=4"):
        adapters.member(r=4)
    with pytest.raises(hf.FusionError, match=r"adapts .*k_proj, which none of the members"):
        adapters.member(target_modules=["k_proj"])
    with pytest.raises(hf.FusionError, match=r"lora_dropout=0\.5"):
        adapters.member(lora_dropout=0.5)
    with pytest.raises(hf.FusionError, match="base has an adapter already"):
        hf.lora(adapters[0], lora_config(**QV), 2)
    with pytest.raises(ValueError, match="step of Muon depends on a matrix as a whole"):
        hf.optim.Muon([p for p in hf.fuse(adapters).parameters() if p.requires_grad])


def test_statistics_are_a_members_own() -> None:
    base = convolutions()
    adapters = hf.lora(base, lora_config(target_modules=["0"]), 2)
    assert adapters[0].get_buffer("base_model.model.1.running_mean") is not adapters[1].get_buffer(
        "base_model.model.1.running_mean"
    )
    assert isinstance(hf.fuse(adapters)[0], nn.Module)


class Masked(Averaged):
    """Holds what can be computed again in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6), persistent=False)


def test_only_buffers_outside_of_the_state_dict_are_shared() -> None:
    base = nn.Sequential(Masked(), nn.Linear(6, 6))
    members = hf.lora(base, lora_config(target_modules=["1"]), 2)
    buffers = [dict(member.base_model.model[0].named_buffers()) for member in members]
    assert buffers[0]["mask"] is buffers[1]["mask"]
    assert all(buffers[0][name] is not buffers[1][name] for name in buffers[0].keys() - {"mask"})
