"""Many LoRA adapters of one base (``lora``), by ``hf.lora`` against peft one adapter after another.

Whole training steps (forward, loss, backward, AdamW), every member on a batch and with a learning rate of its own, on a
small Llama with random weights. Needs peft and transformers.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench import fuse_benchmark, harness
from hfusion.bench.cases import Contender, Running, Workload
from hfusion.bench.contenders import trained
from hfusion.bench.harness import Benchmark, Row

VOCABULARY, LENGTH, BATCH = 256, 32, 4


@dataclass(frozen=True)
class LoraCase:
    """Adapters of rank 8 in the queries and values of a Llama of four layers of ``width``."""

    name: str
    about: str
    width: int
    # float32: products of other shapes round otherwise.
    tolerance: float = 1e-3

    def base(self) -> nn.Module:
        """Return the base, always with the same weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
        model: nn.Module = LlamaForCausalLM(config)
        return model.train()


CASES: tuple[Any, ...] = (
    LoraCase("llama", f"4 layers of 64, sequence {LENGTH}, batch {BATCH}; rank 8 in q and v", 64),
    LoraCase("llama-128", "the same with layers of 128", 128),
)


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def next_token(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches(workload: Workload) -> Tensor:
    """Return tokens ``[members, batch, length]``, the same at every call."""
    return torch.randint(VOCABULARY, (workload.members, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def start_peft(workload: Any) -> Running:
    """Start a peft model and torch.optim.AdamW for each member, one after another."""
    from peft import get_peft_model

    pairs = []
    for member, rate in enumerate(workload.rates):
        base: Any = workload.case.base()
        torch.manual_seed(member)
        model = get_peft_model(base, adapter()).train()
        pairs.append((model, torch.optim.AdamW(trained(model), lr=rate)))
    inputs = batches(workload)

    def step() -> list[Tensor]:
        losses = []
        for ids, (model, optimizer) in zip(inputs, pairs, strict=True):
            optimizer.zero_grad()
            loss = next_token(model(ids), ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return Running(step)


def start_hfusion(workload: Any, compile: bool = False) -> Running:
    """Start ``hf.lora`` and `hfusion.train_step`."""
    array = hf.fuse(hf.lora(workload.case.base(), adapter(), workload.members, seeds=range(workload.members)))
    array.train()
    train = hf.train_step(array, next_token, hf.optim.AdamW(trained(array), lr=workload.rates), compile=compile)
    ids = hf.stacked(batches(workload))
    return Running(lambda: train(ids, ids))


CONTENDERS = (
    Contender("peft", "a peft model and AdamW for each member, one after another", start_peft),
    Contender("hfusion", "hf.lora, hf.train_step(compile=False)", start_hfusion),
    Contender("hfusion-compiled", "the same, compiled", partial(start_hfusion, compile=True)),
)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    rounds, slot = options.repeats or (1 if options.quick else 5), 0.1 if options.quick else 1.0
    for case in options.models or CASES[: 1 if options.quick else None]:
        for members in options.members or ((4,) if options.quick else (1, 4, 16)):
            with warnings.catch_warnings():
                # Of peft and transformers, and of what is compiled.
                warnings.simplefilter("ignore")
                workload = Workload(case, members, harness.CPU)
                rows = fuse_benchmark.compare(
                    workload, options.contenders or CONTENDERS, rounds, slot, options.threads, CONTENDERS[0]
                )
            yield from rows


BENCHMARK = Benchmark(__doc__, _run, fuse_benchmark.table, {"models": CASES, "contenders": CONTENDERS}, members=True)
