"""Arrays in Lightning: one LightningModule that trains B members, each with its own losses, limits and schedule.

``hfusion.lightning`` needs Lightning, which the extra ``hfusion[lightning]`` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.array.per_model import per_model
from hfusion.core.calls import stacked
from hfusion.core.errors import FusionError
from hfusion.core.layout import values_of
from hfusion.core.step_arguments import check_losses
from hfusion.optim import FusedOptimizer, clip_grad_norm_, clip_grad_value_
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import PerMember
from hfusion.population.evaluation import number

try:
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor, StochasticWeightAveraging
except ImportError as error:
    raise ImportError("hfusion.lightning needs Lightning: pip install lightning (extra: hfusion[lightning])") from error


class LightningArray(lightning.LightningModule):  # type: ignore[misc]
    """B members as one LightningModule. It uses manual optimization, since Lightning's own is for one model.

    A batch is ``(inputs, target)``. It logs the mean over the members (``train_loss``, ``val_loss``, ...), for
    callbacks such as EarlyStopping; the best member (``val_loss_best``); each member (``val_loss/<name>``); and
    their learning rates (``lr/<name>``, for further param groups ``lr1/<name>`` and so on).

    Args:
        models: a list of models as in `hfusion.fuse`, or a fused module.
        loss: a functional loss, see `hfusion.per_model`.
        optimizer: makes an optimizer of hf.optim from parameters.
        scheduler: makes a scheduler of torch or of hf.optim.lr_scheduler from that optimizer.
        scheduler_interval: step the scheduler after every ``"epoch"``, or after every ``"step"`` of the optimizer.
        monitor: the logged value of each member that a ReduceLROnPlateau of hf.optim.lr_scheduler watches, or those of
            torch within a PerMember.
        clip_norm, clip_value: the maximum gradient norm, and the maximum absolute gradient, of each member; one value,
            or one per member. ``Trainer(gradient_clip_val=...)`` raises an error, as it would clip all by one norm.
        accumulate: the number of batches per update, which uses the mean of their gradients.
        metrics: functions of one member's output and target, by name. Their values are logged in validation and test.
        own_batches: True if inputs and target are ``[B, ...]``, with a batch per member. By default all members get
            the same batch.
        tags: the members' names in logs; by default their numbers.

    Raises:
        FusionError: the models cannot be fused.
        ValueError: tags and members differ in number, a tag or a metric has a name that another value is logged by, or
            ``accumulate`` is no whole number of at least 1; a loss or a metric does not give one number for a member;
            or a scheduler watches ``monitor``, and no value of that name was logged.
    """

    def __init__(
        self,
        models: Sequence[nn.Module] | FusedModule,
        *,
        loss: Callable[..., Any],
        optimizer: Callable[[Any], FusedOptimizer],
        scheduler: Callable[[Any], Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        monitor: str = "val_loss",
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int = 1,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        own_batches: bool = False,
        tags: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate={accumulate!r}: give a whole number of at least 1")
        if not callable(optimizer):
            raise ValueError(f"optimizer={optimizer!r}: give a function")
        if scheduler is not None and not callable(scheduler):
            raise ValueError(f"scheduler={scheduler!r}: give a function, or None")
        if scheduler_interval not in ("epoch", "step"):
            raise ValueError(f'scheduler_interval={scheduler_interval!r}: it is "epoch" or "step"')
        self.automatic_optimization = False
        self.fused = models if isinstance(models, FusedModule) else fuse(models)
        self.tags = [str(member) for member in range(len(self.fused))] if tags is None else list(tags)
        if len(self.tags) != len(self.fused):
            raise ValueError(f"{len(self.tags)} tags for {len(self.fused)} members: give one for each")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags={self.tags}: every member has a name of its own")
        if taken := {"loss", "loss_best"}.intersection(metrics or ()):
            raise ValueError(f"metrics has {taken.pop()!r}, by which the losses are logged: give it another name")
        self._losses = per_model(loss)
        self._metrics = {name: per_model(metric) for name, metric in (metrics or {}).items()}
        self._optimizer, self._scheduler = optimizer, scheduler
        self._interval, self._monitor = scheduler_interval, monitor
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._accumulate, self._own_batches = accumulate, own_batches

    def __len__(self) -> int:
        return len(self.fused)

    @property
    def members(self) -> list[nn.Module]:
        """The members as models of their own class, with copies of the tensors."""
        return self.fused.unfuse()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the members' outputs for inputs that all of them share; each tensor is ``[B, ...]``."""
        return self.fused(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the scheduler if there is one, as Lightning expects. Its checkpoints hold both."""
        optimizer = self._optimizer([parameter for parameter in self.fused.parameters() if parameter.requires_grad])
        if not isinstance(optimizer, FusedOptimizer):
            raise ValueError(f"optimizer gave {type(optimizer).__name__}, one for all members: give one of hf.optim")
        if self._scheduler is None:
            return optimizer
        scheduler = self._scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau) and not isinstance(scheduler, PerMember):
            raise ValueError(
                "torch's ReduceLROnPlateau watches one value for all members. Give that of hf.optim.lr_scheduler."
            )
        return [optimizer], [scheduler]

    def configure_callbacks(self) -> Any:
        """Raise ValueError if the Trainer clips or accumulates gradients, or has a callback for one model."""
        run = self.trainer
        if run.gradient_clip_val is not None:
            raise ValueError(
                f"Trainer(gradient_clip_val={run.gradient_clip_val!r}) would clip all members by one norm: leave it "
                "out, and give LightningArray clip_norm= or clip_value=, one limit or one per member"
            )
        if run.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={run.accumulate_grad_batches!r}) is for automatic optimization: "
                "leave it out, and give LightningArray accumulate="
            )
        if any(isinstance(callback, LearningRateMonitor) for callback in run.callbacks):
            raise ValueError(
                "LearningRateMonitor logs one rate for all members. Leave it out: LightningArray logs the rate of each "
                "member as lr/<name>."
            )
        if any(isinstance(callback, StochasticWeightAveraging) for callback in run.callbacks):
            raise ValueError(
                "StochasticWeightAveraging needs automatic optimization for its learning rates and BatchNorm. Leave it "
                "out: torch.optim.swa_utils.AveragedModel takes module.fused, and SWALR is a scheduler."
            )
        return []

    def on_fit_start(self) -> None:
        """Raise FusionError if the array clips gradients that the Trainer's precision plugin scales."""
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None and (
            self._clip_norm is not None or self._clip_value is not None
        ):
            raise FusionError(
                'clip_norm and clip_value would limit gradients that precision="16-mixed" has scaled; take '
                'precision="bf16-mixed", or write the loop with hf.optim.GradScaler'
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run forward and backward, and update all members every ``accumulate`` batches. Return the losses ``[B]``."""
        optimizer: Any = self.optimizers()
        last = (batch_idx + 1) % self._accumulate == 0 or self.trainer.is_last_batch
        if batch_idx % self._accumulate == 0:
            optimizer.zero_grad()
        inputs, target = self._arguments(batch)
        losses = self._losses(self._outputs(inputs), target)
        check_losses(losses, len(self))
        self.manual_backward(losses.sum() / self._accumulate)
        if last:
            params = [parameter for parameter in self.fused.parameters() if parameter.grad is not None]
            for limit, clip in ((self._clip_value, clip_grad_value_), (self._clip_norm, clip_grad_norm_)):
                if limit is not None:
                    clip(params, limit)
            optimizer.step()
        samples = _samples(batch, self._own_batches)
        self._log("train_loss", losses.detach(), samples)
        for index, group in enumerate(optimizer.param_groups):
            name = f"lr{index}" if index else "lr"
            rates = zip(self.tags, group["lr"].tolist(), strict=True)
            self.log_dict({f"{name}/{tag}": rate for tag, rate in rates}, batch_size=samples)
        if last and self._interval == "step":
            self._step_scheduler()
        member_losses: Tensor = losses.detach()
        return member_losses

    def on_train_epoch_end(self) -> None:
        """Step the scheduler, if its interval is the epoch."""
        if self._interval == "epoch":
            self._step_scheduler()

    def _step_scheduler(self) -> None:
        """Step the scheduler. Raises ValueError if it watches a value that was not logged for each member."""
        if self._scheduler is None:
            return
        scheduler: Any = self.lr_schedulers()
        if not (isinstance(scheduler, PerMember) and any(scheduler.takes_metrics)):
            scheduler.step()
            return
        logged = self.trainer.callback_metrics
        names = [f"{self._monitor}/{tag}" for tag in self.tags]
        if any(name not in logged for name in names):
            end = f"/{self.tags[0]}"
            raise ValueError(
                f"the scheduler watches monitor={self._monitor!r}, which was not logged for each member. These were: "
                f"{sorted(name.removesuffix(end) for name in logged if name.endswith(end))}."
            )
        scheduler.step(metrics=[float(logged[name]) for name in names])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log every member's loss and metrics."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log every member's loss and metrics, as `validation_step` does."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the members' outputs ``[B, ...]``. A batch is inputs, or a pair of inputs and target."""
        return self._outputs(batch[0] if _is_pair(batch) else batch)

    def _evaluate(self, stage: str, batch: Any) -> None:
        inputs, target = self._arguments(batch)
        output, samples = self._outputs(inputs), _samples(batch, self._own_batches)
        for name, function in {"loss": self._losses, **self._metrics}.items():
            values = function(output, target)
            if not isinstance(values, Tensor) or values.dim() != 1:
                of_members = values if isinstance(values, Tensor) else values_of(values, len(self))
                values = torch.tensor([number(value, f"{stage}_{name}") for value in of_members])
            self._log(f"{stage}_{name}", values, samples)

    def _arguments(self, batch: Any) -> tuple[Any, Any]:
        if not _is_pair(batch):
            raise ValueError(
                f"a batch must be (inputs, target), got {type(batch).__name__}. Override the steps for others."
            )
        return batch[0], self._stacked_if_own(batch[1])

    def _stacked_if_own(self, value: Any) -> Any:
        if not self._own_batches:
            return value
        # A mapping that torch's pytree does not know, such as those of transformers, would be one leaf.
        nest = dict(value) if isinstance(value, Mapping) else value
        return pytree.tree_map(lambda leaf: stacked(leaf) if isinstance(leaf, Tensor) else leaf, nest)

    def _outputs(self, inputs: Any) -> Any:
        own = self._stacked_if_own(inputs)
        return self.fused(**own) if isinstance(own, Mapping) else self.fused(own)

    def _log(self, name: str, values: Tensor, samples: int) -> None:
        """Log the mean over the members, for callbacks, and the value of each member."""
        values = values.detach()
        member_values = {f"{name}/{member}": value for member, value in zip(self.tags, values.unbind(), strict=True)}
        self.log(name, values.mean(), prog_bar=True, batch_size=samples)
        if name.endswith("loss"):
            self.log(f"{name}_best", values.min(), batch_size=samples)
        self.log_dict(member_values, batch_size=samples)


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and len(batch) == 2


def _samples(batch: Any, per_member: bool) -> int:
    """Return the number of samples that each member gets in a batch; 1 if it cannot be determined."""
    tensor = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    sample_dim = 1 if per_member else 0
    return 1 if tensor is None or tensor.dim() <= sample_dim else tensor.shape[sample_dim]
