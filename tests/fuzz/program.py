"""A random program as a value: statements made of pieces, in blocks, each a plain module class; and its source text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from textwrap import indent

SIZES = {
    "vec": ("n", 6),
    "half": ("n", 3),
    "row": ("n",),
    "seq": ("n", "t", 6),
    "img": ("n", 4, 6, 6),
    "sig": ("n", 4, 8),
    "vol": ("n", 2, 4, 4, 4),
    "mat": ("n", 3, 3),
    "num": (),
    "ids": ("n", "t"),
    "lab": ("n",),
    "mask": ("n", 6),
    "cvec": ("n", 6),
}
"""The kinds of values: what a piece takes and gives. ``n`` is the number of samples, ``t`` a length."""

FLOATS = frozenset(SIZES) - {"ids", "lab", "mask"}


@dataclass(frozen=True)
class Piece:
    """One way to compute something, as text with places to fill in.

    ``{0}``, ``{1}`` are the operands, ``{o}``, ``{o1}`` the results, ``{s}`` what ``module`` or ``init`` makes of it;
    other places are drawn from ``choices``, those named ``each_...`` once per member. ``view``: the result may lie in
    the memory of the first operand. ``writes``: the first operand is written. ``island``: no graph holds it.
    """

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    code: str = "{o} = {s}({0})"
    module: str = ""
    init: str = ""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    view: bool = False
    writes: bool = False
    island: bool = False

    @property
    def chains(self) -> bool:
        """Whether it may stand in an ``nn.Sequential``."""
        return bool(self.module) and self.code == "{o} = {s}({0})" and self.takes == self.gives


@dataclass(frozen=True)
class Statement:
    """A piece at its place. ``slot`` names its state: two statements of one slot use one submodule.

    ``holder`` says where a submodule hangs: attr, dict, list or seq, the last followed by ``chain``, more submodules;
    ``care`` is plain, frozen, shared (one object in all members) or eval.
    """

    piece: Piece
    operands: tuple[str, ...]
    results: tuple[str, ...]
    slot: str
    choices: tuple[tuple[str, str], ...] = ()
    holder: str = "attr"
    chain: tuple[str, ...] = ()
    care: str = "plain"
    region: str = ""

    def made(self, block: str) -> list[str]:
        """The lines of ``__init__``."""
        names = dict(self.choices)
        if self.piece.init:
            return self.piece.init.format(s=self.slot, **names).splitlines()
        if not self.piece.module:
            return []
        made = self.piece.module.format(**names)
        if self.care == "shared":
            made = f'once("{block}.{self.slot}", lambda: {made})'
        lines = [f"{self.place} = {self._held(made)}" if self.holder != "dict" else f"{self.place} = {made}"]
        if self.care in ("frozen", "shared"):
            lines.append(f"{self.place}.requires_grad_(False)")
        if self.care == "eval":
            lines.append(f"{self.place}.eval()")
        if self.holder in ("list", "seq"):
            lines = [line.replace(self.place, f"self.{self.slot}", 1) for line in lines]
        return lines

    def _held(self, made: str) -> str:
        if self.holder == "list":
            return f"nn.ModuleList([{made}])"
        if self.holder == "seq":
            return f"nn.Sequential({', '.join((made, *self.chain))})"
        return made

    @property
    def place(self) -> str:
        """How forward reaches the state."""
        if self.piece.init:
            return f"self.{self.slot}"
        return {"dict": f'self.parts["{self.slot}"]', "list": f"self.{self.slot}[0]"}.get(
            self.holder, f"self.{self.slot}"
        )

    def lines(self) -> list[str]:
        """The lines of ``forward``."""
        names = {place: text.format(*self.operands) for place, text in self.choices}
        results = {"o" if k == 0 else f"o{k}": name for k, name in enumerate(self.results)}
        text = self.piece.code.format(*self.operands, s=self.place, **results, **names)
        if self.region:
            text = f"with {self.region}:\n" + indent(text, "    ")
        return text.splitlines()


@dataclass(frozen=True)
class Block:
    """A module class. ``inputs`` are the names and kinds of what forward takes; ``results`` the names it gives.

    ``evals``: submodules that its own ``train()`` keeps in eval mode. ``form``: how the results are nested.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    form: str = "plain"
    evals: tuple[str, ...] = ()

    def kinds(self) -> dict[str, str]:
        """The kind of every value."""
        found = dict(self.inputs)
        for s in self.statements:
            found |= dict(zip(s.results, s.piece.gives, strict=True))
        return found

    def text(self) -> str:
        made: dict[str, list[str]] = {}
        for s in self.statements:
            made.setdefault(s.slot, s.made(self.name))
        parts = any(s.holder == "dict" and s.piece.module for s in self.statements)
        start = ["super().__init__()", *(["self.parts = nn.ModuleDict()"] if parts else [])]
        init = [*start, *(line for lines in made.values() for line in lines)]
        body = [line for s in self.statements for line in s.lines()]
        names = ", ".join(name for name, _ in self.inputs)
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self, b, once):"]
        lines += ["        " + line for line in init]
        lines += ["", f"    def forward(self, {names}):"]
        lines += ["        " + line for line in [*body, f"return {self._returned()}"]]
        places = {s.slot: s.place for s in self.statements if s.piece.module}
        kept = [places[slot] for slot in self.evals if slot in places]
        if kept:
            lines += ["", "    def train(self, mode=True):", "        super().train(mode)"]
            lines += [f"        {place}.eval()" for place in kept] + ["        return self"]
        return "\n".join(lines)

    def _returned(self) -> str:
        if self.form == "plain" and len(self.results) == 1:
            return self.results[0]
        if self.form == "dict":
            return "{" + ", ".join(f'"{name}": {name}' for name in self.results) + "}"
        if self.form == "nested":
            first, *rest = self.results
            return f'{{"first": [{first}], "rest": ({"".join(f"{name}, " for name in rest)})}}'
        return f"({', '.join(self.results)},)"

    def picked(self, place: int) -> str:
        """How a result is reached in ``out``."""
        if self.form == "plain" and len(self.results) == 1:
            return "out"
        if self.form == "dict":
            return f'out["{self.results[place]}"]'
        if self.form == "nested":
            return 'out["first"][0]' if place == 0 else f'out["rest"][{place - 1}]'
        return f"out[{place}]"


