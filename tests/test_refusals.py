"""What is refused: a line of code, the class of the error, and words of it. What the line names stays as it was.

A line may name anything in this file, and the fixtures of `FIXTURES`, each of which is made for the line.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler as ls
from torch.utils.data import DataLoader, IterableDataset

import hfusion as hf
from hfusion.core.calls import Ragged
from hfusion.core.membership import Membership, mark
from hfusion.core.step_arguments import check_losses
from hfusion.device.calibrate import ComputeRates, Rates
from tests.alone import normal
from tests.optim.arrays import Array

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def changed(change: Callable[[nn.Sequential], Any]) -> list[nn.Module]:
    """Return two models, of which ``change`` has changed the second."""
    models = [mlp(), mlp()]
    change(models[1])
    return [*models]


def holding(**attributes: Any) -> nn.Module:
    module = mlp()
    vars(module).update(attributes)
    return module


def partly_shared(one: int = 0, other: int = 1) -> list[nn.Module]:
    models = [mlp() for _ in range(3)]
    models[other][0] = models[one][0]
    return [*models]


def two_layers(tied: bool = False, memory: nn.Module | None = None) -> nn.Sequential:
    """Return two layers of one weight if ``tied``, and with the memory of another module's weight."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if tied:
        layers[1].weight = layers[0].weight
    if memory is not None:
        layers[1].weight.data = memory.weight.data
    return layers


def overlapping() -> nn.Sequential:
    layers = two_layers()
    layers[1].weight.data = layers[0].weight.data
    return layers


def hook(*args: Any) -> None:
    return None


def tied(fused: Any) -> None:
    fused.get_submodule("1").weight = fused.get_submodule("0").weight


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, **options)


def shared(members: int) -> Parameter:
    return mark(Parameter(torch.zeros(2)), Membership("base.weight", members, False))


def population(**options: Any) -> hf.Population:
    def adamw(params: Any) -> Any:
        return hf.optim.AdamW(params, lr=0.1)

    defaults: dict[str, Any] = {"optimizer": adamw, "loss": F.cross_entropy, "compile": False}
    return hf.Population([mlp() for _ in range(3)], **{**defaults, **options})


def unlike() -> hf.Population:
    return hf.Population([mlp(), nn.Linear(4, 4)], optimizer=hf.optim.SGD, loss=F.mse_loss)


def left(pop: hf.Population) -> hf.Population:
    """Return a population after its member 1 has left."""
    pop.stop(1)
    return pop


def stepped(loss: Any = F.cross_entropy, **options: Any) -> Any:
    fused = hf.fuse([mlp() for _ in range(3)])
    return hf.train_step(fused, loss, hf.optim.SGD(fused.parameters()), **options)


def task(name: Any = "mine", **values: Any) -> hf.Task:
    defaults = {"models": [mlp()], "loss": F.cross_entropy, "optimizer": hf.optim.SGD, "loader": LOADER}
    return hf.Task(**{**defaults, **values}, name=name)


def swept(**values: Any) -> Any:
    functions = {"make_model": mlp, "space": lambda trial: {}, "loss": F.cross_entropy, "loader": LOADER}
    return hf.sweep(**{**functions, "trials": 2, "epochs": 1, **values})


def common_layer() -> list[nn.Module]:
    layer = nn.Linear(4, 4)
    return [nn.Sequential(nn.Linear(4, 4), layer) for _ in range(2)]


def cosine(optimizer: Any, epochs: int) -> Any:
    return ls.CosineAnnealingLR(optimizer, epochs)


def epochs(trial: Any) -> dict[str, int]:
    return {"epochs": 2}


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.ones(1)])


def drawing() -> Any:
    loader: Any = DataLoader([(torch.ones(4), 0), (torch.ones(4), 1)], batch_size=2)
    loader.numbers = np.random.default_rng(0)
    return loader


class Once(list[Any]):
    """Can be read once."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise AssertionError("read")


class Lying:
    """Says that it has minibatches, and gives none."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(())


def on_meta() -> nn.Module:
    return normed().to("meta")


def buffer_on_meta() -> nn.Module:
    model = normed()
    model[1].running_mean = torch.empty(4, device="meta")
    return model


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def two_groups() -> hf.Population:
    return hf.Population([mlp(), two_layers()], optimizer=hf.optim.SGD, loss=F.cross_entropy, compile=False)


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]


class NoForward(nn.Module):
    pass


