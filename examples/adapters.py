"""Adapters of one small language model, each for texts of its own, as one array.

    python examples/adapters.py --members 8 --steps 60 --out runs/adapters

The base is a Llama with random weights, which first learns some of Python's standard library, character by character.
Then every member is a LoRA adapter that goes on with one module of it: of its own rank, learning rate and data, beside
the others. What is written is what peft loads: ``PeftModel.from_pretrained(base, "runs/adapters/json.decoder")``.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hfusion as hf

MODULES = ["json.decoder", "textwrap", "heapq", "bisect", "csv", "calendar", "random", "statistics"]
COMMON = ["argparse", "inspect"]
LETTERS, LENGTH, BATCH = 128, 48, 8


def text(module: str) -> Tensor:
    """The source of a module of the standard library, a number for each character."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return torch.tensor([min(ord(letter), LETTERS - 1) for letter in Path(found.origin).read_text()])


def windows(source: Tensor, generator: torch.Generator) -> Tensor:
    """Some pieces of a text: ``[batch, length]``."""
    starts = torch.randint(len(source) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([source[start : start + LENGTH] for start in starts])


def next_letter(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_base(steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    base, source = LlamaForCausalLM(config), torch.cat([text(module) for module in COMMON])
    opt, generator = torch.optim.AdamW(base.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = windows(source, generator)
        opt.zero_grad()
        next_letter(base(ids), ids).backward()
        opt.step()
    return base


def adapt(base: LlamaForCausalLM, modules: Sequence[str], steps: int, compile: bool) -> tuple[hf.Population, Tensor]:
    """The adapters, trained, and their losses ``[steps, members]``."""
    config = LoraConfig(target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    ranks = [{"r": 2 ** (1 + b % 3), "lora_alpha": 16} for b in range(len(modules))]
    pop = hf.Population(
        hf.lora(base, config, ranks, seeds=list(range(len(modules)))),
        optimizer=lambda params: hf.optim.AdamW(params, lr=[1e-2 / (1 + b % 2) for b in range(len(modules))]),
        loss=next_letter,
        clip_norm=1.0,
        tags=modules,
        compile=compile,
    )
    generator, sources = torch.Generator().manual_seed(1), [text(module) for module in modules]
    losses = []
    for _ in range(steps):
        ids = hf.stacked(torch.stack([windows(source, generator) for source in sources]))
        losses.append(pop.step(ids, ids))
    return pop, torch.stack(losses)


def main(arguments: Sequence[str] | None = None) -> Tensor:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8, choices=range(1, len(MODULES) + 1))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    chosen = parser.parse_args(arguments)
    modules = MODULES[: chosen.members]
    pop, losses = adapt(make_base(chosen.steps), modules, chosen.steps, not chosen.eager)
    table = Table("adapter", "rank", "loss at first", "at last")
    for row, (module, model) in enumerate(zip(modules, pop.models, strict=True)):
        adapter: Any = model
        rank = adapter.plain().peft_config["default"].r
        table.add_row(module, str(rank), f"{losses[:5, row].mean():.2f}", f"{losses[-5:, row].mean():.2f}")
        if chosen.out is not None:
            adapter.save_pretrained(chosen.out / module)
    Console().print(table)
    return losses


if __name__ == "__main__":
    main()
