"""The errors a user can meet. Each message says what, where, the values, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class HFusionError(Exception):
    """Base class of all errors that hfusion defines.

    Example:
        >>> import torch, hfusion as hf
        >>> try:
        ...     hf.fuse([torch.nn.Linear(2, 1), torch.nn.ReLU()])
        ... except hf.HFusionError as error:
        ...     type(error).__name__
        'FusionError'
    """


class FusionError(HFusionError):
    """The models cannot be fused, or the fused module is used in a way that fusion does not allow.

    Example:
        >>> import torch, hfusion as hf
        >>> try:
        ...     hf.fuse([torch.nn.Linear(2, 1), torch.nn.ReLU()])
        ... except hf.FusionError as error:
        ...     print(str(error).partition(". ")[0])
        module (root) is Linear in model 0 and ReLU in model 1
    """


class ForwardsDiffer(FusionError):
    """Models of one structure do different things in forward. ``groups``: the models that do the same, by index.

    Example:
        >>> import torch, hfusion as hf
        >>> class Activated(torch.nn.Linear):
        ...     def __init__(self, kind):
        ...         super().__init__(2, 1)
        ...         self.kind = kind
        ...
        ...     def forward(self, x):
        ...         return getattr(torch, self.kind)(super().forward(x))
        >>> fused = hf.fuse([Activated("tanh"), Activated("relu"), Activated("tanh")])
        >>> try:
        ...     fused(torch.zeros(4, 2))
        ... except hf.ForwardsDiffer as error:
        ...     error.groups
        ((0, 2), (1,))
    """

    def __init__(self, message: str, groups: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(message)
        self.groups = groups


class NotCaptured(FusionError):
    """No program can compute a call; the members' own code can, one member after the other."""


class KeepsState(NotCaptured):
    """Forward changes Python state, which only the array's own members keep, and no program.

    ``names``: the names on the paths to the attributes and variables.
    """

    def __init__(self, message: str, paths: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = frozenset(name for path in paths for name in path.split("."))


class PlanError(HFusionError):
    """Tasks cannot be planned: they fit the machine in no way, or not one another, or cannot be used as they are.

    Example:
        >>> import hfusion as hf
        >>> try:
        ...     hf.plan([], hf.Machine([hf.Device("cpu", memory="1GiB")]))
        ... except hf.PlanError as error:
        ...     print(error)
        there is no task: give at least one hf.Task
    """


class CheckpointError(HFusionError):
    """A checkpoint is missing, damaged, or belongs to another array.

    Example:
        >>> import tempfile, torch, hfusion as hf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         hf.load(folder, torch.nn.Linear(2, 1))
        ...     except hf.CheckpointError as error:
        ...         type(error).__name__
        'CheckpointError'
    """


class NonFiniteError(HFusionError):
    """A member's loss or gradient is not finite, in a population with ``on_nonfinite="raise"``.

    Example:
        >>> import torch, hfusion as hf
        >>> pop = hf.Population(
        ...     [torch.nn.Linear(2, 1) for _ in range(2)],
        ...     optimizer=lambda params: hf.optim.SGD(params, lr=0.1),
        ...     loss=torch.nn.functional.mse_loss,
        ...     on_nonfinite="raise",
        ...     compile=False,
        ... )
        >>> try:
        ...     pop.step(torch.full((4, 2), torch.inf), torch.zeros(4, 1))
        ... except hf.NonFiniteError as error:
        ...     "nothing was updated" in str(error)
        True
    """


class SpillError(HFusionError):
    """The disk has no room for spilled state, or a spill file is gone.

    Example:
        >>> import hfusion as hf
        >>> issubclass(hf.SpillError, hf.HFusionError)  # `except hf.HFusionError` catches it
        True
    """


# Tracebacks show errors under the name by which users import them, such as hfusion.FusionError.
for _error in (HFusionError, FusionError, ForwardsDiffer, PlanError, CheckpointError, NonFiniteError, SpillError):
    _error.__module__ = "hfusion"


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Context manager: add ``note`` to errors."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise
