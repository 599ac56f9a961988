"""hf.Population: members of any models that train, leave, join and are copied, each exactly as if alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.checkpoint.files import Saved
from hfusion.checkpoint.save import Root
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make
from hfusion.population.evaluate import outputs
from hfusion.population.group_options import GroupOptions
from hfusion.population.grouping import grouped
from hfusion.population.loading import loaded_members
from hfusion.population.member_groups import Group
from hfusion.population.members import listed
from hfusion.population.mixed import MixedMembers
from hfusion.population.mixed_saving import save_mixed
from hfusion.population.mixed_weights import average_mixed
from hfusion.population.population import ArrayGroup
from hfusion.population.population_rows import PopulationRows
from hfusion.population.update_guard import OnNonfinite
from hfusion.step.compile_mode import Compile

T = TypeVar("T")


class Population(PopulationRows):
    """Members that train, leave, join and are copied; each exactly as if alone.

    Members that may share an array of batched operators do, the others run as plain torch, see `groups`. A row is taken
    by a member or free. A free row gives NaN, and `compact` gives its memory and time back.

    Args:
        models: what members start as, of any classes and shapes; or a fused module. They stay as they are.
        optimizer: gives an optimizer of hf.optim for the parameters that it gets. It is called for each group; a list
            of one value for each member of the population, such as learning rates, is divided among them.
        loss: any functional loss, see `hfusion.per_model`.
        scheduler: gives a scheduler of torch.optim.lr_scheduler for an optimizer of one member, or a list of such
            functions, see `hfusion.optim.lr_scheduler.PerMember`; ``pop.scheduler.step()`` steps it.
        scaler: scales the losses, each member's by its own scale.
        clip_norm, clip_value: limits of the gradients, one or one per member; by value first.
        accumulate: so many calls of `step` make one update, of the mean of their gradients; one, or one per member.
        on_nonfinite: what happens to a member whose loss or gradient is not finite. ``"freeze"``: it stays as it was
            before that step until it is stopped, copied over or thawed; ``"raise"``: a NonFiniteError that names it,
            and all are as before the step; ``"ignore"``: it goes on with what it has. Others are never touched.
        tags: the members' names, by which checkpoints know them; made up where not given.
        compile, memory: as of `hfusion.train_step`, for arrays; ``memory`` is what a step of all members may take.
            Where members train a parameter together, steps run eagerly.

    Raises:
        FusionError: models in different groups that train one tensor together.
        ValueError: options that do not go together, or an optimizer that is none of hf.optim.

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
    ) -> None:
        given: dict[str, Any] = {
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
        self._options: GroupOptions | None = GroupOptions.of_arguments(len(models), **given)
        if candidates is None or len(candidates) == 1:
            self._members: ArrayGroup | MixedMembers = ArrayGroup(models, tags=tags, **given)
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
        if not isinstance(self._members, ArrayGroup):
            return vars(self)
        try:
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
        """The array of all members. Raises AttributeError where they are several groups, see `groups`."""
        if isinstance(self._members, ArrayGroup):
            return self._members
        raise self._no("array")

    def _no(self, name: str) -> AttributeError:
        count = len(self._members.groups) if isinstance(self._members, MixedMembers) else 1
        return AttributeError(
            f"this population has no {name} of all members: they are {count} groups, each with its own; pop.groups "
            "shows them, and step, evaluate, hparams, models, scheduler and save are of all"
        )

    def _mixed(self) -> MixedMembers:
        """The members as groups of their own, also where they were one array so far."""
        if isinstance(self._members, ArrayGroup):
            if self._options is None:
                raise FusionError(
                    "this population came out of a pickle without the functions that make its optimizers, as these are "
                    "of no module: save it by pop.save, or give functions that pickle knows"
                )
            optimizer = self._members.optimizer
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
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
        live = len(self._members.layout.live)
        frozen = f", {len(self.frozen)} frozen" if self.frozen else ""
        groups = "\n  ".join(map(str, self.groups))
        return f"Population({live} members in {len(self)} rows{frozen}, step {self.steps})\n  {groups}"

    def step(
        self, inputs: Any, target: Any, *, rows: Sequence[int] | None = None, weights: Any = None, **keywords: Any
    ) -> Tensor:
        """One step of every member, or of ``rows`` alone: losses ``[rows]``, NaN where a row is free or does not step.

        Args:
            inputs, target, keywords: see `hfusion.train_step`; stacked ones have a row for each member that steps, in
                the order of ``rows``.
            rows: the members that step, each once. The others stay as they are, to the bit, and so do their moments,
                counts, schedules and scales.
            weights: how often each sample counts in the loss, ``[N]`` for all members or one row for each; 0 removes
                it. Needs a loss with ``reduction=``, such as torch's, or of values ``[N]``.

        Raises:
            ValueError: rows that are none, are free, or come twice; a stacked argument of another number of members;
                weights below 0, all 0 for a member, or for a loss that has no values of single samples.
            FusionError: a step of some rows where a hook, or a parameter that members train together, takes all.
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
        """A model of any shape joins in a free row, at its own step 0: the row. The model stays as it is.

        Args:
            row: a free row; None for the first that is free, or a new one. Several rows take as many models, tags, and
                one value for all or one for each of what follows.
            hypers: its hyper-parameters; those that all members began with alike need not be given.
            scheduler, clip_norm, clip_value, accumulate: of the member; what all began with alike need not be given.

        Raises:
            ValueError: a row that is taken, a tag that another member has, what is missing because members began with
                different ones, or a value that is wrong.
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
        """Let models of any shape join, in free rows and in new ones: their rows. ``given``: see `start`."""
        joining = listed("models", models, nn.Module)
        if missing := max(0, len(joining) - self.tags.count(None)):
            self.grow(missing)
        free = [row for row, tag in enumerate(self.tags) if tag is None]
        rows: list[int] = self.start(free[: len(joining)], joining, **given)
        return rows

    def stop(self, row: int | Sequence[int]) -> Any:
        """A member leaves: the model, or a list of them for several rows; the rows are free from here on.

        The model has copies of its own tensors; a frozen base of all members stays the one that they have.

        Raises:
            ValueError: a row that is none, is free, or comes twice.
        """
        return self._members.stop(row)

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Let members ``dst`` be what ``src`` are: model, weights, moments, counts, schedule, hyper-parameters, scale.

        ``src`` is one row or as many as ``dst``; all are read before one is written. A taken row keeps its tag, a free
        one gets a new one.

        Raises:
            ValueError: ``src`` is free, or frozen; rows that are none, or are written twice.
        """
        self._members.copy(src, dst)

    def thaw(self, row: int | Sequence[int]) -> None:
        """Let frozen members train again, from where they were before the step that was not finite."""
        self._members.thaw(row)

    def compact(self) -> list[int]:
        """Give back the time and memory of free rows, but for a few: the members that are left move up.

        Rows of an array come in blocks, so that no program is compiled for every number of members. Returns the old row
        of each member that is left, in their new order.
        """
        return self._members.compact()

    def grow(self, count: int) -> None:
        """Make room for ``count`` members more at least, in free rows at the end."""
        self._members.grow(count)

    def evaluate(self, metric: Callable[..., Any], loader: Iterable[Any]) -> Tensor:
        """A metric of every member over all batches ``(inputs, target)``, in eval mode: float64 ``[rows]``.

        ``metric(output, target)`` gets one member's outputs of all batches, joined, and gives a number: a loss, a
        function of torchmetrics.functional, any function. A metric with ``update`` and ``compute`` gets batch by batch.
        The loader is read once. A free row has NaN.
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
        """Average members of one shape: parameters and floating-point buffers, weighted.

        Other buffers, such as BatchNorm's count of batches, are those of the last of ``rows`` with a weight, as
        `torch.optim.swa_utils.AveragedModel` has those of the model that it got last. Halves are averaged in float32.

        Args:
            rows: the members that are averaged; None: all.
            weights: one for each of them, at least 0, of any sum above 0, such as numbers of samples. Who has 0 is left
                out. None: all alike.
            into: the rows that the average is written into, ``"all"`` of the members, as a server of federated
                averaging sends it to its clients. None: it is returned as a model, a copy of the first of ``rows``, and
                members stay as they are.
            optimizer: what members that are written have of the optimizer: ``"keep"`` their own moments and counts,
                or ``"reset"``, as if they began. Rates and schedules stay.

        Raises:
            ValueError: a row that is none, is free or comes twice, members of different shapes, or weights that are
                none.
        """
        if isinstance(self._members, ArrayGroup):
            return self._members.average(rows, weights, into=into, optimizer=optimizer)
        return average_mixed(self._members, rows, weights, into, optimizer)

    def save(
        self,
        root: Root,
        *,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        score: float | None = None,
        wait: bool = True,
    ) -> Future[Path]:
        """Save everything in a new folder under ``root``; see `hfusion.save` for the arguments, and what is raised.

        ``wait=False``: only the copies are made now, and another thread writes them; the result of what is returned is
        the folder, or the error. A save waits for the one before, and tells its error where nobody asked for it.
        """
        if isinstance(self._members, ArrayGroup):
            return self._members.save(root, loader=loader, extra=extra, keep=keep, score=score, wait=wait)
        return save_mixed(self._members, root, loader, extra, keep, score, wait)

    @classmethod
    def load(
        cls,
        root: Root | Saved | Sequence[Root],
        make_model: Callable[..., nn.Module],
        *,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        names: str | Sequence[str] | None = None,
        scheduler: Make | Sequence[Make] | Mapping[str, Make] | None = None,
        loader: Any = None,
        random: bool = True,
        **options: Any,
    ) -> Population:
        """The population of the latest save under ``root``, or under several, as it was; or ``names`` of its members.

        Args:
            make_model: gives a model of each member; its tensors are written over. It may take the member's name, and
                must where members are of different models.
            optimizer: as when it was made; give one value of each hyper-parameter for all, what was saved is written
                over it. So with ``scaler``, ``clip_norm`` and ``clip_value``.
            options: others of the population; ``accumulate`` and ``on_nonfinite`` are by default as they were.
            scheduler: as when it was made; where members have different ones, by their names.
            loader: goes on from where the saved one was.
            random: whether the random generators go on from where they were.

        Raises:
            CheckpointError: there is none, a file is damaged, or it is of other models.
        """
        options |= {"optimizer": optimizer, "loss": loss, "scheduler": scheduler}
        population = cls.__new__(cls)
        population._members, population._options = loaded_members(root, make_model, names, loader, random, options)
        return population
