"""A training step of a whole array as one call: forward, losses, gradients, the optimizer's update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.array.module import FusedModule
from hfusion.array.per_model import PerModel, programs_of
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import BoundProgram, Location
from hfusion.compiler.compiler import MAX_KEYS
from hfusion.core.calls import call_arguments
from hfusion.core.errors import FusionError, NotCaptured
from hfusion.core.exclusive import FairLock, compiling
from hfusion.core.member_random import keyed
from hfusion.core.membership import check_whole_stack
from hfusion.core.stages import RECHECKED
from hfusion.core.step_arguments import Compile, check_compile
from hfusion.device.backend import active_autocast, random_states_kept, without_autocast
from hfusion.device.team import helped_by
from hfusion.optim import coupling
from hfusion.step.compile_scheduler import ProgramMaker
from hfusion.step.eager_step import EagerStep
from hfusion.step.memory_budget import MemoryBudget, MemoryPlan
from hfusion.step.step_graph import ProgramMismatch, StepCall
from hfusion.step.step_signatures import (
    CallReport,
    StepReport,
    StepVariant,
    family,
    hooked,
    obstacle_to_program,
    shared_variants,
    traits_of,
)


def check_parts(parts: object) -> int | str:
    """Return the argument ``parts`` of `hfusion.train_step`. Raises ValueError if it is invalid."""
    if parts == "auto" and isinstance(parts, str):
        return parts
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(
            f'parts is {parts!r}: give "auto", or how many shall run at the same time, an integer from 1 on'
        )
    return parts


class PreparedStep(NamedTuple):
    """The arguments of a step, and how it will run.

    Attributes:
        variant: the variant that it runs by; None: it runs eagerly, which determines the variant of later calls.
        block: members per block within the memory budget; None for all.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    call: StepCall | None = None
    situation: Any = None
    variant: StepVariant | None = None
    block: int | None = None


