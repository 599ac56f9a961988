"""Sinks of hf.MemberLogger: a run for each member in Weights & Biases, or in MLflow. Copy what you need.

    python examples/member_sinks.py --mlflow sweep
    python examples/member_sinks.py --wandb sweep

Any other service is as short: ``write`` gets a member's numbers of a step, and ``close`` ends its runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf


class Wandb:
    """A run for each member of the service Weights & Biases. Needs the package wandb; ``options`` go to its init.

    With ``id``, the id of each member's run is made of it and the member's name, and an existing run is resumed.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise ValueError(f'Wandb({options!r}): give options of wandb.init, such as {{"project": "sweep"}}')
        for name, remedy in (("name", 'members have their own; give "group"'), ("reinit", "it is create_new")):
            if name in options:
                raise ValueError(f"Wandb({{{name!r}: {options[name]!r}}}): leave it out, {remedy}")
        self._init: Any = import_module("wandb").init
        self._id, self._options = options.get("id"), {key: value for key, value in options.items() if key != "id"}
        self._runs: dict[str, Any] = {}

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._runs:
            options = self._options
            if self._id is not None:
                run_id = f"{self._id}-{blake2b(member.encode(), digest_size=6).hexdigest()}"
                options = {"id": run_id, "resume": "allow", **options}
            # Several runs at a time in one process.
            self._runs[member] = self._init(name=member, reinit="create_new", **options)
        self._runs[member].log(dict(values), step=step)

    def close(self, error: BaseException | None) -> None:
        for run in self._runs.values():
            run.finish(exit_code=0 if error is None else 1)


class Mlflow:
    """A run for each member of an experiment of MLflow. Needs the package mlflow.

    If a run is active in this experiment, they are its children; if it is resumed, so are its children.
    """

    def __init__(self, experiment: str) -> None:
        mlflow = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        record = self._client.get_experiment_by_name(experiment)
        self._experiment = record.experiment_id if record is not None else self._client.create_experiment(experiment)
        active = mlflow.active_run()
        inside = active is not None and active.info.experiment_id == self._experiment
        self._parent: dict[str, str] = {"mlflow.parentRunId": active.info.run_id} if inside else {}
        self._runs = self._children()
        self._running_members: set[str] = set()

    def _children(self) -> dict[str, str]:
        """Return the ids of the active run's children, by name."""
        run_ids: dict[str, str] = {}
        for key, parent in self._parent.items():
            token: Any = None
            while token != "":
                page = self._client.search_runs([self._experiment], f"tags.`{key}` = '{parent}'", page_token=token)
                run_ids |= {run.info.run_name: run.info.run_id for run in page}
                token = page.token or ""
        return run_ids

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._runs:
            self._runs[member] = self._client.create_run(
                self._experiment, run_name=member, tags=self._parent
            ).info.run_id
        elif member not in self._running_members:
            self._client.update_run(self._runs[member], status="RUNNING")
        self._running_members.add(member)
        timestamp = time.time_ns() // 1_000_000
        metrics = [self._entities.Metric(name, value, timestamp, step) for name, value in values.items()]
        self._client.log_batch(self._runs[member], metrics=metrics)

    def close(self, error: BaseException | None) -> None:
        killed = isinstance(error, KeyboardInterrupt)
        status = "FINISHED" if error is None else "KILLED" if killed else "FAILED"
        for member in self._running_members:
            self._client.set_terminated(self._runs[member], status)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wandb", metavar="PROJECT")
    parser.add_argument("--mlflow", metavar="EXPERIMENT")
    options = parser.parse_args(arguments)
    sinks: list[Any] = [Wandb({"project": options.wandb})] if options.wandb else []
    sinks += [Mlflow(options.mlflow)] if options.mlflow else []
    rates = [1e-3, 3e-3, 1e-2]
    pop = hf.Population(
        [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in rates],
        optimizer=lambda params: hf.optim.AdamW(params, lr=rates),
        loss=F.cross_entropy,
        tags=[f"lr {rate}" for rate in rates],
    )
    x = torch.randn(256, 8)
    target = (x[:, 0] > x[:, 1]).long()
    with hf.MemberLogger(sinks=sinks) as logger:
        for step in range(100):
            losses = pop.step(x, target)
            logger.log(pop, step, loss=losses)
            if step % 10 == 9:
                best, worst = (pop.tags[row] for row in (losses.argmin(), losses.argmax()))
                print(f"step {step + 1}: best {best} {losses.min():.4g}, worst {worst} {losses.max():.4g}")


if __name__ == "__main__":
    main()
