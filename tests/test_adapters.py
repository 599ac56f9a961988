"""Adapters to other packages: hf.lora as peft alone, scikit-learn estimators, and arrays in Lightning."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.sklearn import EnsembleClassifier, EnsembleRegressor
from tests.alone import Member, Own

pytest.importorskip("peft")
pytest.importorskip("transformers")
# Of peft, transformers and Lightning themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
]

QV = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


# Small bases with random weights, in float64, and peft alone as the oracle.

VOCABULARY = 40


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config).double()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).double()


class Averaged(nn.Module):
    """Normalises by an average of its own, and has a table that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(36, 6), nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("table", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scaled(self.inner(x.flatten(1)))
        if not self.training:
            return self.outer(hidden - self.average)
        self.average.lerp_(hidden.detach().mean(0), 0.1)
        return self.outer(hidden - hidden.mean(0))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.table


def averaged() -> nn.Module:
    torch.manual_seed(0)
    return Averaged().double()


def next_token(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def labelled(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(getattr(out, "logits", out), target)


@dataclasses.dataclass(frozen=True)
class Base:
    """A base, a batch ``[members, ...]`` and a loss."""

    make: Callable[[], Any]
    data: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


def tokens(members: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (members, 2, 5))
    return ids, ids


def documents(members: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (members, 4, 6)), torch.randint(3, (members, 4))


def images(members: int) -> tuple[Tensor, Tensor]:
    return torch.randn(members, 4, 1, 6, 6, dtype=torch.float64), torch.randint(3, (members, 4))


LLAMA = Base(llama, tokens, next_token)
BERT = Base(bert, documents, labelled)
GPT2 = Base(gpt2, tokens, next_token)
AVERAGED = Base(averaged, images, labelled)
CONVOLUTIONS = Base(convolutions, images, labelled)


@dataclasses.dataclass(frozen=True)
class Run:
    """How members are trained: one value each of everything."""

    rates: Sequence[float]
    clips: Sequence[float]
    data: Sequence[tuple[Tensor, Tensor]]

    @staticmethod
    def of(base: Base, members: int, steps: int = 3) -> Run:
        torch.manual_seed(1)
        rates = [1e-2 * 1.7**b for b in range(members)]
        clips = [0.1 + 0.2 * b for b in range(members)]
        return Run(rates, clips, [base.data(members) for _ in range(steps)])


def alone(base: Base, config: Any, seed: int, run: Run, member: int) -> Any:
    """The member as peft and torch.optim train it."""
    from peft import get_peft_model

    base_model = base.make()
    torch.manual_seed(seed)
    model = get_peft_model(base_model, copy.deepcopy(config))
    own = Own(run.rates[member], norm=run.clips[member])
    trained = Member(model, partial(torch.optim.AdamW, weight_decay=0.1), base.loss, own)
    for inputs, target in run.data:
        trained.call(inputs[member], target[member])
    return model


def population(base: Base, adapters: Any, run: Run) -> hf.Population:
    return hf.Population(
        adapters,
        optimizer=lambda params: hf.optim.AdamW(params, lr=run.rates, weight_decay=0.1),
        loss=base.loss,
        clip_norm=run.clips,
        compile=False,
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Every tensor of two models, by name."""
    torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()), rtol=1e-9, atol=1e-11)


CASES: dict[str, tuple[Base, dict[str, Any], list[dict[str, Any]]]] = {
    "ranks, alphas, layers": (
        LLAMA,
        {"r": 4, "lora_alpha": 8, **QV},
        [{"r": 2}, {"r": 5, "lora_alpha": 3}, {"target_modules": ["q_proj", "o_proj"]}, {"layers_to_transform": [1]}],
    ),
    "patterns": (
        LLAMA,
        {"r": 4, "use_rslora": True, "init_lora_weights": "gaussian", **QV},
        [{"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"layers.1.self_attn.v_proj": 5.5}, "r": 3}],
    ),
    "all": (
        LLAMA,
        {"r": 4, "init_lora_weights": "orthogonal", "target_modules": "all-linear", "task_type": "CAUSAL_LM"},
        [{}, {"r": 2}],
    ),
    "dora": (LLAMA, {"r": 4, "use_dora": True, **QV}, [{"r": 2}, {"r": 4, "lora_alpha": 1}]),
    "bias of adapters": (
        BERT,
        {"r": 4, "lora_bias": True, "target_modules": ["query", "output.dense"], "task_type": "SEQ_CLS"},
        [{}, {"r": 2, "init_lora_weights": False}],
    ),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "q_proj"]}, [{"r": 3}, {"r": 2, "lora_alpha": 2}]),
    "a head of its own": (
        BERT,
        {"r": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", "bias": "lora_only"},
        [{"r": 4}, {"r": 1, "lora_alpha": 32}],
    ),
    "biases": (BERT, {"target_modules": ["query"], "bias": "all"}, [{"r": 3}, {"r": 2}]),
    "conv1d": (GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}, [{"r": 2}, {"r": 3}]),
    "running average": (AVERAGED, {"target_modules": ["inner"]}, [{"r": 2}, {"r": 3}]),
    "convolution": (CONVOLUTIONS, {"target_modules": ["0"], "modules_to_save": ["5"]}, [{"r": 2}, {"r": 3}]),
}


def lora_config(**fields: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**fields)


@pytest.mark.parametrize("case", CASES)
def test_members_train_as_alone_and_are_saved_for_peft(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base, fields, changes = CASES[case]
    seeds = [7 + b for b in range(len(changes))]
    config, run = lora_config(**fields), Run.of(base, len(changes))
    adapters = hf.lora(base.make(), config, changes, seeds=seeds)
    pop = population(base, adapters, run)
    for inputs, target in run.data:
        pop.step(hf.stacked(inputs), hf.stacked(target))
    operators = {row.operator for part in pop.fused.report().parts for row in part.rows}
    assert operators
    assert not any("opaque" in operator for operator in operators)
    for b, change in enumerate(changes):
        reference = alone(base, dataclasses.replace(config, **change), seeds[b], run, b)
        assert_same(pop.models[b].plain(), reference)  # type: ignore[union-attr]
        pop.models[b].save_pretrained(tmp_path / str(b))  # type: ignore[union-attr]
        inputs = run.data[0][0][b]
        # In train mode, as peft saves no running statistics.
        expected = reference.train()(inputs)
        for model in (PeftModel.from_pretrained(base.make(), tmp_path / str(b)), adapters.load(tmp_path / str(b))):
            torch.testing.assert_close(logits(model.train()(inputs)), logits(expected), rtol=1e-9, atol=1e-11)


def logits(out: Any) -> Any:
    return getattr(out, "logits", out)


def test_members_join_leave_and_are_copied() -> None:
    base, config = LLAMA, lora_config(r=4, **QV)
    run = Run.of(base, 3, steps=6)
    adapters = hf.lora(base.make(), config, [{"r": 2}, {"r": 4}, {"r": 1}], seeds=[1, 2, 3], max_rank=6)
    pop = population(base, adapters, run)
    late = Run(run.rates, run.clips, run.data[2:])
    for step, (inputs, target) in enumerate(run.data):
        if step == 2:
            pop.stop(1)
            joins = adapters.member(r=6, lora_alpha=2, seed=9)
            pop.start(1, joins, lr=run.rates[1], clip_norm=run.clips[1])
        pop.step(hf.stacked(inputs), hf.stacked(target))
    assert_same(pop.models[1].plain(), alone(base, lora_config(r=6, lora_alpha=2, **QV), 9, late, 1))  # type: ignore[union-attr]
    assert_same(pop.models[0].plain(), alone(base, lora_config(r=2, **QV), 1, run, 0))  # type: ignore[union-attr]
    pop.copy(1, 2)
    copied: Any = pop.models[2]
    assert copied.plain().peft_config["default"].r == 6
    assert_same(copied.plain(), pop.models[1].plain())  # type: ignore[union-attr]
    stopped = pop.stop(2)
    base_name = "base_model.model.lm_head.weight"
    assert stopped.get_parameter(base_name).data_ptr() == pop.fused.get_parameter(base_name).data_ptr()
    assert_same(stopped.plain(), pop.models[1].plain())  # type: ignore[union-attr]


# Fields of the config, members and options, and what is wrong with them.
REFUSED: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, 2, {}, "computes the start of an adapter from the weights of the base"),
    "tokens": ({"trainable_token_indices": [1]}, 2, {}, "trainable_token_indices"),
    "rslora": ({}, [{}, {"use_rslora": True}], {}, "member 1 has use_rslora=True.*lora_alpha"),
    "one dora": ({}, [{}, {"use_dora": True}], {}, "member 1 has use_dora=True"),
    "dora elsewhere": ({"use_dora": True}, [{}, {"target_modules": ["k_proj"]}], {}, "does not train .*magnitude"),
    "inference": ({"inference_mode": True}, 2, {}, "inference_mode=True leaves nothing to train"),
}
WRONG: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "none": ({}, 0, {}, "members=0"),
    "empty": ({}, [], {}, "members is an empty list"),
    "one dict": ({}, {"r": 2}, {}, "members={'r': 2}"),
    "unknown": ({}, [{"rank": 2}], {}, "'rank' is no field of LoraConfig"),
    "seeds": ({}, 2, {"seeds": [1]}, "1 seeds for 2 members"),
    "number of seeds": ({}, 2, {"seeds": 3}, "seeds=3: give a list of whole numbers, one per member"),
    "no whole seeds": ({}, 2, {"seeds": [0, 1.5]}, r"seeds=\[0, 1\.5\]: give a list of whole numbers"),
    "no whole room": ({}, 2, {"max_rank": 8.5}, "max_rank=8.5: give a whole number, or None"),
    "room": ({}, 2, {"max_rank": 2}, "max_rank=2 is less than the rank 8"),
    "no config": ({}, [1], {}, "member 0 must be a peft.LoraConfig, got int"),
}


@pytest.mark.parametrize("case", [*REFUSED, *WRONG])
def test_adapters_that_are_refused(case: str) -> None:
    fields, members, options, message = {**REFUSED, **WRONG}[case]
    with pytest.raises(hf.FusionError if case in REFUSED else ValueError, match=message):
        hf.lora(llama(), lora_config(**{**QV, **fields}), members, **options)


# The estimators of hfusion.sklearn: scikit-learn's own checks, and what they promise beyond.

pytest.importorskip("sklearn")

SMALL: dict[str, Any] = {"n_estimators": 2, "hidden_layer_sizes": 16, "max_iter": 25, "learning_rate_init": 0.03}


@parametrize_with_checks([EnsembleClassifier(**SMALL), EnsembleRegressor(**SMALL)])
def test_what_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def _data() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 3))
    return x, np.where(x[:, 0] * x[:, 1] > 0, "same", "other")


def test_digits() -> None:
    x, y = load_digits(return_X_y=True)
    seen, unseen, labels, wanted = train_test_split(x, y, random_state=0)
    model = EnsembleClassifier(n_estimators=4, max_iter=15, learning_rate_init=3e-3, random_state=0).fit(seen, labels)
    assert model.score(unseen, wanted) > 0.93
    right = model.predict(unseen) == wanted
    doubt = model.uncertainty(unseen)
    assert doubt[~right].mean() > 2 * doubt[right].mean()
    noise = np.random.default_rng(0).permuted(unseen, axis=1)
    assert model.uncertainty(noise).mean() > 3 * doubt.mean()


def test_a_fit_repeats_and_is_pickled() -> None:
    x, y = _data()
    model = EnsembleClassifier(**SMALL, bootstrap=True, random_state=3).fit(x, y)
    again = clone(model).fit(x, y)
    assert np.array_equal(model.predict_proba(x), again.predict_proba(x))
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(x), model.predict_proba(x))
    other = clone(model).set_params(random_state=4).fit(x, y)
    assert not np.allclose(other.predict_proba(x), model.predict_proba(x))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    clone(model).fit(x, y)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("targets", [1, 2])
def test_weights_are_those_of_the_plain_loop(targets: int) -> None:
    x, _ = _data()
    y = x[:, :targets] ** 2
    weights = np.random.default_rng(1).integers(0, 4, len(x)) * 0.7
    model = EnsembleRegressor(
        lambda features, outputs: nn.Linear(features, outputs), n_estimators=2, max_iter=4, random_state=0
    ).fit(x, y, sample_weight=weights)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    mean, shift = np.average(x, 0, weights), np.average(y, 0, weights)
    scale, spread = (np.sqrt(np.average((a - b) ** 2, 0, weights)) for a, b in ((x, mean), (y, shift)))
    inputs, target = torch.tensor((x - mean) / scale), torch.tensor((y - shift) / spread)
    make, shares = partial(torch.optim.AdamW, weight_decay=1e-4), torch.tensor(weights / weights.sum())

    def weighed(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square().mean(1) * shares).sum()

    for member in range(2):
        torch.manual_seed(seed + member)
        network = Member(nn.Linear(3, targets).double(), make, weighed, Own(1e-3))
        for _ in range(4):
            network.call(inputs, target)
        wanted = network.model(inputs).detach().numpy() * spread + shift
        assert np.allclose(model.member_predictions(x)[member], wanted, rtol=1e-9, atol=1e-11)


def test_the_curve_is_the_mean_over_samples() -> None:
    x, y = np.random.default_rng(0).normal(size=(10, 3)), np.arange(10.0)
    curves = [
        EnsembleRegressor(n_estimators=2, learning_rate_init=0.0, batch_size=size, max_iter=1, random_state=0)
        .fit(x, y)
        .loss_curve_
        for size in (4, 10)
    ]
    np.testing.assert_allclose(*curves, rtol=1e-9)


@pytest.mark.parametrize("kind", [EnsembleClassifier, EnsembleRegressor])
def test_members_stop_early_and_keep_their_best_weights(kind: Any) -> None:
    x, labels = _data()
    y, shares, classifies = (labels == "same") * 1.0, np.linspace(0.5, 1.5, len(x)), kind is EnsembleClassifier
    model = kind(**{**SMALL, "max_iter": 90}, random_state=0, early_stopping=True, n_iter_no_change=2)
    model.set_params(validation_fraction=0.3).fit(x, y, sample_weight=shares)
    assert model.n_iter_ == len(model.validation_scores_) < 90
    assert np.array_equal(np.nanmax(model.validation_scores_, 0), model.best_validation_scores_)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    options = {"test_size": 0.3, "random_state": seed, "stratify": y if classifies else None}
    _, unseen, _, wanted, _, weights = train_test_split(x, y, shares, **options)
    each = model.member_probabilities(unseen).argmax(-1) if classifies else model.member_predictions(unseen)
    score = accuracy_score if classifies else r2_score
    scores = [score(wanted, member.reshape(-1), sample_weight=weights) for member in each]
    np.testing.assert_allclose(scores, model.best_validation_scores_, rtol=1e-9)


def test_a_member_that_diverges_is_left_out() -> None:
    x, _ = _data()
    y = x[:, 0]
    model = EnsembleRegressor(**{**SMALL, "learning_rate_init": [1e-2, 1e200]}, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"members \[1\] diverged; the ensemble is the other 1"):
        model.fit(x, y)
    assert np.isfinite(model.predict(x)).all()
    model.set_params(learning_rate_init=1e200)
    with pytest.raises(ValueError, match="every member's training diverged"):
        model.fit(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_layer_sizes": "wide"}, "hidden_layer_sizes='wide': give whole numbers of at least 1"),
        ({"hidden_layer_sizes": (8, 0)}, r"hidden_layer_sizes=\(8, 0\): give whole numbers of at least 1"),
        ({"module": 3}, "module=3: give a function that makes one from n_features and n_outputs"),
        ({"module": nn.Linear(4, 2)}, r"module=Linear\(.*\): give a function that makes one"),
        ({"module": lambda features, outputs: 3}, r"module\(1, 1\) gave int: return an nn\.Module"),
        (
            {"module": lambda features, outputs: nn.Linear(features, 3)},
            r"outputs of shape \[1, 3\] .*expected \[1, 1\]",
        ),
        ({"max_iter": 0}, "max_iter=0: it must be a whole number of at least 1"),
        ({"batch_size": 0}, 'batch_size=0: it must be "auto" or a whole number of at least 1'),
        ({"device": "cuda:99"}, "device='cuda:99': this machine has no such device"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnsembleRegressor(**{**SMALL, **options}).fit([[0.0], [1.0]], [0.0, 1.0])


def test_what_is_not_fitted_says_so() -> None:
    with pytest.raises(NotFittedError):
        EnsembleRegressor().predict([[1.0]])


# Arrays in Lightning: every member as alone, with limits and schedules of its own, saved and continued.

lightning = pytest.importorskip("lightning")

RATES, CLIPS, EPOCHS = [0.1, 0.03, 0.3], [0.05, 1.0, 0.2], 3
STEPPED: Any = partial(StepLR, step_size=1, gamma=0.5)


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in RATES]


def data(*lead: int) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(12, *lead, 4, dtype=torch.float64), torch.randint(3, (12, *lead)))


def array(**options: Any) -> Any:
    return hf.lightning.LightningArray(
        make_models(),
        **{
            "loss": F.cross_entropy,
            "optimizer": lambda params: hf.optim.SGD(params, lr=RATES, momentum=0.9),
            "scheduler": STEPPED,
            "clip_norm": CLIPS,
            **options,
        },
    )


def trainer(folder: Path, **options: Any) -> Any:
    return lightning.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **options,
        }
    )


def plain(member: int, loader: Any, accumulate: int = 1, make: Any = STEPPED) -> nn.Module:
    model, (x, y) = make_models()[member], data().tensors
    own = Own(RATES[member], make, accumulate, CLIPS[member])
    alone = Member(model, partial(torch.optim.SGD, momentum=0.9), F.cross_entropy, own)
    for _ in range(EPOCHS):
        alone.epoch(loader)
        alone.step_schedule(F.cross_entropy(model(x), y).item())
    return model


def assert_alone(module: Any, loader: Any, **options: Any) -> None:
    for member, model in enumerate(module.members):
        for ours, theirs in zip(model.parameters(), plain(member, loader, **options).parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_members_train_as_alone(accumulate: int, tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=4)
    module, run = array(accumulate=accumulate), trainer(tmp_path)
    run.fit(module, loader)
    assert_alone(module, loader, accumulate=accumulate)
    assert run.global_step == EPOCHS * -(-3 // accumulate)
    for member, rate in enumerate(RATES):
        assert float(run.callback_metrics[f"lr/{member}"]) == pytest.approx(rate * 0.5 ** (EPOCHS - 1))


def test_members_have_batches_of_their_own(tmp_path: Path) -> None:
    pairs = zip(*(tensor.transpose(0, 1).split(4, 1) for tensor in data(len(RATES)).tensors), strict=True)
    batches = [({"input": x}, {"labels": y}) for x, y in pairs]
    module = array(own_batches=True, loss=lambda output, target: F.cross_entropy(output, target["labels"]))
    trainer(tmp_path).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    for member, model in enumerate(module.members):
        own = [(inputs["input"][member], target["labels"][member]) for inputs, target in batches]
        expected = [*plain(member, own).parameters()]
        torch.testing.assert_close([*model.parameters()], expected, rtol=1e-9, atol=1e-11)


def test_members_are_scheduled_by_their_own_losses(tmp_path: Path) -> None:
    loader, options = DataLoader(data(), batch_size=4), {"patience": 0, "threshold": 0.1, "factor": 0.1}
    module = array(scheduler=partial(hf.optim.lr_scheduler.ReduceLROnPlateau, **options))
    run = trainer(tmp_path)
    run.fit(module, loader, DataLoader(data(), batch_size=12))
    assert len({float(run.callback_metrics[f"lr/{member}"]) / rate for member, rate in enumerate(RATES)}) > 1
    assert_alone(module, loader, make=partial(ReduceLROnPlateau, **options))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def test_what_is_logged(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=5)
    metrics = {"accuracy": accuracy, "float": lambda output, target: float(accuracy(output, target))}
    module = array(metrics=metrics, tags=["a", "b", "c"])
    run = trainer(tmp_path)
    run.fit(module, loader, loader)
    found = run.validate(module, loader, verbose=False)[0]
    x, y = data().tensors
    members = [model.eval() for model in module.members]
    for name, model in zip("abc", members, strict=True):
        assert found[f"val_loss/{name}"] == pytest.approx(F.cross_entropy(model(x), y).item())
        for metric in metrics:
            assert found[f"val_{metric}/{name}"] == pytest.approx(accuracy(model(x), y).item())
    each = [found[f"val_loss/{name}"] for name in "abc"]
    assert found["val_loss"] == pytest.approx(sum(each) / 3)
    assert "train_loss/a" in run.callback_metrics or "val_loss/a" in run.callback_metrics
    assert run.test(module, loader, verbose=False)[0]["test_loss/b"] == found["val_loss/b"]
    outputs = run.predict(module, DataLoader(data().tensors[0], batch_size=12))[0]
    torch.testing.assert_close(outputs, torch.stack([model(x) for model in members]))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=4)
    first, half = array(), trainer(tmp_path, max_epochs=1)
    half.fit(first, loader)
    half.save_checkpoint(tmp_path / "half.ckpt")
    module = array()
    trainer(tmp_path).fit(module, loader, ckpt_path=tmp_path / "half.ckpt")
    assert_alone(module, loader)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0\) would clip all members by one norm: .*clip_norm="),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\) is for automatic .*accumulate="),
        (
            {"callbacks": [lightning.pytorch.callbacks.LearningRateMonitor()]},
            "LearningRateMonitor logs one rate for all members",
        ),
        (
            {"callbacks": [lightning.pytorch.callbacks.StochasticWeightAveraging(1e-2)]},
            "StochasticWeightAveraging needs automatic optimization",
        ),
    ],
)
def test_what_a_trainer_does_for_one_model(option: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **option).fit(array(), DataLoader(data(), batch_size=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": ["a", "a", "b"]}, r"tags=\['a', 'a', 'b'\]: every member has a name of its own"),
        ({"metrics": {"loss": accuracy}}, "metrics has 'loss', by which the losses are logged"),
        ({"metrics": {"loss_best": accuracy}}, "metrics has 'loss_best', by which the losses are logged"),
        ({"tags": ["a"]}, "1 tags for 3 members: give one for each"),
        ({"scheduler_interval": "batch"}, 'scheduler_interval=\'batch\': it is "epoch" or "step"'),
        ({"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}, "gave SGD, one for all members: give one of"),
        ({"scheduler": ReduceLROnPlateau}, "torch's ReduceLROnPlateau watches one value for all members"),
        (
            {"scheduler": hf.optim.lr_scheduler.ReduceLROnPlateau, "scheduler_interval": "step"},
            "='val_loss', .*not logged",
        ),
        ({"accumulate": 1.5}, "accumulate=1.5: give a whole number of at least 1"),
        ({"optimizer": 3}, "optimizer=3: give a function"),
        ({"scheduler": 3}, "scheduler=3: give a function"),
        ({"metrics": {"outputs": lambda output, target: output}}, r"val_outputs must give a number .* shape \[12, 3\]"),
        ({"loss": partial(F.cross_entropy, reduction="none")}, "the loss must give one number for each of 3 members"),
        ({"loss": lambda output, target: output.detach().sum()}, "have no gradient"),
    ],
)
def test_wrong_arguments_of_an_array_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=12)
    run, validated = trainer(tmp_path), loader if "metrics" in options else None
    with pytest.raises(ValueError, match=message):
        run.fit(array(**options), loader, validated)