class TrainStep:
    """A training step; see `train_step`."""

    def __init__(
        self,
        fused: FusedModule,
        loss_fn: Callable[..., Any],
        opt: Optimizer,
        compile: Compile,
        parts: int | str = "auto",
        memory: str | int | None = None,
    ) -> None:
        self._fused, self._loss_fn, self._optimizer = fused, loss_fn, opt
        self._compile, self._parts = compile, parts
        self._loss = PerModel(loss_fn, programs_of(fused))
        self._by_autograd = EagerStep(fused, self._loss)
        self.budget = None if memory is None else MemoryBudget(memory, fused, opt)
        # Reports a kind of calls that run eagerly, and the reason; callers may replace it.
        self.tell: Callable[[str, str], object] = self._warn
        # Updates the parameters after backward, given the losses; callers may replace it.
        self.update: Callable[[Tensor], object] = lambda losses: opt.step()
        # Kinds of calls that this step, if it resumes an earlier one, need not run eagerly first.
        self.expected_calls: set[str] = set()
        # A key per member that determines its random numbers; None: its row and the number of members do.
        self.keys: Tensor | None = None
        # Members that need not be computed: their losses may be NaN and their gradients 0.
        self.idle: frozenset[int] = frozenset()
        # Members that one call of a compiled program computes; None for all.
        self.at_once: int | None = None
        self._variants: dict[Any, list[StepVariant]] = {}
        self._cached_variants: dict[Any, StepVariant] = {}
        self._uncompiled: dict[str, CallReport] = {}
        self._memory: dict[str, MemoryPlan] = {}
        self._warned: set[str] = set()
        # The tensors of the latest compiled step, for which `_check_trained` has passed.
        self._trained_tensors: Any = None
        self._maker = ProgramMaker(compile, parts)
        self._turn = FairLock()  # One step at a time uses gradients and parameters.

    def __call__(self, inputs: Any, target: Any, **keywords: Any) -> Tensor:
        with self._turn:
            return self.run(self.prepare(inputs, target, **keywords))

    def prepare(self, inputs: Any, target: Any, **keywords: Any) -> PreparedStep:
        """Find how a step will run, and compile its program if it is time. Pass the result to `run` once."""
        args, kwargs = call_arguments(inputs, keywords)
        if self._compile is False and self.budget is None:
            return PreparedStep(args, kwargs, target)
        call = StepCall(Arguments.of(args, kwargs), Arguments.of((target,), {}))
        block = None
        if self.budget is not None:
            plan = self._memory[call.text] = self.budget.plan(call.inputs)
            block = plan.block
        if call.ragged or self._compile is False:
            noun = "batches" if call.inputs.ragged else "targets"
            why = f"members' {noun} have different sizes" if self._compile is not False else "compile=False"
            self._uncompiled[call.text] = CallReport(call.text, "eager", why)
            return PreparedStep(args, kwargs, target, block=block)
        situation = (self._fused._pattern(call.inputs), self._loss.state(), active_autocast(), (self._parts, block))
        prepared = PreparedStep(args, kwargs, target, call, situation, None, block)
        variant = self._find(call, situation)
        if variant is None and call.text in self.expected_calls:
            self._foresee(prepared, call)
            variant = self._find(call, situation)
        if variant is not None and variant.program is None and not variant.why:
            try:
                self._maker.prepare(variant, call, self.at_once, variant.situation[2])
            except ProgramMismatch:
                # The captures do not fit these sizes: an eager step makes others.
                return prepared
            if variant.why and variant.times is None:
                self._refused(variant)
        return prepared._replace(variant=variant)

    def run(self, prepared: PreparedStep) -> Tensor:
        """Run a prepared step, and return the losses ``[B]``."""
        with self._turn, keyed(self.keys):
            call, variant = prepared.call, prepared.variant
            if call is None or variant is None:
                losses, outputs = self._eager(prepared)
                if call is not None:
                    self._note(prepared, call, outputs)
                return losses
            began, is_hooked = perf_counter(), hooked(self._fused)
            trial = None if is_hooked or self.idle else variant.trial
            trial = None if trial is None or call.text != variant.call else trial
            if variant.program is None or is_hooked or (trial is not None and trial.eager_next):
                losses = self._eager(prepared)[0]
                variant.seconds += perf_counter() - began
            else:
                losses = self._compiled(prepared, call, variant)
            if trial is not None:
                self._maker.note_seconds(variant, perf_counter() - began)
            return losses

    def _compiled(self, prepared: PreparedStep, call: StepCall, variant: StepVariant) -> Tensor:
        """Run the step by the program of ``variant``, and return the losses ``[B]``.

        If an assertion of forward or loss fails for some member, the step is undone, and an eager one raises the error.
        """
        assert variant.program is not None
        assert variant.sources is not None
        if variant.checked is None or variant.checked is not self._trained_tensors:
            self._check_trained()
            self._trained_tensors = variant.checked
        if self.idle:
            call = replace(call, idle=self.idle)
        if RECHECKED:
            self._fused.check_due(variant.sources[0].compiled, call.inputs)
        failed = variant.sources[0].failed.get("members")
        before = [] if failed is None else [(b.detach(), b.detach().clone()) for b in self._fused.buffers()]
        with without_autocast(variant.situation[2]):
            losses = variant.program.step(call)
        if failed is not None and failed.any():
            for buffer, value in (*before, (failed, torch.zeros_like(failed))):
                buffer.copy_(value)
            return self._eager(prepared)[0]
        with helped_by(variant.program.team):
            self.update(losses)
        return losses

    def release(self) -> None:
        """Free device memory that programs hold, such as recordings. Later steps create it again."""
        for variant in self._all_variants():
            variant.release()

    def close(self) -> None:
        """Cancel compilations in the background. Later steps start them again."""
        for variant in self._all_variants():
            variant.cancel()

    def _all_variants(self) -> Iterator[StepVariant]:
        return chain.from_iterable(self._variants.values())

    @property
    def known_calls(self) -> set[str]:
        """The kinds of calls that need no further eager step to determine how they run."""
        return {variant.call for variant in self._all_variants() if not variant.why} | self.expected_calls

    def lets_rest(self, inputs: Any, keywords: dict[str, Any], most: float) -> bool:
        """Return whether no code of members that are ``idle`` runs in such a call: it loops, or it is a graph.

        ``most``: the bytes that the graph's values may have for all members.
        """
        arguments = Arguments.of(*call_arguments(inputs, keywords))
        # Within a memory budget, members are computed in blocks.
        if arguments.ragged or self.budget is not None:
            return False
        try:
            compiled = self._fused.compiled(arguments)
        except NotCaptured:
            return True
        except FusionError:
            return False
        return not (compiled.opaque or compiled.modes) and len(self._fused) * compiled.value_bytes <= most

    def _foresee(self, prepared: PreparedStep, call: StepCall) -> None:
        """Determine how such a call runs, by a forward without side effects."""
        self.expected_calls.discard(call.text)
        with compiling(), random_states_kept(), torch.enable_grad():
            written = self._fused.compiled(call.inputs).written
            saved = [(t, t.detach().clone()) for name, t in tensors(self._fused) if name in written]
            outputs = self._by_autograd.outputs(prepared.args, prepared.kwargs, prepared.block)
            if prepared.block is None:
                self._loss(outputs, prepared.target)
        for tensor, before in saved:
            tensor.detach().copy_(before)
        self._note(prepared, call, outputs)

    @property
    def compilations(self) -> int:
        """Number of compiled programs."""
        return self._maker.count

    def __reduce__(self) -> NoReturn:
        raise TypeError("a train_step cannot be copied or pickled: make another, of a copy of its array and optimizer")

    def __repr__(self) -> str:
        name = getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__)
        parts = (self._fused._original, f"B={len(self._fused)}", name, type(self._optimizer).__name__)
        lines = [f"train_step({', '.join(parts)}, compile={self._compile})", *map(str, self.report().rows)]
        return "\n  ".join(lines)

    def report(self) -> StepReport:
        """Return which calls run compiled, which eagerly, and why."""
        if self._compile is False and self.budget is None:
            return StepReport((CallReport("every call", "eager", "compile=False"),))
        rows = [*map(StepVariant.row, self._all_variants()), *self._uncompiled.values()]
        plans = self._memory
        return StepReport(
            tuple(replace(row, how=f"{row.how}, {plans[row.call]}") if row.call in plans else row for row in rows)
        )

    def _eager(self, prepared: PreparedStep) -> tuple[Tensor, Any]:
        """Run the step by autograd, and return losses and outputs; see `EagerStep.run`."""
        self._optimizer.zero_grad()
        for parameter in self._fused.parameters():
            parameter.grad = None
        # Each member draws from a seed of its own where draws must not depend on blocks of a memory budget, or where
        # keys give seeds, as programs take them.
        by_seeds = self.budget is not None or (self.keys is not None and self._compile is not False)
        self._fused._idle = self._loss.idle = self.idle
        try:
            losses, outputs = self._by_autograd.run(*prepared[:3], prepared.block, by_seeds)
        finally:
            self._fused._idle = self._loss.idle = frozenset()
        # It started without gradients, so only parameters of the array can have one now.
        if all(param.grad is None for group in self._optimizer.param_groups for param in group["params"]):
            self._check_trained()
        self.update(losses)
        return losses, outputs

    def _check_trained(self) -> None:
        """Raise FusionError if the optimizer has none of the array's parameters: steps would train nothing.

        `fully_shard` replaces parameters.
        """
        parameters = {id(param): param for param in self._fused.parameters()}
        if any(id(param) in parameters for group in self._optimizer.param_groups for param in group["params"]):
            # Gradients are missing for another reason: parameters are frozen, or forward does not use them.
            return
        for param in parameters.values():
            check_whole_stack(
                param, "shard a frozen base only, fully_shard(fused, ignored_params={those that are trained})"
            )
        raise FusionError(
            f"the parameters of the fused {self._fused._original} were replaced after train_step was made, and the "
            f"{type(self._optimizer).__name__} has none of them: make the optimizer and the step of fused.parameters() "
            "again"
        )

    def _find(self, call: StepCall, situation: Any) -> StepVariant | None:
        """Return the variant of such a call; None if an eager step must determine it first."""
        exact = (call.inputs.key, call.target.key, situation)
        cached = self._cached_variants.get(exact)
        if cached is not None and cached.is_valid() and cached.takes_order(call):
            return cached
        kind = family(call, situation)
        variants = self._variants.setdefault(kind, [])
        shared = shared_variants.get(self._fused, {}).get(kind, ())
        variants += [variant for variant in shared if variant not in variants]
        fitting = [v for v in reversed(variants) if v.is_valid() and v.takes_order(call) and self._serves(v, call)]
        # Variants with a program come first, then later ones, which are more general.
        chosen = min(fitting, key=lambda variant: variant.program is None, default=None)
        if chosen is not None and (chosen.program is not None or chosen.why):
            if len(self._cached_variants) == MAX_KEYS:
                self._cached_variants.clear()
            self._cached_variants[exact] = chosen
        return chosen

    def _serves(self, variant: StepVariant, call: StepCall) -> bool:
        """Return whether ``variant`` also serves a call of other sizes."""
        if variant.program is not None:
            return variant.program.fits(call)
        return variant.sources is not None and self._fused.find(call.inputs) is variant.sources[0].compiled

    def _note(self, prepared: PreparedStep, call: StepCall, outputs: Any) -> None:
        """After an eager step, store the variant by which later calls of its kind run."""
        target, situation, fused = prepared.target, prepared.situation, self._fused
        if prepared.block is not None:
            self._loss.prepare(outputs, target)
        modules = list(fused.modules())
        refs: list[Location] = [(m._parameters, n) for m in modules for n, p in m._parameters.items() if p is not None]
        forward, loss = fused.find(call.inputs), self._loss.find_program(outputs, target)
        sources, why = None, ""
        if forward is None:
            why = fused.why_no_program(call.inputs)
        elif isinstance(loss, str):
            why = f"the loss runs in a loop over members: {loss}"
        else:
            sources = BoundProgram.of(forward, fused), loss
            refs += [ref for source in sources for ref in source.locations]
            why = obstacle_to_program(sources, refs, call)
        kind = family(call, situation)
        variant = StepVariant(call.text, situation, refs, traits_of(refs), sources, why=why)
        if why:
            self._refused(variant)
            self._cached_variants[call.inputs.key, call.target.key, situation] = variant
        variants = self._variants.setdefault(kind, [])
        if sources is None or not any(v.program is None and v.kind == variant.kind for v in variants):
            variants.append(variant)
            if sources is not None and not sources[1].locations:
                shared_variants.setdefault(fused, {}).setdefault(kind, []).append(variant)

    def _refused(self, variant: StepVariant) -> None:
        """Report that calls run eagerly, once per reason."""
        if variant.why not in self._warned:
            self._warned.add(variant.why)
            self.tell(variant.call, variant.why)

    def _warn(self, call: str, why: str) -> None:
        warnings.warn(
            f"train_step of {self._fused._original} with ({call}) runs eagerly, exact but slower: {why}. "
            "train_step(..., compile=False) does so without this warning",
            stacklevel=6,
        )


