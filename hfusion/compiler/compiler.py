"""Find the program for a call of an array: captured when first needed, cached per signature."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hfusion.capture.capture_member import VaryingSizes, specializes
from hfusion.capture.export_context import apart, collecting_rarely, told_autocast
from hfusion.capture.reachable_code import compares_identity
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import ArraySpec, Compiled, compile_array
from hfusion.core.errors import FusionError, KeepsState, NotCaptured
from hfusion.core.exclusive import tracing
from hfusion.device.backend import active_autocast
from hfusion.torch_private.dispatch_modes import outside_transforms, unwrapped

# Largest number of programs of one kind of call that hold for one size each. For further sizes, code that needs to know
# sizes runs member by member; beyond `MAX_PROGRAMS` programs of any kind, all of forward does.
MAX_CLOSED = 2
MAX_PROGRAMS = 8

# Number of values of the numbers among arguments from which on a warning is shown.
MAX_NUMBERS = 16

# Largest number of cached call keys; programs of other calls are found by their guards.
MAX_KEYS = 4096

# Number of calls of one kind that may change Python state, as to fill a cache, until all later ones run in a loop.
MAX_CHANGES = 2


@dataclass
class Compiler:
    """The programs of one subject, per training pattern and signature.

    The first program is specialized to its sizes, except for the number of samples. Dims that are called with two sizes
    are dynamic in later programs, if the compiler ``opens`` sizes.
    """

    subject: ArraySpec
    programs: dict[Any, Compiled] = field(default_factory=dict)
    families: dict[Any, list[Compiled]] = field(default_factory=dict)
    shapes: dict[Any, set[tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    """The shapes of the leaves of each kind of call that a program was made for."""
    opens: bool = True
    whole: dict[Any, str] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)
    numbers: dict[Any, set[Any]] = field(default_factory=dict)
    changes: Counter[Any] = field(default_factory=Counter)
    stateful: dict[Any, KeepsState] = field(default_factory=dict)
    """How many calls of each kind have changed Python state, and what the last of them says."""
    kin: Callable[[Any, Arguments], Compiled | None] | None = None
    """Derives a program without a capture from another array with similar members; returns None if there is none."""
    make_program: Callable[[ArraySpec, Arguments, bool, VaryingSizes], Compiled] = compile_array

    def find(self, training: Any, arguments: Arguments) -> Compiled | None:
        """Return an existing program for this call, also for new sizes if the guards hold; None if there is none."""
        key = (training, arguments.key)
        compiled = self.programs.get(key)
        if compiled is None or (compiled.memory_orders is not None and not _in_order(compiled, arguments)):
            compiled = self.fitting(training, arguments)
            if compiled is not None:
                self._keep(key, compiled)
        return compiled

    def _keep(self, key: Any, compiled: Compiled) -> None:
        if len(self.programs) == MAX_KEYS:
            self.programs.clear()
        self.programs[key] = compiled

    def fitting(self, training: Any, arguments: Arguments) -> Compiled | None:
        """Return a program whose guards hold for the sizes of this call; None if there is none."""
        shapes = arguments.shapes
        family = self.families.get((training, arguments.loose_key), [])
        # The latest program is the most general one, except that more code may run member by member in it.
        fitting = (
            compiled for compiled in reversed(family) if compiled.guards(shapes) and _in_order(compiled, arguments)
        )
        return min(fitting, key=lambda compiled: len(compiled.opaque), default=None)

    def get(self, training: Any, arguments: Arguments) -> Compiled:
        """Return the program for this call; compile it if there is none. Raises FusionError."""
        compiled = self.find(training, arguments)
        if compiled is not None:
            return compiled
        with tracing, collecting_rarely():
            # Another thread may have made it meanwhile.
            return self.find(training, arguments) or self.make(training, arguments)

    def make(self, training: Any, arguments: Arguments) -> Compiled:
        """Compile a program: capture, align and batch. Raises FusionError if that is impossible."""
        if arguments.obstacle:
            raise NotCaptured(arguments.obstacle)
        if arguments.ties and compares_identity(self.subject.member(0)):
            raise NotCaptured("forward asks whether two objects are one (`is`), and gets one tensor twice")
        kind = _any_training(training), arguments.key
        if self.changes[kind] == MAX_CHANGES:
            raise self.stateful[kind]
        self._count(training, arguments)
        loose = arguments.loose_key
        shapes = self.shapes.setdefault(loose, set())
        shapes.add(tuple(arguments.shapes))
        # For each leaf, the dims that had at least two sizes so far.
        dims = [
            {dim for dim, sizes in enumerate(zip(*of_leaf, strict=True)) if len({*sizes}) > 1}
            for of_leaf in zip(*shapes, strict=True)
        ]
        family = self.families.setdefault((training, loose), [])
        closed = [specializes(known.graph, known.program.slots, dims) for known in family]
        many = sum(closed) >= MAX_CLOSED
        if many and loose in self.refused:
            raise FusionError(self.refused[loose])
        if self.opens and len(family) >= MAX_PROGRAMS:
            self.whole.setdefault(loose, f"sizes vary, and {MAX_PROGRAMS} programs did not serve all of them")
        why = self.whole.get(loose, "")
        sizes = VaryingSizes(dims, many, why) if self.opens else VaryingSizes(whole=why)
        try:
            with outside_transforms(), apart(), told_autocast({kind for kind, _ in active_autocast() or ()}):
                plain = arguments.mapped(unwrapped)
                related = self.kin(training, plain) if self.kin is not None and not sizes.whole else None
                compiled = related or self.make_program(self.subject, plain, _any_training(training), sizes)
        except KeepsState as error:
            self.changes[kind] += 1
            self.stateful[kind] = error.with_traceback(None)
            raise
        except FusionError as error:
            if many:
                self.refused[loose] = str(error)
            raise
        self._keep((training, arguments.key), compiled)
        family.append(compiled)
        return compiled

    def _count(self, training: Any, arguments: Arguments) -> None:
        """Warn if a number among the arguments has had many values, each of which was captured."""
        keys = self.numbers.setdefault((training, arguments.numberless_key), set())
        old_count = len(keys)
        keys.add(arguments.loose_key)
        if old_count < MAX_NUMBERS <= len(keys):
            values = [leaf for leaf in arguments.leaves if type(leaf) in (int, float)]
            warnings.warn(
                f"{self.subject.name} was called with {MAX_NUMBERS} values of a number, now {values}, and is captured "
                "for each: slowly, and each program is kept; give what changes often as a tensor, such as "
                f"torch.tensor({values[-1]})",
                stacklevel=3,
            )

    def distrust(self, training: Any, arguments: Arguments, compiled: Compiled, why: str) -> None:
        """Remove a program that inferred wrong sizes; later programs for this kind of call infer none."""
        loose = arguments.loose_key
        self.whole[loose] = why
        self.programs = {key: program for key, program in self.programs.items() if program is not compiled}
        self.families[training, loose].remove(compiled)

    def clear(self) -> None:
        self.programs.clear()
        self.families.clear()


def _in_order(compiled: Compiled, arguments: Arguments) -> bool:
    """Return whether the inputs have the memory orders that the program requires."""
    return compiled.memory_orders is None or compiled.memory_orders == arguments.memory_orders


def _any_training(training: Any) -> bool:
    return any(flag is True for flag in training) if isinstance(training, tuple) else bool(training)