class Sizes(nn.Linear):
    """Its result has as many rows as there are positive values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu().nonzero()


ONE, WIDTHS = mlp(), itertools.count(2)
LOADER = [(torch.ones(2, 4), torch.tensor([0, 1]))]
MACHINE = hf.Machine([hf.Device("cpu", memory="1GiB")])
# What lines name besides what this file defines.
NAMES: dict[str, Any] = {
    "ComputeRates": ComputeRates, "DataLoader": DataLoader, "F": F, "Parameter": Parameter,
    "Ragged": Ragged, "Rates": Rates, "check_losses": check_losses, "ls": ls, "normal": normal, "np": np,
    "optim": hf.optim, "parametrizations": parametrizations,
    "per_member": hf.optim.lr_scheduler.PerMember, "prune": prune, "weakref": weakref,
}  # fmt: skip
# Made anew for each line that names them.
FIXTURES: dict[str, Callable[[], Any]] = {
    "fused": lambda: hf.fuse([mlp() for _ in range(3)]),
    "array": lambda: Array(3),
    "two": lambda: Array(2),
    "opt": lambda: hf.optim.SGD(Array(3).params, lr=[0.1, 0.2, 0.3]),
    "pop": population,
    "left": lambda: left(population()),
    "ragged": lambda: Ragged([torch.ones(3, 2), torch.ones(1, 2)]),
}

FUSE = {
    "hf.Population(common_layer(), optimizer=hf.optim.SGD, loss=F.mse_loss)": r"1\.weight is one parameter that all",
    "hf.Population([nn.Sequential(ONE, *more) for more in ([], [nn.Tanh()])], optimizer=adam, loss=F.mse_loss)": (
        r"0\.0\.weight of model 0 and 0\.0\.weight of model 1 are one tensor"
    ),
    "pop.start(None, changed(lambda m: m[0].weight.register_hook(hook))[1])": "0.weight of model 0 has a tensor hook",
    "fused.put(0, nn.Linear(4, 4))": r"\(root\) is Sequential in model 0 and Linear in model 0 that joins",
    "hf.Population(mlp(), optimizer=adam, loss=F.mse_loss)": "takes a list of models, not Sequential",
    "hf.build(mlp, seeds=3)": r"seeds is 3: give one seed per member, such as range\(3\)",
    "hf.fuse([])": "empty list; give it at least one model",
    "hf.fuse(mlp())": "takes a list of modules, not Sequential",
    "hf.fuse([mlp(), 3])": "model 1 is int",
    "hf.fuse([ONE, mlp(), ONE])": r"models 0 and 2 are one object.*deepcopy",
    "hf.fuse([nn.Linear(4, 4), nn.Linear(4, 5)])": r"weight has shape \(4, 4\) in model 0 and \(5, 4\) in model 1",
    "hf.fuse([mlp(), nn.Sequential(nn.Linear(4, 3), nn.Tanh())])": "module 1 is ReLU in model 0 and Tanh in model 1",
    "hf.fuse([mlp(), nn.Sequential(nn.Linear(4, 2))])": "model 1 has no module 1",
    "hf.fuse([nn.Linear(4, 4), nn.Linear(4, 3, bias=False)])": "model 0 has a tensor bias that model 1 lacks",
    "hf.fuse(changed(lambda m: m.double()))": "0.weight has dtype torch.float32 in model 0 and torch.float64",
    "hf.fuse(changed(lambda m: m.to('meta')))": "model 1: 0.weight is on the meta device",
    "hf.fuse(changed(lambda m: m.eval()))": r"\(root\) is in train mode in model 0 and in eval mode in model 1",
    "hf.fuse(changed(lambda m: m[0].bias.requires_grad_(False)))": "0.bias has requires_grad True in",
    "hf.fuse(changed(lambda m: setattr(m, 'twin', m[0])))": "model 1 has a module twin",
    "hf.fuse([two_layers(), two_layers(tied=True)])": "model 0 and model 1 tie different tensors",
    "hf.fuse([two_layers(memory=ONE[0]), two_layers(memory=ONE[0])])": "1.weight of model 0 and 1.weight of model 1",
    "hf.fuse([overlapping(), overlapping()])": r"model 0: 0\.weight and 1\.weight share memory",
    "hf.fuse(partly_shared())": "0.bias is one object in some models but not in all",
    "hf.build(iter(partly_shared()).__next__, seeds=[0, 1, 2])": "0.bias is one object in some models but not in all",
    "hf.fuse([nn.Sequential(ONE[0], nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), ONE[0])])": "is one object in",
    "hf.fuse([nn.LazyLinear(3)])": "weight of a lazy module is not initialized; call each model once",
    "hf.fuse([Listing()])": r"layers.0 holds .*Linear,? that is not registered.*nn.ModuleList",
    "hf.fuse([holding(scale=torch.ones(4, requires_grad=True))])": "scale is a tensor that requires grad but no param",
    "hf.fuse([holding(ref=weakref.ref(ONE))])": "attribute ref is a weak reference to .*Sequential",
    "hf.fuse([nn.DataParallel(mlp())])": "DataParallel.* module inside",
    "hf.fuse(changed(lambda m: m[1].register_forward_hook(hook)))": r"model 1, module 1 \(ReLU\) has a hook",
    "hf.fuse(changed(lambda m: m.register_forward_pre_hook(hook)))": r"\(root\).* has a hook in _forward_pre",
    "hf.fuse(changed(lambda m: m[0].register_full_backward_pre_hook(hook)))": "hook in _backward_pre_hooks",
    "hf.fuse([prune.l1_unstructured(nn.utils.weight_norm(nn.Linear(3, 3)), 'weight_v', 1)])": "a hook reads weight_v b",
    "hf.fuse(changed(lambda m: m[0].weight.register_hook(hook)))": "0.weight has a tensor hook",
    "hf.fuse(changed(lambda m: m[0].weight.register_post_accumulate_grad_hook(hook)))": "0.weight has a tensor hook",
    "hf.fuse([Sizes(4, 4), Sizes(4, 4)])(torch.ones(2, 4))": "shapes that depend on values .* use a form of fixed size",
    "hf.fuse([NoForward()])(torch.ones(2, 4))": r"NoForward defines no forward.*fused\.method",
    "hf.fuse([mlp()]).to('meta')(torch.ones(2, 4, device='meta'))": "meta device, without values: .* to_empty",
    "hf.fuse([mlp()]).to('meta')[0]": "meta device, without values: .* to_empty",
    "hf.build(mlp, [])": "no seeds",
    "hf.build(lambda: 3, [0])": "gave int",
    "hf.build(lambda: ONE, [0, 1])": "one object for seeds 0 and 1",
    "hf.build(lambda: nn.Linear(4, next(WIDTHS)), [0, 1])": r"weight has shape \(2, 4\)",
    "fused.append([])": "append takes a list of one model or more",
    "fused.append(['x'])": "got str",
    "fused.append([nn.Linear(4, 4)])": "is Sequential in model 0",
    "fused.append(partly_shared()[:2])": "is one object in",
    "setattr(fused, '0', nn.Linear(4, 4))": "setting 0 on a fused Sequential",
    "setattr(hf.fuse([nn.Sequential(nn.Dropout())]).get_submodule('0'), 'p', 0.0)": "setting p on a fused Drop",
    "setattr(fused, 'extra', nn.Linear(2, 2))": "extra, added to a fused Sequential, would have no effect",
    "setattr(fused.get_submodule('0'), 'bias', None)": r"bias of a fused Linear is of shape .*become No",
    "setattr(fused.get_submodule('0'), 'bias', Parameter(torch.ones(4)))": r"cannot become of shape \(4,\)",
    "setattr(fused.get_submodule('0'), 'bias', Parameter(torch.ones(3, 4).double()))": "become torch.float64 by itself",
    "tied(hf.fuse([nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]))": "one tensor with 0.weight",
    "fused.get_submodule('0').register_parameter('more', Parameter(torch.ones(2)))": "fused Linear.*fuse them again",
    "delattr(fused.get_submodule('0'), 'weight')": "fused Linear.*fuse them again",
    "parametrizations.weight_norm(fused.get_submodule('0'))": "fused Linear.*fuse them again",
    "prune.l1_unstructured(fused.get_submodule('0'), 'weight', amount=0.5)": "fused Linear.*fuse them again",
    "optim.fuse([adam(two.members[0])], two)": "1 optimizers for an array of 2 members",
    "optim.fuse([adam(two.members[0]), torch.optim.SGD(two.members[1])], two)": "the optimizer is 'SGD' for member 1",
    "optim.fuse([torch.optim.Rprop(p) for p in two.members], two)": "optimizer 0 is Rprop; supported are torch.optim.A",
    "optim.fuse([adam(two.members[0]), adam(two.members[0])], two)": r"parameter 0 \(shape \[4, 3\]\) in group 0 of op",
    "optim.fuse([adam(two.members[0]), adam([Parameter(torch.zeros(1))])], two)": "is no original parameter of this ar",
    "optim.fuse([adam(two.members[0]), adam(two.members[1][:3])], two)": r"\['p0', 'p1', 'p2'\] for member 1 an",
    "optim.fuse([adam(two.members[0]), adam(two.members[1][::-1])], two)": r"\['p4', .*\] for member 1 and",
    "optim.fuse([adam(two.members[0]), adam([{'params': [p]} for p in two.members[1]])], two)": "groups is 5 for memb",
    "optim.fuse([adam(two.members[0]), adam(two.members[1], amsgrad=True)], two)": "option 'amsgrad' of group 0 is Tru",
    "optim.fuse([adam(p, differentiable=True) for p in two.members], two)": "optimizer 0 has differentiable=True",
    "optim.fuse(['a'], two)": "optimizer 0 .* str",
    "optim.fuse([torch.optim.Adam] * 2, two)": "optimizer 0 .*the class Adam",
    "optim.fuse(adam(two.members[0]), two)": "expects a list of .* got Adam",
    "optim.fuse([], nn.Linear(1, 1))": "Linear for the array.*what hf.fuse",
    "optim.fuse(two, [adam(two.members[0])])": "got (a )?list for the array",
    "optim.fuse([], two, into='Adam')": "into='Adam': give a class of hf.optim",
    "hf.optim.groups(nn.Linear(2, 2), lambda name, p: {})": "hf.optim.groups expects what hf.fuse",
    "hf.optim.groups(nn.Linear(2, 2).parameters(), lambda name, p: {})": "hf.optim.groups got a parameter",
    "float(opt.param_groups[0]['lr'])": r"one value for each of 3 members.*value\.tolist\(\)",
    "ls.StepLR(opt, 1).optimizer.copy(0, 2)": r"base rates \[0\.1, 0\.2, 0\.3\] by row.*PerMember",
    "ls.StepLR(opt, 1).optimizer.keep([1, 0])": r"base rates \[0\.1, 0\.2, 0\.3\] by row.*PerMember",
    "hf.Population([mlp()], optimizer=hf.optim.SGD, loss=F.mse_loss).fused.call('to', torch.ones(2, 4))": "no method t",
}

META = {
    line.replace("on_meta", make): r"\d\.\w+ is on the meta device and has no values\. .*assign=True.*to_empty"
    for make in ("on_meta", "buffer_on_meta")
    for line in (
        "hf.fuse([normed(), on_meta()])",
        "hf.fuse([normed()]).put(0, on_meta())",
        "hf.Population([on_meta(), mlp()], optimizer=hf.optim.SGD, loss=F.mse_loss)",
        "hf.Population([normed()], optimizer=hf.optim.SGD, loss=F.mse_loss).start(None, on_meta())",
        "hf.train(task(models=[normed(), on_meta()]))",
        "swept(make_model=on_meta)",
        "hf.each(lambda params, grads: None)(on_meta())",
    )
}

VALUES = {
    "hf.fuse([mlp()], verify='no')": "verify must be True or False, got 'no'",
    "unlike().hparams['lr'].__setitem__(0, 'a')": "lr='a' is not a number",
    "hf.build(mlp, [0, 1.5])": "seeds has 1.5: give whole numbers",
    "fused()": r"Sequential.forward\(input.*forward\(\): missing a required argument: 'input'",
    "fused(1, 2)": r"forward\(\.\.\., \.\.\.\): too many positional",
    "fused(hf.stacked(normal(2, 4, 4)))": "leading size 2 .* array has 3 members",
    "fused(object())": "give tensors|must be tensors",
    "hf.stacked(3)": "hf.stacked got int",
    "hf.stacked([])": "hf.stacked got an empty list",
    "hf.stacked([normal(2, 2), normal(2)])": "numbers of dims|only sizes may differ",
    "hf.stacked([{'a': 1}, {'a': 2}])": "only tensors may differ between members",
    "hf.each(lambda p, g: p['0.weight'].unsqueeze_(0).dim() > 3 or None)(fused)": "changes the shape of a tensor",
    "hf.stacked([{'a': normal(2)}, normal(2)])": "different structures",
    "Ragged([])": "one tensor per member",
    "check_losses(torch.tensor(1.0))": "let a parameter require a gradient",
    "hf.per_model(lambda *args: args)(3)": "holds no tensor",
    "hf.per_model(lambda *args: args)(torch.tensor(1.0))": "without dims",
    "hf.per_model(lambda *args: args)(torch.ones(3, 5), hf.stacked(torch.ones(2, 5)))": "leading size 2",
    "fused.keep([])": "keep got no rows",
    "fused.keep([0, 1, 0])": "row 0 comes 2 times",
    "fused.keep([0, 3])": "3 is no row of an array of 3 members",
    "fused.keep([True])": "True is no row",
    "fused.copy([0, 1], [2])": "copy of 2 members over 1",
    "fused.put([0, 1], [mlp()])": "put of 1 models into 2 rows",
    "optim.clip_grad_norm_(array.params, [1.0, 2.0])": "max_norm has 2 values for an array of 3 members",
    "optim.clip_grad_norm_(array.params, [1.0, -2.0, 1.0])": "every value must be at least 0",
    "optim.clip_grad_norm_([Parameter(torch.zeros(2))], 1.0)": r"parameter 0 \(shape \[2\]\) belongs to no fused modul",
    "optim.clip_grad_norm_([], 1.0)": "no parameters were given",
    "optim.SGD([array.params[0], Parameter(torch.zeros(2, 3))])": r"parameter 1 \(shape \[2, 3\]\) belongs to no fused",
    "optim.SGD([array.params[0], two.params[0]])": r"parameter 1 \('p0'\) belongs to an array of 2 members, those befo",
    "optim.SGD(array.params).add_param_group({'params': two.params})": "belongs to an array of 2 members, the first gr",
    "optim.Adam([shared(2)], lr=[0.1, 0.2])": r"'base.weight' is one tensor for all 2 members, and lr differs .*\[0.1,",
    "optim.AdamW(fused.parameters(), master_weights=1)": "master_weights is 1: give True or False",
    "optim.SGD(array.params, momentum=0.9, nesterov=[True, False, True])": "nesterov is .*one for all members of a par",
    "optim.Adam([{'params': fused.parameters(), 'decoupled_weight_decay': True}])": "=True of .*: take AdamW",
    "optim.AdamW([{'params': fused.parameters(), 'decoupled_weight_decay': False}])": "=False of .*: take Adam",
    "hf.Ensemble(fused, softmax=-3)(torch.ones(2, 4))": r"softmax=-3 for members' outputs \[2, 4\]: give one of their",
    "per_member(opt, ls.ExponentialLR, gamma=0.5).step(rows=[0, 0])": "row 0 comes 2 times",
    "optim.Muon(fused.parameters())": r"parameter '0.bias' is float32 \[4\] in each member: Muon trains matrices",
    "hf.train_step(fused, F.cross_entropy, opt)": "5 parameters of the SGD belong to no member of the fused Sequential",
    "hf.gather_rows(torch.tensor(1.0))": "without dims",
    "hf.rows(3, 0, 4)": "3 members for 4 ranks: 1 would have none; start at most 3 processes",
    "hf.rows(4, 2, 2)": "rank=2 of world=2: ranks are 0 to 1",
    "hf.rows(4, 1)": "give rank and world both, or neither",
    "optim.GradScaler(growth_factor=[2.0, 0.5])": r"growth_factor=\[2\.0, 0\.5\]: it must be above 1",
    "optim.GradScaler(backoff_factor=3.0)": r"backoff_factor=3\.0: it must be above 0 and below 1",
    "optim.GradScaler().scale(torch.tensor(1.0))": r"losses of all members.*scaler\.scale\(losses\)\.sum\(\)",
    "list(hf.zip_loaders([LOADER], epochs=[1, 2]))": "epochs has 2 values for 1 loaders",
    "list(hf.zip_loaders([LOADER], epochs=-1))": "epochs=-1",
    "list(hf.zip_loaders([LOADER, 3]))": "the loader of row 1 is 3: give minibatches",
    "list(hf.zip_loaders([[]]))": "the loader of row 0 gave no batch in epoch 0",
    "list(hf.zip_loaders([iter(LOADER)], epochs=2))": "gave no batch in epoch 1",
    "list(hf.zip_loaders([[torch.zeros(2)]], rows=[3]))": "got Tensor from the loader of row 3",
    "pop.evaluate(F.cross_entropy, [(*LOADER[0], 1)])": "tuple of 3",
    "pop.evaluate(lambda y, t: {'loss': 1.0}, LOADER)": "the metric .*dict",
    "pop.evaluate(lambda y, t: torch.tensor(1j), LOADER)": r"the metric .*tensor of torch.complex64 of shape \[\]",
    "pop.evaluate(3, LOADER)": "the metric must be a function of a member's outputs and targets, got int",
    "pop.start(None, mlp(), accumulate=[1, 2])": "accumulate has 2 values for 1 members that join",
    "pop.hparams.__setitem__('lr', [1, 2])": "lr has 2 values for an array of 3 members: give one value, or 3",
    "pop.hparams.__setitem__('lr', [0.1, -1.0, 0.1])": r"lr of member 1 is -1\.0: it must be finite and at least 0",
    "pop.hparams.__setitem__('betas', 0.5)": r"betas=0\.5 is not a pair",
    "pop.hparams.__setitem__('betas', (0.5, 1.5))": r"betas\[1\] of member 0 is 1\.5",
    "pop.start(0, mlp())": "row 0 is taken by 'member 0': stop it first",
    "pop.start(None, mlp(), tag='member 2')": "is the name of the member in row 2",
    "pop.start(None, mlp(), tag='\\ud800')": "letters that no file can hold",
    "pop.start(None, mlp(), tag=3)": "tag must be one str, or one for each row, got 3",
    "pop.start(None, None)": "model must be one Module, or one for each row, got None",
    "pop.start(None, mlp(), lr=-1.0)": "is -1.0: it must be finite and at least 0",
    "pop.start(None, mlp(), accumulate=0)": "accumulate=0: at least one call",
    "pop.start(None, mlp(), clip_norm=1.0)": "this population has no clip_norm",
    "pop.start(None, mlp(), scheduler=lambda o: ls.LinearLR(o))": "this population has none",
    "left.copy(1, 0)": "row 1 is free",
    "pop.step(*LOADER[0], weights='a')": r"weights='a': give \[N\] numbers",
    "pop.step(*LOADER[0], rows=[])": "is empty",
    "pop.step(hf.stacked(torch.ones(3, 2, 4)), LOADER[0][1], rows=[0, 1])": r"3 entries for rows=\[0, 1\]",
    "pop.step(*LOADER[0], weights=torch.tensor([1.0, -1.0]))": "at least 0",
    "pop.step(*LOADER[0], weights=torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))": "member 1 are 0 for all",
    "pop.step(*LOADER[0], weights=torch.ones(2, 2))": "2 rows for 3 members",
    "pop.step(*LOADER[0], weights=torch.ones(3))": "3 weights for losses of shape",
    "stepped(lambda y, t: F.cross_entropy(y, t, reduction='none'))(*LOADER[0])": r"it gave .*2\]\. Take its mean\.",
    "stepped(lambda y, t: F.cross_entropy(y, t).item())(*LOADER[0])": "it gave float. Return a tensor",
    "stepped(lambda y, t: F.cross_entropy(y.detach(), t))(*LOADER[0])": "without detach",
    "stepped(lambda y, t: (y.argmax(-1) == t).sum())(*LOADER[0])": "of dtype torch.int64, have no grad",
    "stepped(hf.per_model(F.cross_entropy))": r"is per_model\(cross_entropy\), but .* without hf.per_model",
    "population(loss=lambda y, t: y.sum()).step(*LOADER[0], weights=torch.ones(2))": "takes reduction=",
    "population(loss=nn.CTCLoss()).step(*LOADER[0], weights=torch.ones(2))": "ctc_loss",
    "pop.grow(0)": "grow by 0",
    "pop.best.update([1.0])": "metrics has 1 values for 3 rows",
    "pop.best.update([1.0] * 3, mode='least')": "mode='least'",
    "left.best[1]": "row 1 is free",
    "hf.Patience(-1)": "patience=-1",
    "hf.Patience(1, least=NAN)": "least=nan",
    "population(on_nonfinite='stop')": 'it is "freeze", "raise" or "ignore"',
    "population(processes=1.5)": "processes=",
    "population(scaler=torch.amp.GradScaler('cpu'))": r"scaler is of torch\.amp.*give one of hf\.optim",
    "hf.train_step(fused, F.mse_loss, None)": r"optimizer is None: give an optimizer that is made of fused\.parameters",
    "population(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))": "gave SGD, whose state has no rows",
    "population(optimizer=torch.optim.SGD([torch.zeros(1)]))": "must be a function that makes one .*, got SGD",
    "population(loss='mse')": "the loss must be a function, .* got str",
    "population(tags=['a'])": "1 tags for 3 models",
    "population(tags=['a', 'a', 'b'])": "every member has a name of its own",
    "population(clip_norm=-1.0)": "every limit must be at least 0",
    "hf.Ensemble(fused, [1.0])": r"weights \[1.0\] of 3 members",
    "hf.select(fused, LOADER, 1, mode='least')": 'mode=\'least\': it is "min" or "max"',
    "hf.each(3)": r"hf.each expects a function fn\(params, grads\), got int",
    "hf.each(lambda p, g: None)(fused, hf.stacked(torch.ones(2)))": "hf.stacked of 2 values for 3 members: give one fo",
    "hf.each(lambda p, g: None)(mlp(), hf.stacked(torch.ones(1)))": "got hf.stacked for Sequential, which is one model",
    "hf.each(lambda p, g, x: None)(fused, hf.stacked([normal(1), normal(2), normal(1)]))": "rows of different sizes",
    "hf.each(lambda p, g: None)(3)": "got int: give what hf.fuse or hf.build gave",
    "hf.each(lambda p, g: None)(mlp(), rows=[0])": "rows=.* is for arrays, got Sequential, which is one model",
    "hf.select(fused, LOADER, 0)": "size=0: at least one member",
    "hf.select(fused, [], 1)": "the loader gave no batch",
    "hf.select(fused, LOADER, 1, mode='max')": "without a score",
    "hf.select(fused, [(LOADER[0][0], hf.stacked(torch.zeros(3, 2)))], 1)": "each member its own target",
    "hf.select(fused, [(LOADER[0][0], torch.zeros(2))], 1)": r"\[2, 4\] for targets \[2\]",
    "hf.select(fused, LOADER, 1, lambda p, y: p)": "the score must give a number for .* got tensor of torch.float32",
    "hf.select(fused, LOADER, 1, lambda p, y: NAN)": "there is no member to choose",
    "stepped(parts=0)": "parts is 0",
    "stepped(compile='later')": "compile is 'later'. Give None to compile where that pays",
    "stepped(loss=lambda y, t: y.mean(1), compile=False)(LOADER[0][0], LOADER[0][1])": r"3 members, it gave \[B, ...\]",
    "pop.average([])": "average of no rows",
    "pop.average([0, 1], [1.0])": r"weights \[1.0\] for the average of rows \[0, 1\]",
    "pop.average([0, 1], [1.0, -1.0])": "at least 0",
    "pop.average(into='all', optimizer='drop')": "optimizer='drop'",
    "opt.append(0)": r"append\(\) needs at least one member, got 0",
    "opt.append(1)": "lr differs between the members",
    "opt.append(2, lr=[0.1, 0.2, 0.3])": "lr has 3 values for an array of 2 members",
    "opt.restart(0, rate=1.0)": "rate is no hyper-parameter of SGD; it has lr, ",
    "per_member(opt)": "needs a function that makes the scheduler of one member",
    "per_member(opt, [ls.ExponentialLR] * 2)": "2 functions that make schedulers for 3 members",
    "per_member(opt, [ls.ExponentialLR] * 3, gamma=0.5)": "options or a list of functions, not both: gamma",
    "per_member(opt, ls.MultiStepLR, milestones=[1, 2, 3])": "milestones is a list of lists",
    "per_member(opt, lambda o: ls.OneCycleLR(o, [0.1, 0.2], 9))": "scheduler of member 0 cannot be made",
    "per_member(opt, ls.ReduceLROnPlateau).step()": "member 0 has a ReduceLROnPlateau: give step metrics",
    "optim.lr_scheduler.ReduceLROnPlateau(opt).step(1.0)": r"metrics have shape \[\] for an array of 3 members",
    "optim.lr_scheduler.ReduceLROnPlateau(opt, factor=[0.1, 0.2])": "factor has 2 values for an array of 3 members",
}

PLANS = {
    "swept(loader=lambda batch_size: iter([]), space=lambda trial: {'batch_size': 20})": (
        r"loader\(batch_size=20\) gave list_iterator: return minibatches"
    ),
    "torch.autocast('cpu', torch.bfloat16)(hf.train)(task())": "autocast around hf.train does not reach",
    "hf.train(task(models=[mlp(), two_layers()], loss=lambda y, t, n=[]: (n.append(1), F.cross_entropy(y, t))[1]))": (
        "every call of the loss changes what it keeps, which 2 arrays change in turns"
    ),
    "hf.train(task(models=[mlp(), two_layers()], loader=drawing()))": "draw from one Generator",
    "hf.Cluster(MACHINE, max_failures=-1)": "max_failures=-1",
    # Of 20 weights in each of 3 members, and as many gradients.
    "stepped(memory=64, compile=False)(*LOADER[0])": r"3 members of Sequential takes .*: 480B for .* memory=64B is",
    "hf.Cluster(MACHINE, num_cpus=2)": "num_cpus is of Ray's nodes",
    "hf.Cluster(timeout=-1.0)": r"timeout=-1\.0: give seconds",
    "hf.Cluster(devices=0, num_gpus=1)": "devices=0: give a whole number",
    "hf.Cluster(devices=2)": "devices=2: also give what each device needs",
    "hf.train(task(), hf.Cluster(MACHINE), plan=hf.plan(task(), MACHINE))": "plan is for one process on an hf",
    "hf.train(task(), hf.Cluster(MACHINE), processes=2)": r"processes is for an hf\.Machine",
    "hf.train(task(), MACHINE, processes=3)": "processes=3 for 1 devices: give 1, or one per device",
    "hf.Device('cpu', memory='8 gigs')": 'is no positive number of bytes: write it as "8GiB"',
    "hf.Device('cpu', memory=0)": "0 is no positive number of bytes",
    "hf.Device(3, memory=1)": "device '3' is not known",
    "hf.Device('cpu', 'two words', memory=1)": "one word",
    "hf.Machine([])": "no device",
    "hf.Machine([hf.Device('cpu', memory=1)] * 2)": "2 devices are named 'cpu'",
    "hf.Machine([hf.Device('cpu', memory=1)], host='much')": "'much'",
    "hf.Machine('cpu')": "the devices are .*: give a list of hf.Device",
    "hf.Machine([hf.Device('cpu', memory=1)], disk=None)": "the disk is None: give a folder",
    "hf.simulate(3)": "hf.simulate expects a plan, got int. Give what hf.plan",
    "hf.simulate(hf.plan(task()), 'best')": "unknown policy 'best': choose from sharded-lrtf, patient-lrtf, fifo",
    "hf.simulate(hf.plan(task()), 'fifo', 3)": "measured must be a timeline, .* got int",
    "hf.Machine([hf.Device('cuda:99', memory=1)]).calibrate()": "there is no device cuda:99: torch sees",
    "hf.train_step(fused, F.mse_loss, optim.SGD(fused.parameters()), memory=0)": "no positive number of bytes",
    "Rates(1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)": "rate memory is 0",
    "ComputeRates(8.0, 4.0, 2.0, bfloat16=0.0)": "rate bfloat16 is 0.0: it must be a positive number",
    "task(loss=hf.per_model(F.mse_loss))": r"the loss is per_model\(mse_loss\)",
    "task(epochs=0)": "'mine' has epochs=0, accumulate=1: give whole numbers of at least 1",
    "task(seed='x')": "'mine': the seed is 'x': give a whole number of 64 bits, or None",
    "task(seed=1 << 70)": "give a whole number of 64 bits",
    "task(5)": "task 5: a name is one word",
    "task('my task')": "'my task': a name is one word without spaces",
    "task(models=[])": "'mine' has no models: give at least one",
    "task(models=None)": "models must be one module, a list of them, or a fused array, got NoneType",
    "task(models=[mlp(), nn.Linear])": "'mine': models must be .* got type",
    "task(loader=None)": "'mine': the loader of class NoneType has no length",
    "task(loader=(pair for pair in LOADER))": "the loader of class generator has no length.*a list",
    "task(loader=DataLoader(Endless()))": "DataLoader has no length, .*give a DataLoader over a dataset with a length",
    "task(loader=[])": "'mine': the loader of class list gives no minibatch",
    "task(callbacks=print)": "'mine': callbacks is <built-in function print>; give a list of functions",
    "task(optimizer=adam(mlp().parameters()))": "the optimizer is Adam; give one of hf.optim, or a function",
    "task(optimizer=None)": "'mine': the optimizer is NoneType; give one of hf.optim",
    "task(optimizer=hf.optim.SGD(fused.parameters()))": "an optimizer that exists fits an array that exists",
    "task(patience=3)": "patience is 3; give hf.Patience",
    "task(patience=hf.Patience(3))": "go by evaluations; give an eval_loader",
    "task(restore_best=True)": "go by evaluations; give an eval_loader",
    "task(compile='auto')": "'mine': compile is 'auto'",
    "task(compile=True, parts=0)": "'mine': parts is 0",
    "task(scheduler=3)": "the scheduler must be a function that makes one .*, got int",
    "task(models=fused, scheduler=[ls.ExponentialLR])": "is 1 functions for 3 members",
    "task(scheduler=ls.ExponentialLR, scheduler_interval='batch')": '\'batch\': "epoch" or "step"',
    "hf.train([])": "there is no task: give at least one hf.Task",
    "hf.train([mlp()])": "task 0 must be an hf.Task, got Sequential",
    "hf.train([task(), task()])": "two tasks are named 'mine': give each its own name",
    "hf.train([task()] * 2)": "task 'mine' is given twice",
    "hf.train(task(), 'cpu')": r"machine must be an hf.Machine, got str. Give hf.Machine.detect\(\)",
    "hf.plan(task(), hf.Device('cpu', memory='1GiB'))": "machine must be an hf.Machine, got Device",
    "hf.train(task(), plan='plan')": "plan must be what hf.plan returned, got str",
    "hf.train(task(), plan=hf.plan([task(), task('yours')]))": "the plan given has other tasks or devices",
    "hf.train(task(), plan=hf.plan(task('yours')))": "made for task 'yours' with name 'yours', and task 'mine' of this",
    "hf.train(task(), plan=hf.plan(task(epochs=2)))": "the plan was made for task 'mine' with",
    "hf.plan(task(), hf.Machine([hf.Device('cpu', memory='64B')]))": "smallest .*budget",
    "hf.train(task(loader=Once(LOADER)))": "the loader of class Once can be read only once. Give one that can be read",
    "hf.train(task(loader=Lying()))": "'mine': the loader gives no minibatch, but its length is 3: give one whose",
    "hf.train(task(loader=[LOADER[0][0]]))": "'mine': a minibatch of the loader is Tensor; it must be a pair",
    "hf.train(task(loader=[(*LOADER[0], 1)]))": r"is 3 values; .*pair \(inputs, target\), inputs",
    "hf.train(task(loss=lambda y, t: y.nothing))": r"loss failed at its first call, with ones of shape \[1, 2, 4\]",
    "hf.train(task(loss=lambda y, t: y.detach().mean()))": "have no gradient, so nothing would be trained",
    "hf.train(task(models=fused, optimizer=opt, scheduler=ls.StepLR(adam(mlp().parameters()), 1)))": "drives another",
    "hf.train(task(clip_norm=-1.0))": r"'mine': clip_norm is .*-1.0.*: every value must be at least 0",
    "hf.train(task(clip_norm=[1.0, 2.0]))": "'mine': clip_norm has 2 values for an array of 1 members",
    "hf.train(task(optimizer=lambda params: hf.optim.SGD(params, lr=[0.1, 0.2])))": "'mine': lr has 2 values for an a",
    "hf.train(task(loss=lambda y, t: F.cross_entropy(y, t, reduction='none')))": "must reduce to one number per member",
    "hf.train(task(loss=lambda y, t: (y.mean(), t)))": "have tuple; the loss must reduce to one number per member",
    "hf.train(task(models=common_layer(), clip_norm=1.0))": "clipped per member, but '1.weight' is one trained tensor",
    "hf.train(task(models=common_layer(), restore_best=True, eval_loader=LOADER))": "'1.weight' is one tensor that all",
    "hf.train(task(models=[mlp().requires_grad_(False)]))": "'mine' trains nothing: none of the 2 parameters",
    "hf.train(task(optimizer=adam))": "the function that makes its optimizer gave Adam; give one of hf.optim",
    "hf.train(task(optimizer=lambda params: hf.optim.SGD(fused.parameters())))": "parameters that are not the array's",
}

SWEEPS = {
    "swept(sampler='tpe')": "sampler='tpe': give a sampler of Optuna",
    "swept(pruner='median')": "pruner='median': give a pruner of Optuna",
    "swept(sampler=type('Random', (), {'sample_independent': len}))": "sampler=<class .*: give a sampler of Optuna",
    "swept(loader=iter(LOADER))": "loader=<list_iterator .* that can be read every epoch",
    "swept(eval_loader=(pair for pair in LOADER))": "eval_loader=<generator .* that can be read every epoch, or None",
    "swept(directory=3)": "directory=3: give the path of a folder",
    "swept(processes=-1)": "processes=-1: give a whole number of at least 0, or None",
    "swept(make_model=mlp())": "make_model is a module: give a function that makes one",
    "swept(make_model=lambda: None)": "make_model gave NoneType for trial 0: return an nn.Module",
    "swept(make_model=lambda: mlp().requires_grad_(False))": "for trial 0 without a parameter that requires grad",
    "swept(space={'lr': 0.1})": "space={'lr': 0.1}: give a function",
    "swept(optimizer='adam')": "optimizer='adam': give a function",
    "swept(machine='cpu')": "machine='cpu': give an hf.Machine",
    "swept(metric='accuracy', eval_loader=LOADER)": "metric='accuracy': give a function of outputs and targets",
    "swept(metric=lambda y, t: None, eval_loader=LOADER)": "the metric must give a number for one member, got NoneType",
    "swept(scheduler=3)": "scheduler=3: give a function",
    "swept(scheduler_interval='batch')": 'scheduler_interval=\'batch\': it is "epoch" or "step"',
    "swept(accumulate=0)": "accumulate=0: give a whole number",
    "swept(scheduler=ls.LinearLR, pbt=hf.PBT())": "pbt changes the learning rates that a scheduler would write over",
    "swept(scheduler=cosine, space=epochs)": r'scheduler\(.* and the sweep both take \'epochs\': .*"scheduler\.epochs"',
    "swept(loader=3)": "loader=3: give minibatches that can be read every epoch, or a function that makes them",
    "swept(seed='x')": "seed='x': give a whole number",
    "swept(clip_norm=[1.0, 2.0])": r"clip_norm=\[1.0, 2.0\]: give a norm above 0, or None",
    "swept(callbacks=3)": "callbacks=3: give a list of functions",
    "swept(catch=3)": "catch=3: give a class of exceptions, or a tuple of them",
    "swept(direction='minimize', directions=['minimize'])": "give one of them",
    "swept(directions=['minimize'] * 2)": "metric=None: 2 objectives need one of 2 values, such as",
    "swept(directions=['minimize'] * 2, metric=len, pbt=hf.PBT())": r"pbt=PBT\(.*it compares trials by one value of 2",
    "hf.PBT(interval=1.5)": "interval=1.5: give a whole number of epochs",
    "swept(study='never', optimizer=adam)": "optimizer gave Adam: give a class of hf.optim, or a function",
}

TYPES = {
    "stepped().__reduce__()": "a train_step cannot be copied or pickled: make another",
    "swept(scheduler=lambda o: None)": "gave NoneType: let it give",
    "ragged[0, 1]": "give a member first",
    "ragged + 1": "unsupported operand",
    "ragged < 1": "not supported",
    "ragged == torch.ones(2)": "per_model",
    "torch.relu(ragged)": "per_model",
    "float(ragged)": "must be a",
    "optim.GradScaler(8.0)": "device=8.0 is no device: give the scale as init_scale=8.0",
    "per_member(opt, lambda o: None)": "scheduler of member 0 gave NoneType: let it give one of torch",
    "optim.Adam(fused)": r"params .* FusedModule.*fused.parameters\(\)",
}

OTHERS: list[tuple[str, type[Exception], str | None]] = [
    ("ragged[2]", IndexError, None),
    ("hf.save('never', fused, tags=[7, 8, 9])", hf.CheckpointError, "give each of 3 members a name of its own"),
    ("hf.save('never', mlp())", hf.CheckpointError, "hf.save takes a fused module, not Sequential"),
    ("optim.GradScaler().load_state_dict({'scale': 8.0})", hf.CheckpointError, r"\['scale'\] of shapes \[\(\)\]"),
    ("optim.GradScaler().update(4.0)", RuntimeError, r"before update\(\): call step first"),
    ("optim.GradScaler().step(opt, lambda: None)", RuntimeError, "takes no closure, whose gradients are scaled"),
    ("hf.rows([1, 2])", ValueError, r"give the number of members, such as len\(models\)"),
    ("hf.Patience('2')", ValueError, "patience=2"),
    ("ragged.mean()", AttributeError, r"no \.mean.*per_model"),
    ("fused.nothing", AttributeError, "no attribute 'nothing'"),
    ("two_groups().fused", AttributeError, r"the members are 2 groups.*pop\.groups"),
    ("two_groups().optimizer", AttributeError, "the members are 2 groups"),
]

LINES: dict[str, tuple[type[Exception], str | None]] = {
    **{line: (hf.FusionError, words) for line, words in {**FUSE, **META}.items()},
    **{line: (ValueError, words) for line, words in {**VALUES, **SWEEPS}.items()},
    **{line: (hf.PlanError, words) for line, words in PLANS.items()},
    **{line: (TypeError, words) for line, words in TYPES.items()},
    **{line: (error, words) for line, error, words in OTHERS},
}


@pytest.mark.parametrize("line", LINES)
def test_refused(line: str) -> None:
    error, words = LINES[line]
    made = {name: make() for name, make in FIXTURES.items() if re.search(rf"\b{name}\b", line)}
    before = {name: state(value) for name, value in made.items()}
    names = {**globals(), **NAMES, **made}
    with pytest.raises(error, match=words):
        eval(line, names)
    for name, value in made.items():
        after = state(value)
        assert after.keys() == before[name].keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before[name].items())


def state(value: Any) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a fixture."""
    if isinstance(value, hf.Population):
        value = value.fused
    if isinstance(value, hf.FusedModule):
        return {name: tensor.clone() for name, tensor in value.state_dict().items()}
    if isinstance(value, hf.optim.FusedOptimizer):
        return {str(k): group["lr"].clone() for k, group in enumerate(value.param_groups)}
    return {str(k): tensor.clone() for k, tensor in enumerate(value if isinstance(value, Ragged) else value.params)}


