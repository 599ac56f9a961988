"""Many LoRA adapters of one base: ``hf.lora`` against peft one adapter after another, and its multi-adapter loop.

``python -m hfusion.bench lora``: whole training steps (forward, loss, backward, AdamW), every member on a batch and
with a learning rate of its own, on a small Llama and BERT with random weights. Needs peft and transformers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench.machine_description import describe
from hfusion.bench.results import write_json
from hfusion.bench.timing import interleave, speedup, spread
from hfusion.bench.workload import check_agreement

Step = Callable[[], Sequence[Tensor] | Tensor]

VOCABULARY, LENGTH, BATCH, STEPS = 256, 32, 4, 3
# float32: products of other shapes round otherwise.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class LoraCase:
    """A base, which layers are adapted, and a loss of a member's output and target."""

    name: str
    about: str
    make_base: Callable[[], nn.Module]
    fields: dict[str, Any]
    loss: Callable[[Any, Tensor], Tensor]
    classes: int | None = None

    def batches(self, members: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets ``[members, batch, ...]``, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(VOCABULARY, (members, BATCH, LENGTH), generator=generator)
        if self.classes is None:
            return ids, ids
        return ids, torch.randint(self.classes, (members, BATCH), generator=generator)


@dataclass(frozen=True)
class LoraRow:
    """``ms``: of a step of all members; ``speedup``: over peft one after another; ``spread``: of the rounds."""

    model: str
    members: int
    contender: str
    ms: float
    speedup: float
    spread: float


@dataclass(frozen=True)
class SpillRow:
    """``moved``: bytes per step and member, to the device and back; ``peak``: bytes on it."""

    model: str
    members: int
    shards: int
    moved: float
    peak: int


def llama(width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def bert(width: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return BertForSequenceClassification(config)


def next_token(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def labelled(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, target)


def _llama(name: str, width: int) -> LoraCase:
    about = f"4 layers of {width}, sequence {LENGTH}, batch {BATCH}; rank 8 in q and v"
    fields = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraCase(name, about, partial(llama, width), fields, next_token)


CASES = (
    _llama("llama", 64),
    _llama("llama-128", 128),
    LoraCase(
        "bert",
        f"4 layers of 64, sequence {LENGTH}, batch {BATCH}; rank 8 in query and value, a head each",
        partial(bert, 64),
        {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
        labelled,
        classes=10,
    ),
)


def base(case: LoraCase) -> nn.Module:
    """Always the same weights."""
    torch.manual_seed(0)
    return case.make_base().train()


def config(case: LoraCase) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, **copy.deepcopy(case.fields))


def rates(members: int) -> list[float]:
    return [3e-4 * 10 ** (member / max(members - 1, 1)) for member in range(members)]


def one_after_another(case: LoraCase, members: int) -> Step:
    """A peft model and torch.optim.AdamW for each member."""
    from peft import get_peft_model

    models = []
    for member in range(members):
        base_model = base(case)
        torch.manual_seed(member)
        models.append(get_peft_model(base_model, config(case)).train())
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        for model, rate in zip(models, rates(members), strict=True)
    ]
    inputs, target = case.batches(members)

    def step() -> list[Tensor]:
        return [
            _step(case, model, optimizer, inputs[member], target[member])
            for member, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]

    return step


def set_adapter(case: LoraCase, members: int) -> Step:
    """One peft model with an adapter for each member, which are made active in turn."""
    from peft import get_peft_model

    names = [f"member{member}" for member in range(members)]
    base_model = base(case)
    torch.manual_seed(0)
    model: Any = get_peft_model(base_model, config(case), adapter_name=names[0]).train()
    for member, name in enumerate(names[1:], start=1):
        torch.manual_seed(member)
        model.add_adapter(name, config(case))
    optimizers = []
    for name, rate in zip(names, rates(members), strict=True):
        model.set_adapter(name)
        optimizers.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate))
    model.train()
    inputs, target = case.batches(members)

    def step() -> list[Tensor]:
        losses = []
        for member, (name, optimizer) in enumerate(zip(names, optimizers, strict=True)):
            model.set_adapter(name)
            losses.append(_step(case, model, optimizer, inputs[member], target[member]))
        return losses

    return step


def _step(case: LoraCase, model: Any, optimizer: Any, inputs: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = case.loss(model(inputs), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def fused(case: LoraCase, members: int, compile: bool) -> Step:
    """``hf.lora`` and `hfusion.train_step`."""
    array = hf.fuse(hf.lora(base(case), config(case), members, seeds=range(members)))
    array.train()
    trained = [parameter for parameter in array.parameters() if parameter.requires_grad]
    train = hf.train_step(array, case.loss, hf.optim.AdamW(trained, lr=rates(members)), compile=compile)
    inputs, target = map(hf.stacked, case.batches(members))
    return lambda: train(inputs, target)


CONTENDERS: dict[str, Callable[[LoraCase, int], Step]] = {
    "peft": one_after_another,
    "peft-set-adapter": set_adapter,
    "hfusion": lambda case, members: fused(case, members, compile=False),
    "hfusion-compiled": lambda case, members: fused(case, members, compile=True),
}


def run(case: LoraCase, members: int, rounds: int, slot: float) -> list[LoraRow]:
    """Rows of all contenders, whose losses are compared first. Raises Disagreement."""
    steps = {name: start(case, members) for name, start in CONTENDERS.items()}
    check(steps)
    times = interleave(steps, rounds=rounds, slot=slot, device=torch.device("cpu"), tick=lambda: None)
    first = times["peft"]
    return [
        LoraRow(case.name, members, name, 1e3 * statistics.median(seconds), speedup(first, seconds), spread(seconds))
        for name, seconds in times.items()
    ]


def spilled(case: LoraCase, members: int, steps: int = 6) -> SpillRow:
    """An array on a device with half of the memory that it needs, its base in host memory. Raises Disagreement."""
    batches = [tuple(tensor[0] for tensor in case.batches(1))] * steps

    def task() -> hf.Task:
        adapters = hf.lora(base(case), config(case), members, seeds=range(members))
        optimizer = partial(hf.optim.AdamW, lr=rates(members))
        return hf.Task(list(adapters), case.loss, optimizer, batches, name=case.name)

    resident = hf.train([task()], hf.Machine([hf.Device("cpu", memory="8GiB")]))
    half = hf.Machine([hf.Device("cpu", memory=max(resident.peak.values()) // 2)])
    plan = hf.plan([task()], half)
    report = hf.train([task()], half)
    check_agreement("spilled", resident[case.name].losses.double(), report[case.name].losses.double(), 0.0)
    task_plan = plan.tasks[0]
    moved = sum(task_plan.moved_bytes) / members
    return SpillRow(case.name, members, len(task_plan.shards), moved, max(report.peak.values()))


def check(steps: Mapping[str, Step]) -> None:
    """Raise Disagreement where one computes other losses than the first."""
    losses = {
        name: torch.stack([torch.stack(list(step())).double() for _ in range(STEPS)]) for name, step in steps.items()
    }
    expected = next(iter(losses.values()))
    for name, actual in losses.items():
        check_agreement(name, expected, actual, TOLERANCE)


def table(rows: Sequence[LoraRow]) -> Table:
    shown = Table("model", "members", *CONTENDERS, title="ms per step of all members; speed-up over peft")
    for model, members in dict.fromkeys((row.model, row.members) for row in rows):
        by_contender = {row.contender: row for row in rows if (row.model, row.members) == (model, members)}
        shown.add_row(
            model, str(members), *(f"{by_contender[n].ms:.1f}  {by_contender[n].speedup:.2f}x" for n in CONTENDERS)
        )
    return shown


def spill_table(rows: Sequence[SpillRow]) -> Table:
    shown = Table("model", "members", "shards", "moved per step and member", "peak")
    for row in rows:
        sizes = (f"{row.moved / 2**20:.2f} MiB", f"{row.peak / 2**20:.1f} MiB")
        shown.add_row(row.model, str(row.members), str(row.shards), *sizes)
    return shown


def main(arguments: Sequence[str] | None = None) -> list[Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    parser.add_argument("--members", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slot", type=float, default=1.0, help="seconds that each contender runs in a round")
    parser.add_argument("--spill", action="store_true", help="instead: half the memory, and the bytes that are moved")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Any] = []
    with warnings.catch_warnings():
        # Of peft and transformers, and of what is compiled.
        warnings.simplefilter("ignore")
        for case, members in product([case for case in CASES if case.name in chosen.models], chosen.members):
            rows += [spilled(case, members)] if chosen.spill else run(case, members, chosen.rounds, chosen.slot)
    Console(width=120).print(spill_table(rows) if chosen.spill else table(rows))
    if chosen.json is not None:
        write_json(chosen.json, describe(torch.device("cpu")), rows)
    return rows


if __name__ == "__main__":
    main()
