"""hf.Population: members of any models that train, leave, join and are copied, each exactly as if alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.checkpoint.files import Saved
from hfusion.checkpoint.save import Root
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make
from hfusion.population.evaluate import outputs
from hfusion.population.group_options import GroupOptions, value_of
from hfusion.population.group_updates import GroupUpdates
from hfusion.population.grouping import grouped
from hfusion.population.loading import loaded_members
from hfusion.population.member_groups import Group
from hfusion.population.member_layout import PlacedGroup
from hfusion.population.members import listed
from hfusion.population.mixed import MixedMembers
from hfusion.population.mixed_saving import save_mixed
from hfusion.population.mixed_weights import average_mixed
from hfusion.population.population import ArrayGroup
from hfusion.population.population_rows import PopulationRows
from hfusion.population.update_guard import OnNonfinite
from hfusion.step.compile_mode import Compile
from hfusion.torch_private.optimizer_hooks import has_step_hooks

T = TypeVar("T")


class Population(PopulationRows):
    """Members that train, join, leave and are copied, each exactly as if alone.

    Members that can share an array of batched operators do; the others run as plain torch, see `groups`. Rows without
    a member are free, with NaN in results, until `compact` removes them.

    Args:
        models: the initial members, of any classes and shapes, or a fused module. The models are not changed.
        optimizer: makes an optimizer of hf.optim from parameters. It is called for each group. Lists with a value for
            each member of the population, such as learning rates, are divided among the groups.
        loss: a functional loss, see `hfusion.per_model`.
        scheduler: makes a scheduler of torch.optim.lr_scheduler from the optimizer of one member; or a list of such
            functions, see `hfusion.optim.lr_scheduler.PerMember`. ``pop.scheduler.step()`` steps it.
        scaler: scales each member's loss by its own scale.
        clip_norm, clip_value: limits of the gradients, one or one per member; values are clipped first.
        accumulate: the number of `step` calls per update, which uses the mean of their gradients; one, or one per
            member.
        on_nonfinite: what to do if a loss or gradient of a member is not finite. ``"freeze"`` undoes the member's step
            and leaves it out until it is stopped, overwritten or thawed. ``"raise"`` undoes the step of all members and
            raises a NonFiniteError that names it. ``"ignore"`` continues. Other members are never affected.
        tags: the members' names, also in checkpoints; "member 0" and so on by default.
        compile, memory: as in `hfusion.train_step`, for arrays; ``memory`` is the limit of a step of all members. Steps
            run eagerly if members train a parameter together.
        processes: the most processes that compute plain members; 0 or 1: this one alone. By default one for each core,
            where that is measured to be faster. Members that may be divided have one thread each.

    Raises:
        FusionError: models in different groups train one tensor together.
        ValueError: options exclude each other, or the optimizer is not one of hf.optim.

    Example:
        >>> import hfusion as hf, torch
        >>> models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))]
        >>> make, loss = lambda p: hf.optim.SGD(p, lr=0.1), torch.nn.functional.mse_loss
        >>> pop = hf.Population(models, optimizer=make, loss=loss, compile=False)
        >>> pop.step(torch.ones(4, 3), torch.zeros(4, 2)).shape
        torch.Size([3])
        >>> [(group.kind, group.rows) for group in pop.groups]
        [('array', (0, 1)), ('plain', (2,))]
    """

    def __init__(
        self,
        models: Sequence[nn.Module] | FusedModule,
        *,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        scheduler: Make | Sequence[Make] | None = None,
        scaler: GradScaler | None = None,
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int | Sequence[int] = 1,
        on_nonfinite: OnNonfinite = "freeze",
        tags: Sequence[str] | None = None,
        compile: Compile = None,
        memory: str | int | None = None,
        processes: int | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "optimizer": optimizer,
            "loss": loss,
            "scheduler": scheduler,
            "scaler": scaler,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "accumulate": accumulate,
            "on_nonfinite": on_nonfinite,
            "compile": compile,
            "memory": memory,
        }
        candidates = None if isinstance(models, FusedModule) else grouped(models)
        self._options: GroupOptions | None = GroupOptions.of_arguments(len(models), **options, processes=processes)
        if candidates is None or len(candidates) == 1:
            self._members: ArrayGroup | MixedMembers = ArrayGroup(models, tags=tags, **options)
        else:
            self._members = MixedMembers.of_models(cast(Any, models), candidates, self._options, tags)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the array of all members, such as ``pop.fused``."""
        if name in ("_members", "_options") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if isinstance(self._members, ArrayGroup):
            return getattr(self._members, name)
        raise self._no(name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without functions that pickle cannot find by name."""
        try:
            if isinstance(self._members, ArrayGroup):
                pickle.dumps(self._options)
        except (pickle.PicklingError, AttributeError, TypeError):
            return {**vars(self), "_options": None}
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Population:
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def array(self) -> ArrayGroup:
        """The array of all members. Raises AttributeError if they form several groups, see `groups`."""
        if isinstance(self._members, ArrayGroup):
            return self._members
        raise self._no("array")

    def _no(self, name: str) -> AttributeError:
        return AttributeError(
            f"this population has no {name} of all members: they are {len(self.groups)} groups, each with its own; "
            "pop.groups shows them, and step, evaluate, hparams, models, scheduler and save are of all"
        )

    def _mixed(self) -> MixedMembers:
        """Split the members into groups, also if they were one array so far."""
        if isinstance(self._members, ArrayGroup):
            if self._options is None:
                raise FusionError(
                    "this population came out of a pickle without the functions that make its optimizers, as these are "
                    "of no module: save it by pop.save, or give functions that pickle knows"
                )
            if has_step_hooks(self._members.optimizer):
                raise FusionError(
                    "members become several groups, each with an optimizer of its own, and the optimizer of the array "
                    "has hooks of its step: use register_gradient_hook, or each after step, which are for all members"
                )
            with self._members._lock:
                self._members = MixedMembers.of_array(self._members, self._options)
        return self._members

    def __repr__(self) -> str:
        if isinstance(self._members, ArrayGroup):
            return repr(self._members)
        frozen = f", {len(self.frozen)} frozen" if self.frozen else ""
        members = f"{len(self._members.layout.live)} members in {len(self)} rows{frozen}, step {self.steps}"
        return "\n  ".join([f"Population({members})", *map(str, self.groups)])

    def step(
        self, inputs: Any, target: Any, *, rows: Sequence[int] | None = None, weights: Any = None, **keywords: Any
    ) -> Tensor:
        """Train all members, or ``rows``, for one step. Returns losses ``[rows]``, NaN for rows that do not step.

        Args:
            inputs, target, keywords: as in `hfusion.train_step`. Stacked ones have a row for each member that steps, in
                the order of ``rows``.
            rows: the members that step, each once. The others do not change: neither weights nor moments, counts,
                schedules and scales.
            weights: the weight of each sample in the loss, ``[N]`` for all members or ``[rows, N]``; 0 removes the
                sample. The loss needs ``reduction=``, as torch's have, or to return values ``[N]``.

        Raises:
            ValueError: rows are out of range, free or repeated; a stacked argument has another number of members; or
                weights are negative, all 0 for a member, or used with a loss without values of samples.
            FusionError: ``rows`` with a hook or a trained parameter that all members share.
        """
        keywords |= {"rows": rows, "weights": weights}
        try:
            return self._members.step(inputs, target, **keywords)
        except ForwardsDiffer:
            if not isinstance(self._members, ArrayGroup):
                raise
            return self._mixed().step(inputs, target, **keywords)

    def start(
        self,
        row: int | Sequence[int] | None,
        model: nn.Module | Sequence[nn.Module],
        *,
        tag: str | Sequence[str] | None = None,
        scheduler: Make | Sequence[Make] | None = None,
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int | Sequence[int] | None = None,
        **hypers: Any,
    ) -> Any:
        """Add a model of any shape as a member, with a step count of 0, and return its row. The model is not changed.

        Args:
            row: a free row; None for the first free row, or a new one. For several rows, pass a list of models, and for
                each argument below one value for all rows, or a list; a list of rows is returned.
            hypers: the member's hyper-parameters. One may be left out if all members began with the same value.
            scheduler, clip_norm, clip_value, accumulate: likewise.

        Raises:
            ValueError: the row is taken, the tag is in use, a value is missing since members began with different
                ones, or a value is invalid.
        """
        hypers |= {"tag": tag, "scheduler": scheduler, "accumulate": accumulate}
        hypers |= {"clip_norm": clip_norm, "clip_value": clip_value}
        try:
            return self._members.start(row, model, **hypers)
        except FusionError:
            if not isinstance(self._members, ArrayGroup):
                raise
            array = self._members
            try:
                return self._mixed().start(row, model, **hypers)
            except BaseException:
                self._members = array
                raise

    def append(self, models: nn.Module | Sequence[nn.Module], **given: Any) -> list[int]:
        """Add models of any shape in free and new rows, and return their rows. For ``given`` see `start`."""
        joining = listed("models", models, nn.Module)
        if missing := max(0, len(joining) - self.tags.count(None)):
            self.grow(missing)
        free = [row for row, tag in enumerate(self.tags) if tag is None]
        rows: list[int] = self.start(free[: len(joining)], joining, **given)
        return rows

    def stop(self, row: int | Sequence[int]) -> Any:
        """Remove a member and return its model, or a list of models for several rows. The rows are free afterwards.

        The model has copies of its own tensors; a frozen base that all members share stays shared.

        Raises:
            ValueError: rows are out of range, free or repeated.
        """
        return self._members.stop(row)

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Make members ``dst`` copies of ``src``: model, weights, moments, counts, schedule, hyper-parameters, scale.

        ``src`` is one row, or as many as ``dst``. All are read before any is written. A taken row keeps its tag, a
        free one gets a new tag.

        Raises:
            ValueError: ``src`` is free or frozen, or rows are out of range or written twice.
        """
        self._members.copy(src, dst)

    def thaw(self, row: int | Sequence[int]) -> None:
        """Let frozen members train again, from their state before the step that was not finite."""
        self._members.thaw(row)

    def compact(self) -> list[int]:
        """Remove free rows, and so their time and memory. The remaining members move up.

        A few free rows may remain, since arrays have sizes in blocks to limit the number of compiled programs. Returns
        the old row of each member, in the new order.
        """
        return self._members.compact()

    def grow(self, count: int) -> None:
        """Add free rows at the end, for at least ``count`` more members."""
        self._members.grow(count)

    def evaluate(self, metric: Callable[..., Any], loader: Iterable[Any]) -> Tensor:
        """Return a metric of every member over all batches ``(inputs, target)``, in eval mode: float64 ``[rows]``.

        ``metric(output, target)`` gets one member's outputs of all batches, concatenated, and returns a number: a
        loss, a function of torchmetrics.functional, or your own. A metric with ``update`` and ``compute`` gets batch
        by batch. The loader is read once. Free rows are NaN. Raises ValueError for no metric, or batches of no pairs.
        """
        if self._options is None and isinstance(self._members, ArrayGroup):
            return self._members.evaluate(metric, loader)
        return self._evaluated(lambda mixed: mixed.evaluate(metric, loader))

    def _evaluated(self, evaluation: Callable[[MixedMembers], T]) -> T:
        """The result of ``evaluation``; where forwards turn out to differ in it, the groups stay divided."""
        if not isinstance(self._members, ArrayGroup):
            return evaluation(self._members)
        with self._members._lock:
            mixed = MixedMembers.of_array(self._members, cast(GroupOptions, self._options))
            result = evaluation(mixed)
            if [group.members for group in mixed.groups] != [self._members]:
                self._members = mixed
        return result

    def _outputs(self, loader: Iterable[Any]) -> tuple[Any, Any]:
        """The members' outputs for all batches in eval mode, ``[rows, N, ...]``, and the targets."""
        if self._options is None and isinstance(self._members, ArrayGroup):
            return outputs(self._members.fused, loader)
        return self._evaluated(lambda mixed: mixed.outputs(loader))

    def _placed(self) -> list[Group]:
        """The array or plain model of each group, and the rows of its members; None where a row is free."""
        if isinstance(self._members, ArrayGroup):
            return [(self._members.fused, [None if tag is None else row for row, tag in enumerate(self.tags)])]
        return [(group.members.fused, list(group.rows)) for group in self._members.groups]

    def average(
        self,
        rows: int | Sequence[int] | None = None,
        weights: Tensor | Sequence[float] | None = None,
        *,
        into: int | Sequence[int] | Literal["all"] | None = None,
        optimizer: Literal["keep", "reset"] = "keep",
    ) -> nn.Module | None:
        """Average the parameters and floating-point buffers of members of one shape, weighted.

        Other buffers, such as BatchNorm's count of batches, are taken from the last of ``rows`` with a weight, as in
        `torch.optim.swa_utils.AveragedModel`. Half precision is averaged in float32.

        Args:
            rows: the members to average; by default all.
            weights: a weight for each, at least 0, such as the number of samples; by default equal. 0 leaves one out.
            into: the rows to write the average into, or ``"all"``, as a server of federated averaging does. By default
                it is returned as a model, a copy of the first of ``rows``, and members do not change.
            optimizer: for members that are written, ``"keep"`` keeps their moments and counts, and ``"reset"`` clears
                them. Learning rates and schedules stay.

        Raises:
            ValueError: rows are out of range, free or repeated, members differ in shape, or weights are invalid.
        """
        if isinstance(self._members, ArrayGroup):
            return self._members.average(rows, weights, into=into, optimizer=optimizer)
        return average_mixed(self._members, rows, weights, into, optimizer)

    def save(
        self,
        directory: Root,
        *,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        score: float | None = None,
        wait: bool = True,
    ) -> Future[Path]:
        """Save everything in a new folder under ``directory``; arguments and exceptions are those of `hfusion.save`.

        With ``wait=False`` this copies the state, and a background thread writes it; ``result()`` of the returned
        future is the folder, or raises. A save waits for the previous one, and raises its error if nothing else has.
        """
        if isinstance(self._members, ArrayGroup):
            return self._members.save(directory, loader=loader, extra=extra, keep=keep, score=score, wait=wait)
        return save_mixed(self._members, directory, loader, extra, keep, score, wait)

    @classmethod
    def load(
        cls,
        directory: Root | Saved | Sequence[Root],
        make_model: Callable[..., nn.Module],
        *,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        tags: str | Sequence[str] | None = None,
        scheduler: Make | Sequence[Make] | Mapping[str, Make] | None = None,
        loader: Any = None,
        random: bool = True,
        **options: Any,
    ) -> Population:
        """Return the population of the latest save under ``directory``, or of several, or only its members ``tags``.

        Args:
            make_model: makes a model of each member; its tensors are overwritten. It may take the member's name, and
                must if members are of different models.
            optimizer: as when the population was made, with one value of each hyper-parameter for all members; saved
                values replace them. The same holds for ``scaler``, ``clip_norm`` and ``clip_value``.
            options: further options of the population; ``accumulate`` and ``on_nonfinite`` are saved, too.
            scheduler: as when the population was made; a dict by name if members have different ones.
            loader, random: as in `hfusion.load`; the position of the loader is restored.

        Raises:
            CheckpointError: there is no save, a file is damaged, or it belongs to other models.
        """
        options |= {"optimizer": optimizer, "loss": loss, "scheduler": scheduler}
        population = cls.__new__(cls)
        population._members, population._options = loaded_members(directory, make_model, tags, loader, random, options)
        return population


def flush(population: Population) -> bool:
    """Update members that have made fewer than ``accumulate`` calls of `step`. Return whether there were any.

    Their gradients stay divided by ``accumulate``, as in the last group of an epoch of `hfusion.Task`.
    """
    members = population._members
    if isinstance(members, ArrayGroup):
        return _flush_array(members)
    with members._lock, members.updates() as updates:
        flushed = [_flush_group(group, updates) for group in members.groups]
        return any(flushed)


def _flush_group(group: PlacedGroup, updates: GroupUpdates) -> bool:
    with updates.of_group(group.members, group.rows):
        return _flush_array(group.members)


def _flush_array(array: ArrayGroup) -> bool:
    with array._lock:
        updates = array._updates
        if not updates.underway:
            return False
        due = updates.done > 0
        if not array._common:
            updates.sums.take(array.fused, due)
        # Losses that are not finite were noted at each call.
        array._update(torch.zeros(len(array), device="cpu"), due)
        return True


def limit_norms(population: Population, rows: Sequence[int], norms: HyperValue) -> None:
    """Set the largest gradient norms of members, from the next update on. Raises ValueError for one below 0."""
    members = population._members
    if isinstance(members, ArrayGroup):
        _limit_array(members, rows, norms)
        return
    for index, row in enumerate(rows):
        group, local = members.layout.slot_of(row)
        _limit_array(group.members, [local], value_of("norms", norms, index, len(rows)))


def _limit_array(array: ArrayGroup, rows: Sequence[int], norms: HyperValue) -> None:
    with array._lock:
        limits = array._limits
        values = None if limits.value is None else limits.value.values[list(rows)]
        array._limits = limits.with_rows(rows, norms, values)