# Hyper-parameters of an optimizer of three members.
HYPER: list[tuple[str, dict[str, Any], str]] = [
    ("Adam", {"lr": [0.1, 0.2]}, "lr has 2 values for an array of 3 members: give one value, or 3 of them"),
    ("Adam", {"lr": [[0.1, 0.2, 0.3]]}, r"lr has shape \[1, 3\] for an array of 3 members"),
    ("Adam", {"lr": "fast"}, "lr='fast' is not a number"),
    ("Adam", {"lr": -1.0}, "lr of member 0 is -1.0: it must be finite and at least 0"),
    ("Adam", {"lr": [0.1, NAN, 0.1]}, "lr of member 1 is nan"),
    ("Adam", {"betas": (0.9, [0.9, 1.0, 0.9])}, r"betas\[1\] of member 1 is 1.0: .* at least 0 and below 1"),
    ("Adam", {"betas": 0.9}, "betas=0.9 is not a pair"),
    ("Adam", {"betas": ([0.9, 0.8], 0.9)}, r"betas\[0\] has 2 values for an array of 3 members"),
    ("AdamW", {"eps": -1e-8}, "eps of member 0 is -1e-08"),
    ("SGD", {"momentum": [0.9, -0.9, 0.9]}, "momentum of member 1 is -0.9"),
    ("SGD", {"nesterov": True, "momentum": [0.9, 0.0, 0.9]}, "nesterov needs a momentum .* momentum=0.0"),
    ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": [0, 0, 0.5]}, "nesterov .* dampening=0.5"),
    ("Adagrad", {"initial_accumulator_value": [0.0, 0.0, -1.0]}, "initial_accumulator_value of member 2 is -1.0"),
    ("Lion", {"betas": (1.0, 0.99)}, r"betas\[0\] of member 0 is 1.0: .* below 1"),
    ("Adadelta", {"rho": [0.9, 0.9, 1.5]}, "rho of member 2 is 1.5: it must be at least 0 and at most 1"),
]


@pytest.mark.parametrize(("name", "options", "words"), HYPER, ids=str)
def test_hyper_parameters_are_refused_wherever_they_come_from(name: str, options: dict[str, Any], words: str) -> None:
    array = Array(3)
    make = getattr(hf.optim, name)
    with pytest.raises(ValueError, match=words):
        make(array.params, **options)
    fused = make(array.params[:2])
    with pytest.raises(ValueError, match=words):
        fused.add_param_group({"params": array.params[2:], **options})
    assert len(fused.param_groups) == 1
    array.draw_grads()
    before = state(array)
    fused.param_groups[0].update(options)
    with pytest.raises(ValueError, match=words):
        fused.step()
    assert all(torch.equal(state(array)[key], tensor) for key, tensor in before.items())
