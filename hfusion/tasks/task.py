"""A task, its arrays, and their optimizers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from numbers import Integral
from threading import Lock
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hfusion.array.member_views import HOOKS
from hfusion.array.module import FusedModule
from hfusion.capture.compare_models import check_alone, check_pair
from hfusion.capture.python_state import GENERATORS
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError, PlanError
from hfusion.core.membership import check_whole_stack
from hfusion.core.patience import Patience
from hfusion.core.step_arguments import Compile, check_compile, check_loss_function
from hfusion.device.backend import active_autocast
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.coupling import has_hooks
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, PerMember
from hfusion.optim.optimizer_rows import made_for_rows
from hfusion.step.step_signatures import any_hooks
from hfusion.step.train_step import check_parts
from hfusion.tasks.reading import generators, length, other_generators

Factory: TypeAlias = Callable[[list[nn.Parameter]], FusedOptimizer]

_REMEDY = (
    "give one of hf.optim, or a function that makes one from parameters, such as lambda params: hf.optim.Adam(params, "
    "lr=1e-3); hf.optim.fuse takes over running optimizers of torch"
)


@dataclass(frozen=True)
class Step:
    """The argument of callbacks after a minibatch: the task's name, epoch and step from 0, and ``losses``, ``[B]``.

    If the members of a task are trained as several arrays, there is one call for each; ``members`` lists its members.

    Example:
        >>> import hfusion as hf
        >>> def log(result):
        ...     if isinstance(result, hf.Step):
        ...         print(result.task, result.epoch, result.step, result.losses.tolist())
    """

    task: str
    epoch: int
    step: int
    members: tuple[int, ...]
    losses: Tensor


@dataclass(frozen=True)
class Evaluation:
    """The argument of callbacks after an evaluation: ``losses``, ``[minibatches, B]``, and the other fields of `Step`.

    Example:
        >>> import hfusion as hf
        >>> def best_member(result):
        ...     if isinstance(result, hf.Evaluation):
        ...         return int(result.losses.mean(0).argmin())
    """

    task: str
    epoch: int
    members: tuple[int, ...]
    losses: Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """Models that are trained with one loss on one stream of minibatches, each as if alone.

    Args:
        models: one module, a list, or a fused array. Listed models are not changed; those of one shape are fused. An
            array is trained in place.
        loss: ``loss(output, target)`` returns one number per member, see `hfusion.per_model`.
        optimizer: a function that makes a fused optimizer from parameters. Every hyper-parameter is one value, or one
            per member in the order of ``models``. For an array, its optimizer.
        loader: an iterable with a length that yields minibatches ``(inputs, target)`` in every epoch. ``inputs`` is a
            tensor, a tuple of arguments, or a dict of keyword arguments; `hfusion.stacked` gives each member its own.
            It is read under the task's own random state.
        epochs: passes over the loader.
        eval_loader: minibatches like those of ``loader``, possibly with more samples. Their losses are computed after
            every epoch, in eval mode and without gradients. Unless it is a list or tuple, its first minibatch must be
            the largest.
        name: one word without spaces.
        clip_norm: the maximum gradient norm, one value or one per member, as in `hfusion.optim.clip_grad_norm_`.
        accumulate: minibatches per optimizer step; losses are divided by it. The last group of an epoch may be smaller,
            as in Lightning.
        seed: the seed of torch's random numbers for this task: those of a loop after ``torch.manual_seed(seed)``. By
            default it is drawn from torch's generator, so that ``torch.manual_seed`` determines it.
        scheduler: a function that makes a scheduler of torch.optim.lr_scheduler from the optimizer of one member, or a
            list of such functions, one per member. For an existing optimizer, its scheduler.
        scheduler_interval: step the scheduler after every ``"epoch"`` and its evaluation, or after every ``"step"`` of
            the optimizer. A ReduceLROnPlateau gets the member's mean evaluation loss; without ``eval_loader`` the mean
            loss of the epoch; with ``"step"`` the loss of the last minibatch.
        compile: as in `hfusion.train_step`: forward and backward of a minibatch become one program, if the task stays
            on its device. Otherwise it runs eagerly, and the report gives the reason; with ``True`` a UserWarning does,
            too. Compiled results are those of a loop over `hfusion.train_step`: they differ from the plain loop by
            rounding, and in random draws, as of dropout. With False they are those of the plain loop, bit for bit. None
            decides before the first minibatch, by the estimated time of all; it does not compile tasks that draw random
            numbers, and checkpoints store the choice.
        parts: as in `hfusion.train_step`, for compiled tasks.
        patience: a member stops after this many consecutive evaluations in which its mean loss has not improved. Pass
            an `hfusion.Patience` for other settings, such as ``restore_best``.
        restore_best: at the end, give each member the parameters and buffers of its best evaluation, by the ``mode``
            and ``least`` of ``patience``. Copies are in host memory. Optimizer state is not restored.
        callbacks: called after every minibatch with a `Step`, and after the evaluation of an epoch with an
            `Evaluation`, in another thread. For a compiled task on an accelerator they are called up to 16 minibatches
            later, in the same order.

    Raises:
        PlanError: a value is out of range, or the loader has no length or cannot be read again.

    Example:
        >>> import torch, hfusion as hf
        >>> task = hf.Task(
        ...     [torch.nn.Linear(2, 1) for _ in range(3)],
        ...     torch.nn.functional.mse_loss,
        ...     lambda params: hf.optim.SGD(params, lr=[0.1, 0.2, 0.3]),
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ...     epochs=5,
        ...     clip_norm=[1.0, 1.0, 0.5],
        ... )
    """

    models: nn.Module | Sequence[nn.Module]
    loss: Callable[..., Any]
    optimizer: FusedOptimizer | Factory
    loader: Iterable[Any]
    epochs: int = 1
    eval_loader: Iterable[Any] | None = None
    name: str = "task"
    clip_norm: HyperValue | None = None
    accumulate: int = 1
    seed: int | None = None
    scheduler: Make | Sequence[Make] | lr_scheduler.LRScheduler | None = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    compile: Compile = None
    parts: int | str = "auto"
    patience: Patience | None = None
    restore_best: bool = False
    callbacks: Sequence[Callable[[Step | Evaluation], None]] = field(default=())

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name.split() != [self.name]:
            raise PlanError(f'task {self.name!r}: a name is one word without spaces, such as "first-sweep"')
        if not all(_whole(count) and count >= 1 for count in (self.epochs, self.accumulate)):
            counts = f"epochs={self.epochs!r}, accumulate={self.accumulate!r}"
            raise PlanError(f"task {self.name!r} has {counts}: give whole numbers of at least 1")
        # As `torch.manual_seed` takes it.
        if self.seed is not None and not (_whole(self.seed) and -(1 << 63) <= self.seed < 1 << 64):
            raise PlanError(f"task {self.name!r}: the seed is {self.seed!r}: give a whole number of 64 bits, or None")
        for model in listed_models(self) if isinstance(self.models, nn.Module | Sequence) else [self.models]:
            if not isinstance(model, nn.Module):
                raise PlanError(
                    f"task {self.name!r}: models must be one module, a list of them, or a fused array, got "
                    f"{type(model).__name__}"
                )
        if not isinstance(self.models, nn.Module) and not self.models:
            raise PlanError(f"task {self.name!r} has no models: give at least one")
        if not isinstance(self.callbacks, Sequence) or not all(map(callable, self.callbacks)):
            raise PlanError(f"task {self.name!r}: callbacks is {self.callbacks!r}; give a list of functions")
        try:
            check_loss_function(self.loss)
            check_compile(self.compile)
            check_parts(self.parts)
        except ValueError as error:
            raise PlanError(f"task {self.name!r}: {error}") from None
        if self.patience is not None and not isinstance(self.patience, Patience):
            raise PlanError(f"task {self.name!r}: patience is {self.patience!r}; give hf.Patience(...)")
        if (self.patience is not None or self.restore_best) and self.eval_loader is None:
            raise PlanError(f"task {self.name!r}: patience and restore_best go by evaluations; give an eval_loader")
        self._check_loader("loader", self.loader)
        if self.eval_loader is not None:
            self._check_loader("eval_loader", self.eval_loader)
        if not isinstance(self.optimizer, FusedOptimizer) and not callable(self.optimizer):
            kind = type(self.optimizer).__name__
            raise PlanError(f"task {self.name!r}: the optimizer is {kind}; {_REMEDY}")
        if isinstance(self.optimizer, FusedOptimizer) and not isinstance(self.models, FusedModule):
            raise PlanError(
                f"task {self.name!r}: an optimizer that exists fits an array that exists; give a function that makes "
                "one from the parameters, or fuse the models before"
            )
        self._check_scheduler()

    def _check_scheduler(self) -> None:
        scheduler, about = self.scheduler, f"task {self.name!r}: the scheduler"
        if self.scheduler_interval not in ("epoch", "step"):
            raise PlanError(f'task {self.name!r}: scheduler_interval={self.scheduler_interval!r}: "epoch" or "step"')
        if isinstance(scheduler, lr_scheduler.LRScheduler):
            if scheduler.optimizer is not self.optimizer:
                raise PlanError(f"{about} drives another optimizer: give a function that makes one, or that optimizer")
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and not isinstance(scheduler, PerMember):
                raise PlanError(
                    f"{about} takes one metric for all members: use hf.optim.lr_scheduler.ReduceLROnPlateau"
                )
        elif scheduler is not None and not callable(scheduler):
            if not isinstance(scheduler, Sequence) or not all(map(callable, scheduler)):
                raise PlanError(
                    f"{about} must be a function that makes one from the optimizer of one member, got "
                    f"{type(scheduler).__name__}. Give lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10), or a list "
                    "with one function for each."
                )
            if len(scheduler) != self.members:
                raise PlanError(
                    f"{about} is {len(scheduler)} functions for {self.members} members: give one, or as many"
                )

    def _check_loader(self, role: str, loader: Iterable[Any]) -> None:
        kind = f"task {self.name!r}: the {role} of class {type(loader).__name__}"
        try:
            count = length(loader)
        except TypeError as error:
            raise PlanError(
                f"{kind} has no length, so nothing can be planned; give a DataLoader over a dataset with a length, a "
                "list of minibatches, or an iterable whose __len__ says how many an epoch has"
            ) from error
        if not count:
            raise PlanError(f"{kind} gives no minibatch")

    @property
    def epoch(self) -> int:
        """The number of minibatches of an epoch."""
        return length(self.loader)

    @property
    def evaluated(self) -> int:
        """The number of minibatches that are evaluated after every epoch."""
        return 0 if self.eval_loader is None else length(self.eval_loader)

    @property
    def restores_best(self) -> bool:
        """True if members end with their best weights."""
        return self.restore_best or (self.patience is not None and self.patience.restore_best)

    @property
    def steps(self) -> int:
        """The number of minibatches of all epochs."""
        return self.epochs * self.epoch

    @property
    def members(self) -> int:
        """The number of members, over all shapes."""
        return len(self.models) if isinstance(self.models, FusedModule) else len(listed_models(self))


def _whole(count: object) -> bool:
    """Return whether a value is a whole number."""
    return isinstance(count, Integral) and not isinstance(count, bool)


def seed_of(task: Task) -> int:
    """Return the seed of a task. One that is not given is drawn from torch's generator."""
    return int(torch.randint(1 << 62, (), device="cpu") if task.seed is None else task.seed)