@dataclass(frozen=True)
class Input:
    """A tensor to be drawn for every step: stacked, or seen by all members."""

    kind: str
    stacked: bool = False
    grad: bool = False


@dataclass(frozen=True)
class Step:
    """``mode``: train, eval, or as it was. ``does``: forward, backward (gradients only) or step.

    ``zeros``: gradients are set to None before it.
    """

    mode: str
    does: str
    n: int
    t: int
    zeros: bool = True


@dataclass(frozen=True)
class Program:
    """A whole trial; the last block is the model. ``forms`` says how each input is passed, ``loss`` is text."""

    seed: int
    members: int
    blocks: tuple[Block, ...]
    inputs: tuple[Input, ...]
    forms: tuple[str, ...]
    target: Input
    loss: str
    optimizer: str
    steps: tuple[Step, ...]
    verify: bool = False
    joint: str = ""

    @property
    def net(self) -> Block:
        return self.blocks[-1]

    def used(self) -> Iterator[Block]:
        """The blocks that the model is made of."""
        needed = {self.net.name}
        for block in reversed(self.blocks):
            if block.name in needed:
                needed |= {s.piece.name for s in block.statements}
        return (block for block in self.blocks if block.name in needed)

    def text(self) -> str:
        """Source that runs by itself, from the root of the repository."""
        names = [name for name, _ in self.net.inputs]
        given = [f"{name}={name}" if form == "keyword" else name for name, form in zip(names, self.forms, strict=True)]
        ordered = sorted(given, key=lambda word: "=" in word)
        classes = "\n\n\n".join(block.text() for block in self.used())
        return f'''import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.parts import Appending, Cell, Learner, Properties, Spiking
from tests.fuzz.program import Input, Step

tick, tock = 0, False
SEED, MEMBERS, VERIFY, JOINT = {self.seed}, {self.members}, {self.verify}, "{self.joint}"
INPUTS = ({"".join(f"{one}, " for one in self.inputs).strip()})
TARGET = {self.target}
STEPS = ({"".join(f"{one}, " for one in self.steps).strip()})


{classes}


def call(model, {", ".join(names)}):
    return model({", ".join(ordered)})


def loss(out, target):
    return {self.loss}


def optimizer(optim, params, own):
    return optim.{self.optimizer}


if __name__ == "__main__":
    from tests.fuzz.compare import main

    main(globals())
'''


def with_block(program: Program, place: int, block: Block) -> Program:
    """``program`` with another block at ``place``."""
    return replace(program, blocks=(*program.blocks[:place], block, *program.blocks[place + 1 :]))
