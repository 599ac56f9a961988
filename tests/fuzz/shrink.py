"""Find the smallest program with the same fault, by leaving out or simplifying its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Block, Input, Program, Statement, Step, with_block

Faulty = Callable[[Program], bool]


def shrink(program: Program, faulty: Faulty, seconds: float = 300.0) -> Program:
    """A program for which ``faulty`` still holds, and for none of the smaller ones that can be made of it."""
    end = time.monotonic() + seconds
    tried: set[str] = {program.text()}
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if time.monotonic() > end:
                return program
            text = candidate.text()
            if text in tried:
                continue
            tried.add(text)
            if faulty(candidate):
                program, smaller = candidate, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest cuts first."""
    for k in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=(*program.steps[:k], *program.steps[k + 1 :]))
    for index in reversed(range(len(program.blocks))):
        block = program.blocks[index]
        for smaller in _halved(block):
            yield with_block(program, index, smaller)
    for index in reversed(range(len(program.blocks))):
        for smaller in _fewer_statements(program.blocks[index]):
            yield with_block(program, index, smaller)
    yield from _fewer_results(program)
    yield from _fewer_inputs(program)
    yield from _plainer(program)
    for index, block in enumerate(program.blocks):
        for smaller in _plainer_statements(block):
            yield with_block(program, index, smaller)


def _halved(block: Block) -> Iterator[Block]:
    """Without the first or the second half of its statements."""
    count = len(block.statements)
    for part in (range(count // 2), range(count // 2, count)) if count > 3 else ():
        cut: Block | None = block
        for k in sorted(part, reverse=True):
            cut = _without(cut, k) or cut
        if cut is not block:
            yield cut


def _fewer_statements(block: Block) -> Iterator[Block]:
    for k in reversed(range(len(block.statements))):
        yield from _every_without(block, k)


def _without(block: Block, k: int) -> Block | None:
    return next(_every_without(block, k), None)


def _every_without(block: Block, k: int) -> Iterator[Block]:
    """``block`` without statement ``k``, whose results are replaced by earlier values of their kinds."""
    statement = block.statements[k]
    before = dict(block.inputs)
    for s in block.statements[:k]:
        before |= dict(zip(s.results, s.piece.gives, strict=True))
    remaining = (*block.statements[:k], *block.statements[k + 1 :])
    read_names = {name for s in remaining for name in s.operands} | set(block.results)
    replaced = [(r, kind) for r, kind in zip(statement.results, statement.piece.gives, strict=True) if r in read_names]
    names: dict[str, str] = {}
    for result, kind in replaced:
        replacements = [name for name in statement.operands if before[name] == kind]
        replacements += [name for name, earlier_kind in reversed(before.items()) if earlier_kind == kind]
        if not replacements:
            return
        names[result] = replacements[0]
    statements = tuple(replace(s, operands=tuple(names.get(o, o) for o in s.operands)) for s in remaining)
    results = tuple(dict.fromkeys(names.get(r, r) for r in block.results))
    if len(results) < len(block.results) and block.name == "Net":
        return
    yield replace(block, statements=statements, results=results)


def _fewer_results(program: Program) -> Iterator[Program]:
    """With one result, a plain one, and the simplest loss."""
    net = program.net
    index = len(program.blocks) - 1
    if net.beside:
        yield replace(program, loss=program.loss.partition(" * weight(")[0])
        for k in range(len(net.beside)) if len(net.beside) > 1 else ():
            yield with_block(program, index, replace(net, beside=(*net.beside[:k], *net.beside[k + 1 :])))
        net = replace(net, beside=())
    if len(net.results) > 1 or program.loss != _loss(net, net.results[0]):
        for result in net.results:
            reduced = replace(net, results=(result,), form="plain")
            yield replace(with_block(program, index, reduced), loss=_loss(net, result))
    kinds = net.kinds()
    # An unused value may show the fault, too.
    for name in reversed(kinds):
        if name not in net.results and kinds[name] not in ("ids", "lab", "mask"):
            reduced = replace(net, results=(name,), form="plain")
            smaller = _pruned(reduced)
            if len(smaller.statements) < len(net.statements):
                yield replace(with_block(program, index, smaller), loss=_loss(net, name))


def _pruned(block: Block) -> Block:
    """Without the statements after the one that gives the result."""
    last = max((k for k, s in enumerate(block.statements) if block.results[0] in s.results), default=-1)
    return replace(block, statements=block.statements[: last + 1])


def _loss(net: Block, result: str) -> str:
    kind = net.kinds()[result]
    return "torch.view_as_real(out).sin().sum()" if kind == "cvec" else "out.sin().sum()"


def _fewer_inputs(program: Program) -> Iterator[Program]:
    net = program.net
    read_names = {name for s in net.statements for name in s.operands} | set(net.results)
    for k, (name, _) in enumerate(net.inputs):
        if name not in read_names and len(net.inputs) > 1:
            cut = replace(net, inputs=(*net.inputs[:k], *net.inputs[k + 1 :]))
            less = replace(
                program,
                inputs=(*program.inputs[:k], *program.inputs[k + 1 :]),
                forms=(*program.forms[:k], *program.forms[k + 1 :]),
            )
            yield with_block(less, len(program.blocks) - 1, cut)


def _plainer(program: Program) -> Iterator[Program]:
    for members in (1, 2):
        if members < program.members:
            yield replace(program, members=members)
    if program.verify:
        yield replace(program, verify=False)
    plain = "SGD(params, lr=0.1)"
    if program.optimizer != plain:
        yield replace(program, optimizer=plain)
    if program.target != Input("vec") and "target" not in program.loss:
        yield replace(program, target=Input("vec"))
    if "keyword" in program.forms:
        yield replace(program, forms=("plain",) * len(program.forms))
    for k, spec in enumerate(program.inputs):
        for other in (Input(spec.kind), Input(spec.kind, spec.stacked), Input(spec.kind, grad=spec.grad)):
            if other != spec:
                yield replace(program, inputs=(*program.inputs[:k], other, *program.inputs[k + 1 :]))
    first = program.steps[0]
    equal_sizes = tuple(replace(step, n=first.n, t=first.t) for step in program.steps)
    if equal_sizes != program.steps:
        yield replace(program, steps=equal_sizes)
    for k, step in enumerate(program.steps):
        for other in (Step("", "forward", step.n, step.t), replace(step, mode=""), replace(step, does="backward")):
            if other != step and not (step.does == "forward" and other.does != "forward"):
                yield replace(program, steps=(*program.steps[:k], other, *program.steps[k + 1 :]))


def _plainer_statements(block: Block) -> Iterator[Block]:
    if block.evals:
        yield replace(block, evals=())
    for k, s in enumerate(block.statements):
        for other in _plainer_of(s, block):
            if other != s:
                yield replace(block, statements=(*block.statements[:k], other, *block.statements[k + 1 :]))


def _plainer_of(s: Statement, block: Block) -> Iterator[Statement]:
    if s.chain:
        for k in range(len(s.chain)):
            yield replace(s, chain=(*s.chain[:k], *s.chain[k + 1 :]))
    yield replace(s, holder="attr", chain=())
    yield replace(s, care="plain")
    yield replace(s, region="")
    for k, (key, text) in enumerate(s.choices):
        first = s.piece.choices[key][0]
        if text != first:
            yield replace(s, choices=(*s.choices[:k], (key, first), *s.choices[k + 1 :]))
    if sum(other.slot == s.slot for other in block.statements) > 1:
        yield replace(s, slot=f"{s.slot}_{s.results[0] if s.results else 'w'}")
