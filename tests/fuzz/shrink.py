"""Find a smaller program with the same fault, by leaving out or simplifying its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Block, Input, Program, with_block

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
    """Programs with one thing less."""
    for k in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=(*program.steps[:k], *program.steps[k + 1 :]))
    for index in reversed(range(len(program.blocks))):
        for smaller in _fewer_statements(program.blocks[index]):
            yield with_block(program, index, smaller)
    yield from _one_result(program)
    for members in range(1, program.members):
        yield replace(program, members=members)
    yield replace(program, verify=False)
    yield replace(program, optimizer="SGD(params, lr=0.1)")
    yield replace(program, forms=("plain",) * len(program.forms))
    yield replace(program, inputs=tuple(Input(spec.kind) for spec in program.inputs))
    for index, block in enumerate(program.blocks):
        plain = tuple(replace(s, holder="attr", chain=(), care="plain", region="") for s in block.statements)
        yield with_block(program, index, replace(block, statements=plain, evals=()))


def _fewer_statements(block: Block) -> Iterator[Block]:
    """``block`` without one statement, whose results are replaced by earlier values of their kinds."""
    for k in reversed(range(len(block.statements))):
        statement = block.statements[k]
        before = replace(block, statements=block.statements[:k]).kinds()
        remaining = (*block.statements[:k], *block.statements[k + 1 :])
        read_names = {name for s in remaining for name in s.operands} | set(block.results)
        names: dict[str, str | None] = {}
        for result, kind in zip(statement.results, statement.piece.gives, strict=True):
            if result in read_names:
                names[result] = next(
                    (name for name in (*statement.operands, *reversed(before)) if before[name] == kind), None
                )
        if None in names.values():
            continue
        statements = tuple(
            replace(s, operands=tuple(names.get(name) or name for name in s.operands)) for s in remaining
        )
        results = tuple(dict.fromkeys(names.get(name) or name for name in block.results))
        if len(results) == len(block.results) or block.name != "Net":
            yield replace(block, statements=statements, results=results)


def _one_result(program: Program) -> Iterator[Program]:
    """With one result, which any value may be, and the simplest loss."""
    net, index = program.net, len(program.blocks) - 1
    kinds = net.kinds()
    for name in reversed(kinds):
        if kinds[name] not in ("ids", "lab", "mask"):
            loss = "torch.view_as_real(out).sin().sum()" if kinds[name] == "cvec" else "out.sin().sum()"
            yield replace(with_block(program, index, replace(net, results=(name,), form="plain")), loss=loss)
