"""The errors a user can meet. Each message says what, where, the values, and what to do."""


class HFusionError(Exception):
    """Base class of all errors that hfusion defines."""


class FusionError(HFusionError):
    """The models cannot be fused, or the fused module is used in a way that fusion does not allow."""


class ForwardsDiffer(FusionError):
    """Models of one structure do different things in forward. ``groups``: the models that do the same, by index."""

    def __init__(self, message: str, groups: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(message)
        self.groups = groups


class PlanError(HFusionError):
    """Tasks cannot be planned: they fit the machine in no way, or not one another, or cannot be used as they are."""


class CheckpointError(HFusionError):
    """A checkpoint is missing, damaged, or belongs to another array."""


class NonFiniteError(HFusionError):
    """A member's loss or gradient is not finite, in a population with ``on_nonfinite="raise"``."""


class SpillError(HFusionError):
    """The disk has no room for spilled state, or a spill file is gone."""


# Tracebacks show errors under the name by which users import them, such as hfusion.FusionError.
for _error in (HFusionError, FusionError, ForwardsDiffer, PlanError, CheckpointError, NonFiniteError, SpillError):
    _error.__module__ = "hfusion"
