"""Conditions in code that only decide whether to raise: ``if x.isnan().any(): raise ...``, ``assert (x > 0).all()``.

Read from the bytecode of Python 3.11 to 3.14. A condition that is not recognised costs a loop over members, and one
that is recognised in error costs a second run where it fails: what is computed is right either way.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

_SKIPPED = frozenset({"CACHE", "NOP", "TO_BOOL", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN"})


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def truth_without_raise(frame: FrameType) -> bool | None:
    """Return the truth of a value with which ``frame``, which asks for it now, does not raise.

    None if the code does anything but raise where the value has the other truth, or asks in a way that is not known
    here.
    """
    instructions = _instructions(frame.f_code)
    # A call of Python code is at the last of its inline caches.
    asking = place = max(k for k, instruction in enumerate(instructions) if instruction.offset <= frame.f_lasti)
    if instructions[asking].opname == "PRECALL":
        # Python 3.11, where it has specialized the call of a builtin, makes it in the instruction before.
        asking = place = next(k for k in range(asking, len(instructions)) if instructions[k].opname == "CALL")
    inverted = False
    while "POP_JUMP" not in instructions[place].opname:
        if instructions[place].opname == "UNARY_NOT":
            inverted = not inverted
        elif place != asking and instructions[place].opname not in _SKIPPED:
            return None
        place += 1
        if place == len(instructions):
            return None
    jump = instructions[place].opname
    if not jump.endswith(("_TRUE", "_FALSE")):
        return None
    ways = instructions[place].argval, instructions[place + 1].offset
    raising = [_only_raises(frame.f_code, offset) for offset in ways]
    if raising[0] == raising[1]:
        return None
    # With a value of this truth the code jumps.
    jumps = jump.endswith("_TRUE")
    return (jumps != raising[0]) != inverted


def _only_raises(code: CodeType, start: int) -> bool:
    """Return whether all ways through ``code`` from the offset ``start`` end in an error that it does not catch."""
    instructions = _instructions(code)
    places = {instruction.offset: k for k, instruction in enumerate(instructions)}
    waiting, visited = [places[start]], set()
    while waiting:
        place = waiting.pop()
        if place in visited:
            continue
        visited.add(place)
        name = instructions[place].opname
        if name.startswith(("RETURN_", "YIELD_")):
            return False
        if name in ("RAISE_VARARGS", "RERAISE"):
            waiting += [places[offset] for offset in _handlers(code, instructions[place].offset)]
            continue
        jumps = instructions[place].opcode in (*dis.hasjrel, *dis.hasjabs)
        if jumps:
            waiting.append(places[instructions[place].argval])
        if not (jumps and name.startswith("JUMP_") and "_IF_" not in name):
            waiting.append(place + 1)
    return True


def _handlers(code: CodeType, offset: int) -> Iterator[int]:
    """The offset of the handler of an error at ``offset``, but for those of with statements, which pass it on."""
    instructions = {instruction.offset: k for k, instruction in enumerate(_instructions(code))}
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            after = _instructions(code)[instructions[entry.target] :][:2]
            if not any(instruction.opname == "WITH_EXCEPT_START" for instruction in after):
                yield entry.target