def listed_models(task: Task) -> Sequence[nn.Module]:
    """Return the models of a task, of which a fused array is one."""
    return [task.models] if isinstance(task.models, nn.Module) else task.models


def shapes(models: Sequence[nn.Module]) -> list[list[int]]:
    """Group the indices of models that can be fused, in the order of their first ones."""
    groups: list[list[int]] = []
    for index, model in enumerate(models):
        check_alone(index, model)
        for group in groups:
            try:
                check_pair(models[group[0]], index, model)
            except FusionError:
                continue
            group.append(index)
            break
        else:
            groups.append([index])
    return groups


def optimizer_of(task: Task, array: FusedModule, members: Sequence[int]) -> FusedOptimizer:
    """Return the optimizer of the array of ``members``, with their hyper-parameters."""
    optimizer: Any = task.optimizer
    if not isinstance(optimizer, FusedOptimizer):
        try:
            optimizer = made_for_rows(optimizer, list(array.parameters()), members, task.members)
        except ValueError as error:
            raise PlanError(f"task {task.name!r}: {error}") from error
    if not isinstance(optimizer, FusedOptimizer):
        kind = type(optimizer).__qualname__
        raise PlanError(f"task {task.name!r}: the function that makes its optimizer gave {kind}; {_REMEDY}")
    array_ids = {id(param) for param in array.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not all(id(param) in array_ids for param in params):
        raise PlanError(f"task {task.name!r}: the optimizer has parameters that are not the array's")
    if not any(param.requires_grad for param in params):
        raise PlanError(
            f"task {task.name!r} trains nothing: none of the {len(params)} parameters of its optimizer requires a "
            "gradient; set requires_grad on those that are to be trained"
        )
    return optimizer


# Checks of concurrent tasks: they must not share memory that one of them writes, nor data readers.

# The tensors that runs of this process train in place, by id, with the task of each.
_tensor_owners: dict[int, str] = {}
_reservation_lock = Lock()


def listed(tasks: Any) -> list[Task]:
    """Return the tasks as a list.

    Raises PlanError for none, other objects, repeated tasks or names, and under autocast.
    """
    if active_autocast():
        raise PlanError(
            "tasks are trained in threads of their own, which torch.autocast around hf.train does not reach: let "
            "forward and the loss enter it, or use hf.Population or hf.train_step"
        )
    task_list = [tasks] if isinstance(tasks, Task) or not isinstance(tasks, Iterable) else list(tasks)
    if not task_list:
        raise PlanError("there is no task: give at least one hf.Task")
    by_name: dict[str, Task] = {}
    for index, task in enumerate(task_list):
        if not isinstance(task, Task):
            raise PlanError(f"task {index} must be an hf.Task, got {type(task).__name__}")
        other = by_name.get(task.name)
        if other is task:
            raise PlanError(f"task {task.name!r} is given twice: give it once, or make a second one of its own")
        if other is not None:
            raise PlanError(f"two tasks are named {task.name!r}: give each its own name")
        by_name[task.name] = task
    return task_list


def check_tensors(tasks: Sequence[Task]) -> None:
    """Raise PlanError if a task uses memory that another task trains in place.

    Lists of models are copied before anything runs, so these may share models; frozen tensors are only read.
    """
    for task in tasks:
        for _, tensor in tensors(task.models) if isinstance(task.models, FusedModule) else ():
            check_whole_stack(tensor, "hf.train shards arrays by itself, within the memory of each device")
    written = sorted(
        (*_memory(tensor), writer, name) for writer, task in enumerate(tasks) for name, tensor in _written(task)
    )
    shared: list[tuple[int, int, str, str]] = []
    for other, task in enumerate(tasks if written else ()):
        for name, tensor in _reached(task):
            start, end = _memory(tensor)
            # The last range that begins before this one ends. Of two written ranges that overlap, one finds the other.
            last = bisect_left(written, (end,)) - 1
            if start < end and last >= 0 and written[last][1] > start:
                # Of equal ranges, the first task's.
                _, _, writer, written_name = written[bisect_left(written, written[last][:2])]
                if writer != other:
                    shared.append((writer, other, name, written_name))
    if shared:
        first, second, name, written_name = min(shared, key=lambda pair: pair[:2])
        writer_name, other_name = tasks[first].name, tasks[second].name
        raise PlanError(
            f"tasks {writer_name!r} and {other_name!r} share memory: {name!r} of {other_name!r} is {written_name!r} of "
            f"the array that {writer_name!r} trains in place. Train both in one task, one after the other in two "
            "calls, or give one of them a copy (copy.deepcopy, array.unfuse())"
        )


@contextmanager
def reserve_tensors(tasks: Sequence[Task]) -> Iterator[None]:
    """Context manager: reserve the tensors that tasks train in place. Raises PlanError if another run uses them."""
    with _reservation_lock:
        for task in tasks:
            for name, tensor in _reached(task):
                if id(tensor) in _tensor_owners:
                    raise PlanError(
                        f"task {task.name!r} shares {name!r} with the task {_tensor_owners[id(tensor)]!r} of another "
                        "hf.train, which trains it and has not ended: train one after the other, or give one of them "
                        "a copy (copy.deepcopy, array.unfuse())"
                    )
        task_names = {id(tensor): task.name for task in tasks for _, tensor in _written(task)}
        _tensor_owners.update(task_names)
    try:
        yield
    finally:
        with _reservation_lock:
            for key in task_names:
                del _tensor_owners[key]


def _written(task: Task) -> Iterator[tuple[str, Tensor]]:
    """Yield the user's tensors that training changes, with their names."""
    if isinstance(task.models, FusedModule):
        for name, tensor in tensors(task.models):
            if tensor.numel() and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
                yield name, tensor


def _reached(task: Task) -> Iterator[tuple[str, Tensor]]:
    for index, model in enumerate(listed_models(task)):
        for name, tensor in tensors(model):
            yield name if model is task.models else f"model {index}: {name}", tensor


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return start and end address of a tensor's storage. A member's storage may lie within its array's."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def check_loaders(arrays: Sequence[tuple[str, Task]]) -> None:
    """Raise PlanError if the loaders of two arrays, given by name and task, share an iterator or a random generator.

    The order of their reads depends on timing, so neither array would be trained as if alone.
    """
    first: dict[int, tuple[str, object]] = {}
    for name, task in arrays:
        parts = {id(part): part for loader in (task.loader, task.eval_loader) for part in _parts(loader)}
        for key, part in parts.items():
            if key not in first:
                continue
            what, remedy = f"draw from one {type(part).__qualname__}", "draw from torch's: hf.Task(seed=...) seeds it"
            if not isinstance(part, GENERATORS):
                what, remedy = "read with the workers of one DataLoader", "persistent_workers=False"
            raise PlanError(f"{first[key][0]!r} and {name!r} {what}: give each its own DataLoader, or {remedy}")
        # The objects are held, so that no id is reused.
        first |= {key: (name, part) for key, part in parts.items()}


def _parts(loader: Any) -> Iterator[Any]:
    """Yield the objects that readers of a loader would share."""
    yield from generators(loader)
    if not getattr(loader, "num_workers", 0):
        yield from other_generators(loader)
    # Without persistent workers, each iterator of a DataLoader starts its own workers.
    if getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0):
        yield loader


def find_hook(models: Iterable[nn.Module], optimizer: object) -> str:
    """Return what of a task has a user's hook of gradients or of steps, as a clause; empty if nothing has."""
    for model in models:
        for name, tensor in tensors(model):
            if any_hooks([tensor]):
                return f"{name} has a hook of its gradient"
    if isinstance(optimizer, FusedOptimizer) and has_hooks(optimizer):
        return f"{type(optimizer).__name__} has a hook of its steps"
    return ""


def check_shardable(name: str, array: FusedModule, optimizer: FusedOptimizer) -> None:
    """Raise PlanError if code of the user is to run at calls of the whole array, or at steps of all its tensors."""
    found = find_hook([array], optimizer)
    if any(getattr(array, table) for table in HOOKS):
        found = "its array has a hook of its calls"
    elif not found and unwrap(optimizer.step) is not unwrap(FusedOptimizer.step):
        found = f"{type(optimizer).__name__} has a step of its own"
    if found:
        raise PlanError(
            f"task {name!r} is trained in shards, one after the other, and {found}, which is for all of them at once: "
            "remove it, or give a device the memory for the whole task"
        )
