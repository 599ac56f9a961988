"""A random program as a value: statements made of pieces, in blocks, each a plain module class; and its source text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """A computation, as text with placeholders.

    ``{0}``, ``{1}`` are the operands, ``{o}``, ``{o1}`` the results, ``{s}`` what ``module`` or ``init`` makes of it;
    other placeholders are drawn from ``choices``, those named ``each_...`` once per member. ``view``: the result may
    lie in the memory of the first operand. ``writes``: the first operand is written. ``island``: no graph holds it.
    """

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
        """True if the piece can be an element of an ``nn.Sequential``."""
        return bool(self.module) and self.code == "{o} = {s}({0})" and self.takes == self.gives


@dataclass(frozen=True)
class Statement:
    """A piece with its operands and results. ``slot`` names its state: two statements of one slot use one submodule.

    ``holder`` says how a submodule is stored: attr, dict, list or seq, the last followed by ``chain``, more submodules;
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
        module = self.piece.module.format(**names)
        if self.care == "shared":
            module = f'once("{block}.{self.slot}", lambda: {module})'
        if self.holder == "list":
            module = f"nn.ModuleList([{module}])"
        if self.holder == "seq":
            module = f"nn.Sequential({', '.join((module, *self.chain))})"
        holder = self.place if self.holder == "dict" else f"self.{self.slot}"
        lines = [f"{holder} = {module}"]
        if self.care in ("frozen", "shared"):
            lines.append(f"{holder}.requires_grad_(False)")
        if self.care == "eval":
            lines.append(f"{holder}.eval()")
        return lines

    @property
    def place(self) -> str:
        """How forward reaches the state."""
        if self.holder == "dict":
            return f'self.parts["{self.slot}"]'
        return f"self.{self.slot}[0]" if self.holder == "list" else f"self.{self.slot}"

    def lines(self) -> list[str]:
        """The lines of ``forward``."""
        names = {key: text.format(*self.operands) for key, text in self.choices}
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
        kinds = dict(self.inputs)
        for s in self.statements:
            kinds |= dict(zip(s.results, s.piece.gives, strict=True))
        return kinds

    def text(self) -> str:
        init_lines: dict[str, list[str]] = {}
        for s in self.statements:
            init_lines.setdefault(s.slot, s.made(self.name))
        parts = any(s.holder == "dict" and s.piece.module for s in self.statements)
        start = ["super().__init__()", *(["self.parts = nn.ModuleDict()"] if parts else [])]
        init = [*start, *(line for lines in init_lines.values() for line in lines)]
        body = [line for s in self.statements for line in s.lines()]
        names = ", ".join(name for name, _ in self.inputs)
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self, b, once):"]
        lines += ["        " + line for line in init]
        paths = [s.place for s in self.statements if s.piece.module and s.slot in self.evals]
        if paths:
            lines += ["", "    def train(self, mode=True):", "        super().train(mode)"]
            lines += [f"        {path}.eval()" for path in dict.fromkeys(paths)] + ["        return self"]
        lines += ["", f"    def forward(self, {names}):"]
        lines += ["        " + line for line in [*body, f"return {self._returned()}"]]
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

    def picked(self, index: int) -> str:
        """How a result is reached in ``out``."""
        if self.form == "plain" and len(self.results) == 1:
            return "out"
        if self.form == "dict":
            return f'out["{self.results[index]}"]'
        if self.form == "nested":
            return 'out["first"][0]' if index == 0 else f'out["rest"][{index - 1}]'
        return f"out[{index}]"


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

    def text(self) -> str:
        """Source of a script that runs the program from the root of the repository."""
        names = [name for name, _ in self.net.inputs]
        passed = [f"{name}={name}" if form == "keyword" else name for name, form in zip(names, self.forms, strict=True)]
        ordered = sorted(passed, key=lambda word: "=" in word)
        classes = "\n\n\n".join(block.text() for block in self.blocks)
        steps = "".join(f"    {step},\n" for step in self.steps)
        return f'''import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.program import Input, Step

SEED = {self.seed}
MEMBERS = {self.members}
VERIFY = {self.verify}
JOINT = "{self.joint}"
INPUTS = ({"".join(f"{spec}, " for spec in self.inputs).strip()})
TARGET = {self.target}
STEPS = (
{steps})


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