def train_step(
    fused: FusedModule,
    loss: Callable[..., Any],
    optimizer: Optimizer,
    *,
    compile: Compile = None,
    parts: int | str = "auto",
    memory: str | int | None = None,
) -> TrainStep:
    """Return one training step of all members as a callable: ``losses = step(inputs, target)``.

    A step clears the gradients, computes forward, loss and backward, and calls ``optimizer.step()``. Each member gets
    the update that it would get from ``loss(model(inputs), target).backward(); optimizer.step()`` alone.
    Hyper-parameters are read at every step, so schedulers work. To clip gradients, use
    ``optimizer.register_step_pre_hook`` with a hook that returns None. The gradients remain in ``.grad``.

    Args:
        fused: the array, from `hfusion.fuse` or `hfusion.build`.
        loss: a functional loss that returns one number for a member's output and target, see `hfusion.per_model`.
        optimizer: an optimizer of parameters of ``fused``.
        compile: when to compile forward, loss and backward into one program, with torch's Inductor. ``None`` (default)
            uses cached programs. It compiles others once steps of a kind have taken five seconds, in another process
            while steps run eagerly. On a CPU, once per processor, up to twenty steps then run by turns compiled and
            eagerly, and later ones the faster way. ``True`` compiles at the second call of each kind, and ``False``
            never. On an accelerator, and where programs are not kept on disk, no other process compiles.

            The first step of a kind runs eagerly and is checked. If the array loops over members, as for convolutions
            on a CPU, the program is that of one member. A change of mode, requires_grad, dtype, device, hooks or values
            that the loss reads makes another program. Random draws, as of dropout, differ from those of eager steps.
            What cannot be compiled runs eagerly, with a UserWarning; ``step.report()`` gives the reason. With CUDA
            graphs, up to four batch sizes are recorded, and gradients stay at the same address. Programs for CPUs are
            cached on disk for all processes.
        parts: on a CPU, the number of blocks of members that are computed in parallel, one thread each. ``"auto"``
            gives each torch thread (``torch.get_num_threads``) a block. 1 computes all members together with torch's
            own threads. Results may differ in the last bit with how members are grouped into blocks. Arrays that cannot
            be divided, such as members that share a trained parameter, run as one block, and ``step.report()`` says so.
        memory: the most bytes that a step may take, such as ``"2GiB"``: weights, gradients, optimizer state and
            activations. Forward, loss and backward then run for blocks of members that are estimated to fit; the
            optimizer updates all. Default: no limit.

    Returns:
        A callable ``step(inputs, target, **keywords)`` that returns the losses, ``[B]``, detached. ``inputs`` is one
        argument of the fused module, a tuple or list of its arguments, or a dict of keyword arguments. Inputs, target
        and keywords may be `hfusion.stacked`.

    Raises:
        ValueError: ``fused`` is not an array, ``optimizer`` has parameters of other modules, or an option is invalid.
            At a step: the loss is not one number per member.
        PlanError: ``memory`` is not a number of bytes. At a step: it is less than one member takes.
        FusionError: ``optimizer`` would mix members, such as torch.optim.LBFGS. At a step with ``memory``: members
            cannot be computed in blocks.

    Example:
        >>> import torch, torch.nn.functional as F, hfusion as hf
        >>> fused = hf.build(lambda: torch.nn.Linear(2, 1), seeds=[0, 1, 2])
        >>> opt = hf.optim.SGD(fused.parameters(), lr=[0.1, 0.2, 0.3])
        >>> step = train_step(fused, F.mse_loss, opt, compile=False)
        >>> step(torch.zeros(4, 2), torch.ones(4, 1)).shape
        torch.Size([3])
    """
    if not isinstance(fused, FusedModule):
        raise ValueError(
            f"train_step got {type(fused).__name__}: give what hf.fuse or hf.build gave. A step computes gradients "
            "past the hooks of DistributedDataParallel and other wrappers: write forward, backward and optimizer.step()"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is {optimizer!r}: give an optimizer that is made of fused.parameters()")
    ids = set(map(id, fused.parameters()))
    strange = sum(id(p) not in ids for group in optimizer.param_groups for p in group["params"])
    if strange:
        raise ValueError(
            f"{strange} parameters of the {type(optimizer).__name__} belong to no member of the fused "
            f"{fused._original}; make it of fused.parameters()"
        )
    check_compile(compile)
    coupling.check(optimizer)
    return TrainStep(fused, loss, optimizer, compile, check_parts(parts), memory)
