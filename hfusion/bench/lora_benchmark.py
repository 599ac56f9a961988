"""Many LoRA adapters of one base (``lora``), by ``hf.lora`` against peft one adapter after another.

Whole training steps (forward, loss, backward, AdamW), every member on a batch and with a learning rate of its own, on a
small Llama with random weights. Needs peft and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench import harness
from hfusion.bench.cases import Contender, Disagreement, Running, check_agreement, losses
from hfusion.bench.contenders import trained
from hfusion.bench.harness import Benchmark, Row

VOCABULARY, LENGTH, BATCH, STEPS = 256, 32, 4, 3
# float32: products of other shapes round otherwise.
TOLERANCE = 1e-3

Step = Callable[[], Sequence[Tensor] | Tensor]


@dataclass(frozen=True)
class LoraCase:
    """Adapters of rank 8 in the queries and values of a Llama of four layers of ``width``."""

    name: str
    about: str
    width: int

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


CASES = (
    LoraCase("llama", f"4 layers of 64, sequence {LENGTH}, batch {BATCH}; rank 8 in q and v", 64),
    LoraCase("llama-128", "the same with layers of 128", 128),
)


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def batches(members: int) -> Tensor:
    """Return tokens ``[members, batch, length]``, the same at every call."""
    return torch.randint(VOCABULARY, (members, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def next_token(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rates(members: int) -> list[float]:
    return [3e-4 * 10 ** (member / max(members - 1, 1)) for member in range(members)]


def start_peft(case: LoraCase, members: int) -> Step:
    """Start a peft model and torch.optim.AdamW for each member, one after another."""
    from peft import get_peft_model

    pairs = []
    for member, rate in enumerate(rates(members)):
        base: Any = case.base()
        torch.manual_seed(member)
        model = get_peft_model(base, adapter()).train()
        pairs.append((model, torch.optim.AdamW(trained(model), lr=rate)))
    inputs = batches(members)

    def step() -> list[Tensor]:
        losses = []
        for ids, (model, optimizer) in zip(inputs, pairs, strict=True):
            optimizer.zero_grad()
            loss = next_token(model(ids), ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return step


def start_hfusion(case: LoraCase, members: int, compile: bool = False) -> Step:
    """Start ``hf.lora`` and `hfusion.train_step`."""
    array = hf.fuse(hf.lora(case.base(), adapter(), members, seeds=range(members)))
    array.train()
    train = hf.train_step(array, next_token, hf.optim.AdamW(trained(array), lr=rates(members)), compile=compile)
    ids = hf.stacked(batches(members))
    return lambda: train(ids, ids)


CONTENDERS = (
    Contender("peft", "a peft model and AdamW for each member, one after another", start_peft),
    Contender("hfusion", "hf.lora, hf.train_step(compile=False)", start_hfusion),
    Contender("hfusion-compiled", "the same, compiled", partial(start_hfusion, compile=True)),
)


def compare(case: LoraCase, members: int, rounds: int, slot: float) -> list[Row]:
    """Return a row for each contender, whose losses are compared with peft's first. ``speedup``: over peft."""
    rows, steps = [], {each.name: each.start(case, members) for each in CONTENDERS}
    with warnings.catch_warnings():
        # Of peft and transformers, and of what is compiled.
        warnings.simplefilter("ignore")
        first = {name: losses(Running(step), STEPS) for name, step in steps.items()}
        for name, actual in first.items():
            row: Row = {"model": case.name, "members": members, "contender": name, "reason": ""}
            try:
                check_agreement(name, first["peft"], actual, TOLERANCE)
            except Disagreement as error:
                del steps[name]
                row |= {"reason": str(error), "disagrees": True}
            rows.append(row)
        times = harness.interleave(steps, rounds, slot, harness.CPU)
    for row in rows:
        if not row["reason"]:
            seconds = times[row["contender"]]
            row |= {"ms": 1e3 * statistics.median(seconds), "speedup": harness.speedup(times["peft"], seconds)}
            row["spread"] = harness.spread(seconds)
    return rows


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for case in options.models or CASES[: 1 if options.quick else None]:
        for members in options.members or ((4,) if options.quick else (1, 4, 16)):
            harness.say(f"{case.name} x {members}")
            rounds = options.repeats or (1 if options.quick else 5)
            yield from compare(case, members, rounds, 0.1 if options.quick else 1.0)


def _table(rows: Sequence[Row]) -> Table:
    values: dict[str, Callable[[Row], harness.Cell]] = {
        "ms": lambda row: f"{row['ms']:.1f}",
        "speed-up": lambda row: harness.factor(row["speedup"]),
        "spread": lambda row: f"{row['spread']:.0%}",
    }
    return harness.row_table("one training step of all members", rows, ("model", "members", "contender"), values)


BENCHMARK = Benchmark(__doc__, _run, _table, {"models": CASES, "ways": CONTENDERS}, members=True)
