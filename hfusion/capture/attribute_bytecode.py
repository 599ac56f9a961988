"""Find the attributes that a function assigns and reads, from its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass

from hfusion.core.fingerprint import names_in


@dataclass(frozen=True)
class AttributeWrites:
    """The names of the attributes that a function assigns on its first argument, and on other objects."""

    of_self: frozenset[str]
    of_others: frozenset[str]


_STORES = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("STORE_", "DELETE_")) and name.endswith(("_ATTR", "_GLOBAL", "_NAME", "_DEREF"))
)


@functools.lru_cache(maxsize=16)
def _storing(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of ``code``; none if it assigns no attribute or outer variable, as most code."""
    return [] if _STORES.isdisjoint(code.co_code[::2]) else list(dis.get_instructions(code))


@functools.lru_cache(maxsize=4096)
def writes(code: types.CodeType) -> AttributeWrites:
    """Return the attributes that ``code`` and its nested functions assign or delete. Tried on Python 3.11 to 3.13."""
    of_self, of_others = set[str](), set[str]()
    steps = _storing(code)
    selves = _selves(code)
    for k, step in enumerate(steps):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            (of_self if holder_variable(steps, k) in selves else of_others).add(step.argval)
    if "setattr" in code.co_names:
        names = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
        of_self |= names
        of_others |= names
    for inner in (writes(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        of_self |= inner.of_self
        of_others |= inner.of_others
    return AttributeWrites(frozenset(of_self), frozenset(of_others))


def _selves(code: types.CodeType) -> set[str]:
    """Return the variables that may hold ``self``: the first argument, and the free variables of a nested function."""
    return {*code.co_varnames[: min(code.co_argcount, 1)], *code.co_freevars}


def holder_variable(steps: list[dis.Instruction], k: int) -> str | None:
    """Return the variable whose attribute the instruction at ``k`` accesses; None if the object is no variable."""
    previous = k - 1
    if steps[previous].opname == "SWAP":
        # ``self.n += 1`` copies the object first, reads the attribute, and assigns it at the end.
        previous = next(
            (
                j - 1
                for j in range(k - 1, 0, -1)
                if steps[j].opname == "COPY" and j + 1 < k and steps[j + 1].argval == steps[k].argval
            ),
            -1,
        )
    if previous < 0 or "LOAD_" not in steps[previous].opname or "ATTR" in steps[previous].opname:
        return None
    name = steps[previous].argval
    return name[-1] if isinstance(name, tuple) else name if isinstance(name, str) else None


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that ``code`` and its nested functions name, or may read by getattr."""
    names = names_in(code)
    return frozenset((*names.attributes, *names.texts))


# Names by which code may assign variables whose names are strings.
_ASSIGNING = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars", "globals", "exec", "update"})


@functools.lru_cache(maxsize=4096)
def assigned_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of variables and attributes that ``code`` and its nested functions may assign."""
    attributes = writes(code)
    names = {
        step.argval
        for step in _storing(code)
        if step.opname.startswith(("STORE_", "DELETE_")) and step.opname.endswith(("_GLOBAL", "_NAME", "_DEREF"))
    }
    names |= attributes.of_others
    # A constructor called in forward assigns to a new object, not to one that exists.
    if code.co_name not in ("__init__", "__post_init__"):
        names |= attributes.of_self
    if not _ASSIGNING.isdisjoint(code.co_names):
        names |= {const for const in code.co_consts if isinstance(const, str)}
    return frozenset(names).union(
        *(assigned_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    )
