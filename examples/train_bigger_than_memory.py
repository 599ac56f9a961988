"""Train a language model whose training state is several times the memory of its device.

    python examples/train_bigger_than_memory.py --memory 16MiB --out train_bigger_than_memory.png

A transformer learns Python, character by character, from the source of Python's own standard library. Weights,
gradients and Adam state need several times the budget of the device, a logical one on the CPU, so that this runs
anywhere; ``"cuda:0"`` would do as well. hfusion cuts the model into shards and loads each ahead of its use. The same
model is then trained by a plain loop with all the memory it wants: the losses and weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.schedule.actions import Act
from hfusion.schedule.timeline import Timeline, levels

MIB = 2**20
BATCH = 4
LENGTH = 64
CHARACTERS = 128
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Run:
    """Losses ``[steps]``, the trained model, and the median seconds of a step."""

    losses: Tensor
    model: nn.Module
    seconds: float


class Block(nn.Module):
    """A pre-norm transformer block with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Characters ``[N, T]`` to logits ``[N, T, 128]`` of the characters that follow; nothing in it knows of shards."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.norm(self.blocks(self.token(characters) + self.position(positions))))


def next_character(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy (nats per character) of logits ``[N, T, 128]`` against ``[N, T]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def load(steps: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """``steps`` minibatches of stretches of the standard library: characters, and those that follow them."""
    needed = steps * BATCH * (LENGTH + 1)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes().decode("ascii", "ignore").encode()
    if len(text) < needed:
        raise SystemExit(f"{steps} steps need {needed:,} characters, the standard library has {len(text):,}")
    stretches = torch.frombuffer(text, dtype=torch.uint8).long()[: len(text) // (LENGTH + 1) * (LENGTH + 1)]
    stretches = stretches.view(-1, LENGTH + 1)
    chosen = stretches[torch.randperm(len(stretches), generator=torch.Generator().manual_seed(seed))[: steps * BATCH]]
    return DataLoader(TensorDataset(chosen[:, :-1], chosen[:, 1:]), BATCH, shuffle=True)


def make_model(width: int, layers: int, seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(width, layers)


def make_optimizer(params: list[nn.Parameter]) -> hf.optim.AdamW:
    return hf.optim.AdamW(params, lr=LEARNING_RATE)


def train_plainly(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], seed: int) -> Run:
    """The loop that everybody writes, with everything in memory."""
    fused = hf.fuse([model])
    optimizer = make_optimizer(list(fused.parameters()))
    loss_of = hf.per_model(next_character)
    losses, ends = [], []
    torch.manual_seed(seed)
    for characters, target in loader:
        optimizer.zero_grad()
        loss = loss_of(fused(characters), target)
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach()[0])
        ends.append(time.perf_counter())
    return Run(torch.stack(losses), fused.unfuse()[0], _between(ends))


def step_seconds(timeline: Timeline) -> float:
    """The median seconds from the end of a step to the end of the next."""
    ends: dict[int, float] = {}
    for action in timeline.actions:
        if action.act.lane == "compute":
            ends[action.step] = max(ends.get(action.step, 0.0), action.end)
    return _between(list(ends.values()))


def _between(ends: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in pairwise(ends))


def check_equal(spilled: Run, plain: Run) -> None:
    """Both learned the same, to the last bit."""
    assert torch.equal(spilled.losses, plain.losses), "the losses differ"
    for (name, ours), theirs in zip(spilled.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{name} differs"


def memory_in_time(timeline: Timeline) -> list[tuple[float, int]]:
    """When how many bytes of the device are taken: (seconds, bytes). A LOAD takes what its EVICT gives back."""
    taken = [(action.start, action.bytes) for action in timeline.actions if action.act is not Act.EVICT]
    given = [(action.end, -action.bytes) for action in timeline.actions if action.act is not Act.LOAD]
    return levels(taken + given)


def draw(spilled: Run, plain: Run, timeline: Timeline, budget: int, state: int, path: Path) -> None:
    """Left: the losses of both runs. Right: the memory of the device over the first steps, budget and state."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(plain.losses, color="tab:orange", linewidth=5, alpha=0.5, label="plain loop, in memory")
    left.plot(spilled.losses, color="tab:blue", label="hf.train, in shards")
    left.set(xlabel="step", ylabel="loss (nats per character)", title="The same losses, bit for bit")
    until = 5 * spilled.seconds + min(action.start for action in timeline.actions)
    moments = [(second, size / MIB) for second, size in memory_in_time(timeline) if second < until]
    right.step(*zip(*moments, strict=True), where="post", color="tab:blue", label="taken by hf.train")
    right.axhline(budget / MIB, color="black", linestyle="--", label="budget of the device")
    right.axhline(state / MIB, color="tab:orange", linestyle="--", label="weights, gradients and Adam state")
    right.set(xlabel="seconds", ylabel="MiB", title="Memory in the first steps", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="16MiB", help="budget of the device (16MiB)")
    parser.add_argument("--width", type=int, default=256, help="width of the transformer, a multiple of 4 (256)")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the transformer (6)")
    parser.add_argument("--steps", type=int, default=100, help="minibatches, of 4 x 64 characters (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the text and dropout (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("train_bigger_than_memory.png"), help="plot (train_bigger_than_memory.png)"
    )
    chosen = parser.parse_args(argv)
    for name, least in (("width", 4), ("layers", 1), ("steps", 3)):
        if getattr(chosen, name) < least:
            parser.error(f"--{name} is {getattr(chosen, name)}; it must be at least {least}")
    if chosen.width % 4:
        parser.error(f"--width is {chosen.width}; it must be a multiple of 4, the number of heads")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    chosen = options(argv)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    # The other cores copy.
    torch.set_num_threads(1)
    console = Console(highlight=False)
    loader = load(chosen.steps, chosen.seed)
    model = make_model(chosen.width, chosen.layers, chosen.seed)
    machine = hf.Machine([hf.Device("cpu", memory=chosen.memory)])
    budget = machine.devices[0].memory
    # Float32: weights, gradients, and two values that Adam keeps for each.
    state = 4 * 4 * sum(param.numel() for param in model.parameters())
    console.print(f"training takes {state / MIB:.1f} MiB of state, {state / budget:.1f} times what the device has")
    # The model stays as it is, so that the plain loop can begin with it, too.
    task = hf.Task(model, next_character, optimizer=make_optimizer, loader=loader, name="python", seed=chosen.seed)
    with console.status("training in shards"):
        report = hf.train([task], machine)
    print(report.plan)
    spilled = Run(report["python"].losses[:, 0], report["python"].models[0], step_seconds(report.timeline))
    with console.status("training in memory"):
        plain = train_plainly(model, loader, chosen.seed)
    table = Table("loss at step", "hf.train, in shards", "plain loop, in memory")
    for step in sorted({*range(0, chosen.steps, max(1, chosen.steps // 8)), chosen.steps - 1}):
        table.add_row(str(step), f"{spilled.losses[step]:.6f}", f"{plain.losses[step]:.6f}")
    table.add_row("seconds per step", f"{spilled.seconds:.3f}", f"{plain.seconds:.3f}", style="bold")
    console.print(table)
    check_equal(spilled, plain)
    console.print("losses and weights are equal, bit for bit")
    peak = report.peak["cpu"]
    console.print(f"peak {peak / MIB:.1f} MiB of a budget of {budget / MIB:.1f} MiB")
    draw(spilled, plain, report.timeline, budget, state, chosen.out)
    console.print(f"plot: {chosen.out}")


if __name__ == "__main__":
    main()
