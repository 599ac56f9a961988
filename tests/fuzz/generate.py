"""Generate a random program from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.fuzz.pieces import ACTIVATIONS, FUNCTIONS, ISLANDS, LAYERS, REDUCTIONS, SHAPES, STATE, VIEWS, WRITES
from tests.fuzz.program import FLOATS, Block, Input, Piece, Program, Statement, Step

# Groups of pieces, of which one is drawn first, by its weight.
GROUPS = {
    "layers": LAYERS,
    "activations": ACTIVATIONS,
    "functions": FUNCTIONS,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "views": VIEWS,
    "writes": WRITES,
    "state": STATE,
    "islands": ISLANDS,
}
WEIGHTS = dict(zip(GROUPS, (26, 10, 16, 9, 14, 8, 10, 6), strict=False))
MEMBERS = (1, 2, 2, 2, 4)
MAIN = ("vec", "vec", "vec", "seq", "seq", "img", "img", "sig", "ids", "vol")
BESIDE = ("vec", "vec", "mask", "lab", "row", "num", "cvec", "half", "mat")
CHAINED = {
    "vec": ("nn.Tanh()", "nn.Linear(6, 6)", "nn.Sequential(nn.ReLU(), nn.Linear(6, 6))", "nn.LayerNorm(6)"),
    "seq": ("nn.Tanh()", "nn.Linear(6, 6)", "nn.GELU()", "nn.Identity()"),
    "img": ("nn.ReLU(inplace=True)", "nn.BatchNorm2d(4)", "nn.Conv2d(4, 4, 1)"),
    "sig": ("nn.Tanh()", "nn.Conv1d(4, 4, 1)"),
    "vol": ("nn.ReLU()",),
    "half": ("nn.Tanh()",),
}
SHAREABLE = ("nn.Linear(", "nn.Conv", "nn.Embedding(", "nn.LayerNorm(", "nn.LSTM(", "nn.GRU(", "nn.MultiheadAttention(")
TRAINED = ("nn.Linear(", "nn.Conv", "nn.Embedding(5, 6)", "nn.BatchNorm2d(4)", "nn.LayerNorm(6)")
SCALE = "self.{s} = nn.Parameter(torch.ones(()))"
NORMS = ("BatchNorm", "InstanceNorm", "Dropout")
VEC_LOSSES = {
    "lab": (
        "F.cross_entropy({y}, target)",
        "F.cross_entropy({y}, target, label_smoothing=0.1)",
        "F.cross_entropy({y}, target, weight=torch.arange(1.0, 7.0))",
        'F.cross_entropy({y}, target, reduction="sum")',
        "F.nll_loss(F.log_softmax({y}, 1), target, ignore_index=2)",
        "F.multi_margin_loss({y}, target)",
    ),
    "vec": (
        "F.mse_loss({y}, target)",
        "F.l1_loss({y}, target)",
        "F.smooth_l1_loss({y}, target)",
        "F.huber_loss({y}, target, delta=0.5)",
        "F.binary_cross_entropy_with_logits({y}, target.sigmoid())",
        "F.poisson_nll_loss({y}.tanh(), target.abs())",
        "F.gaussian_nll_loss({y}, target, {y}.sigmoid() + 0.1)",
        'F.kl_div({y}.log_softmax(1), target.softmax(1), reduction="batchmean")',
        "F.soft_margin_loss({y}, target.sign())",
        "F.multilabel_soft_margin_loss({y}, (target > 0).double())",
        "F.cosine_embedding_loss({y}, target, torch.ones(target.shape[0]))",
        "F.triplet_margin_loss({y}, target, target.flip(0) + 3.0)",
        "F.margin_ranking_loss({y}, target, target.cos().sign(), margin=0.1)",
        "F.hinge_embedding_loss({y}, target.sign(), margin=9.0)",
        "({y} - target).pow(2).mean()",
        "torch.linalg.vector_norm({y} - target)",
    ),
}
OPTIMIZERS = (
    "SGD(params, lr=own([0.1, 0.05, 0.02, 0.2]))",
    "SGD(params, lr=0.1, momentum=own([0.9, 0.5, 0.0, 0.8]), weight_decay=0.01)",
    "SGD(params, lr=own([0.1, 0.05, 0.02, 0.2]), momentum=0.9, nesterov=True)",
    "Adam(params, lr=own([0.01, 0.02, 0.05, 0.01]), eps=1e-3)",
    "AdamW(params, lr=0.01, weight_decay=own([0.0, 0.1, 0.2, 0.1]), eps=1e-3)",
    "Adam(params, lr=0.01, betas=(0.8, 0.9), eps=1e-3, amsgrad=True)",
    "Adadelta(params, lr=own([1.0, 0.5, 2.0, 1.0]))",
)


@dataclass(frozen=True)
class Scale:
    """How large programs are: statements of the model, other blocks at most, steps at most.

    ``costly``: the share that is kept of pieces that take torch.export long; ``turns``: of changes of mode and sizes.
    """

    statements: int = 8
    blocks: int = 3
    steps: int = 4
    costly: float = 1.0
    turns: float = 0.33


LARGE, SMALL = Scale(), Scale(2, 1, 2, costly=0.1, turns=0.05)
COSTLY = (
    "nn.RNN(",
    "nn.LSTM",
    "nn.GRU",
    "ttention(",
    "EncoderLayer(",
    "spectral_norm",
    "orthogonal",
    "func.grad",
    "vmap",
)


@dataclass
class _Body:
    """A block as it grows: the kinds of its values, which of them may lie in an input's memory, and its state."""

    rng: random.Random
    kinds: dict[str, str]
    outside: set[str]
    prefix: str
    scale: Scale
    statements: list[Statement] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[str]:
        return [name for name, k in self.kinds.items() if k == kind]

    def fits(self, piece: Piece) -> bool:
        return all(kind in self.kinds.values() for kind in piece.takes)


def generate(seed: int, scale: Scale = LARGE) -> Program:
    """The program of ``seed``."""
    rng = random.Random(seed)
    members = rng.choice(MEMBERS)
    inputs = [Input(rng.choice(MAIN), rng.random() < 0.3, rng.random() < 0.25)]
    while rng.random() < 0.3:
        inputs.append(Input(rng.choice(BESIDE), rng.random() < 0.4, rng.random() < 0.25))
    inputs = [Input(spec.kind, spec.stacked, spec.grad and spec.kind in FLOATS) for spec in inputs]
    blocks: list[Block] = []
    for k in range(min(scale.blocks, rng.choice((0, 0, 1, 1, 2, 3)))):
        blocks.append(_block(rng, f"Block{k}", blocks, scale, island=rng.random() < 0.2, members=members))
    net = _net(rng, blocks, inputs, scale, members)
    target = Input("lab" if rng.random() < 0.4 else "vec", rng.random() < 0.25)
    # How the inputs are passed: the last ones by name.
    named = min(rng.choice((0, 0, 1, len(inputs))), len(inputs))
    forms = ("plain",) * (len(inputs) - named) + ("keyword",) * named
    return Program(
        seed,
        members,
        (*blocks, net),
        tuple(inputs),
        forms,
        target,
        _loss(rng, net, target.kind),
        rng.choice(OPTIMIZERS),
        _steps(rng, scale),
        verify=rng.random() < 0.25,
    )


def for_compilation(program: Program) -> Program:
    """``program`` as steps that are compiled: the second of one size is, and serves another number of samples.

    A parameter scales the first result: of inputs without a gradient, and frozen, nothing would be trained.
    """
    net, (first, *rest) = program.net, program.net.results
    kind = net.kinds()[first]
    if kind in FLOATS:
        scaled = Statement(Piece((kind,), (kind,), "{o} = {0} * {s}", init=SCALE), (first,), ("trained",), "s_trained")
        net = replace(net, statements=(*net.statements, scaled), results=("trained", *rest))
    step = Step("train", "step", program.steps[0].n, program.steps[0].t)
    return replace(
        program,
        blocks=(*program.blocks[:-1], net),
        inputs=tuple(Input(spec.kind, spec.stacked) for spec in program.inputs),
        loss=program.loss.replace(f'out["{first}"]', 'out["trained"]'),
        steps=(step, step, step, replace(step, n=step.n + 2)),
        joint="compiled",
    )


def _net(rng: random.Random, blocks: Sequence[Block], inputs: Sequence[Input], scale: Scale, members: int) -> Block:
    names = tuple((f"x{k}", spec.kind) for k, spec in enumerate(inputs))
    body = _Body(rng, dict(names), {name for name, _ in names}, "v", scale)
    calls = [_call(block) for block in blocks]
    island = rng.random() < 0.02
    _trainable(body, members)
    for _ in range(rng.randint(max(2, scale.statements // 2), scale.statements)):
        _grow(body, calls, island, members)
    results = _results(body)
    form = rng.choice(("plain", "plain", "tuple", "dict", "nested")) if len(results) > 1 else "plain"
    return Block("Net", names, tuple(body.statements), results, form, _evals(rng, body))


def _block(
    rng: random.Random, name: str, before: Sequence[Block], scale: Scale, *, island: bool, members: int
) -> Block:
    kinds = [rng.choice(("vec", "vec", "vec", "seq", "img"))]
    if rng.random() < 0.2:
        kinds.append("vec")
    inputs = tuple((f"x{k}", kind) for k, kind in enumerate(kinds))
    body = _Body(rng, dict(inputs), {n for n, _ in inputs}, "h", scale)
    for k in range(rng.randint(1, max(2, scale.statements // 3))):
        _grow(body, [_call(block) for block in before], island and k == 0, members)
    candidates = [n for n in body.of_kind(kinds[0]) if n != "x0"] or ["x0"]
    return Block(name, inputs, tuple(body.statements), (candidates[-1],), "plain", _evals(rng, body))


def _call(block: Block) -> Piece:
    """A block as a piece."""
    kinds = block.kinds()
    operands = ", ".join(f"{{{k}}}" for k in range(len(block.inputs)))
    return Piece(
        tuple(kind for _, kind in block.inputs),
        tuple(kinds[result] for result in block.results),
        f"{{o}} = {{s}}({operands})",
        module=f"{block.name}(b, once)",
    )


def _grow(body: _Body, calls: Sequence[Piece], island: bool, members: int) -> None:
    """Add one statement."""
    rng = body.rng
    if island:
        group: Sequence[Piece] = GROUPS["islands"]
    elif calls and rng.random() < 0.25:
        group = calls
    else:
        group = GROUPS[rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]]
    fitting = [piece for piece in group if body.fits(piece)]
    if not fitting:
        return
    piece = rng.choice(fitting)
    if any(part in piece.module + piece.code for part in COSTLY) and rng.random() >= body.scale.costly:
        return
    operands = tuple(_operand(body, piece, k) for k in range(len(piece.takes)))
    if piece.writes and operands[0] in body.outside and rng.random() < 0.9:
        return
    number = len(body.statements)
    results = tuple(f"{body.prefix}{number}" + "abc"[k] * bool(k) for k in range(len(piece.gives)))
    again = [s for s in body.statements if s.piece == piece and s.piece.module]
    if again and rng.random() < 0.6:
        first = again[0]
        statement = Statement(
            piece, operands, results, first.slot, first.choices, first.holder, first.chain, first.care
        )
    else:
        statement = _fresh(body, piece, operands, results, members)
    body.statements.append(statement)
    body.kinds |= dict(zip(results, piece.gives, strict=True))
    if (piece.view and operands[0] in body.outside) or piece.module.startswith("Block"):
        body.outside |= set(results) if set(operands) & body.outside else set()


def _trainable(body: _Body, members: int) -> None:
    """Mostly, begin with parameters, so that there are gradients to compare."""
    layers = [p for p in GROUPS["layers"] if p.module.startswith(TRAINED) and len(p.takes) == 1 and body.fits(p)]
    if layers and body.rng.random() < 0.8:
        piece = body.rng.choice(layers)
        body.statements.append(_fresh(body, piece, (_operand(body, piece, 0),), (f"{body.prefix}0",), members))
        body.kinds[f"{body.prefix}0"] = piece.gives[0]


def _operand(body: _Body, piece: Piece, index: int) -> str:
    candidates = body.of_kind(piece.takes[index])
    recent = candidates[-2:]
    return body.rng.choice(recent if body.rng.random() < 0.6 else candidates)


def _fresh(body: _Body, piece: Piece, operands: tuple[str, ...], results: tuple[str, ...], members: int) -> Statement:
    rng = body.rng
    choices = tuple((key, _choice(rng, key, values, members)) for key, values in piece.choices.items())
    holder, chain, care = "attr", (), "plain"
    if piece.module:
        holder = rng.choice(("attr", "attr", "attr", "dict", "list", "seq"))
        if holder == "seq" and not (piece.chains and piece.takes[0] in CHAINED):
            holder = "attr"
        if holder == "seq":
            modules = CHAINED[piece.takes[0]]
            chain = tuple(rng.choice(modules) for _ in range(rng.randint(0, 2)))
        care = rng.choice(("plain",) * 8 + ("frozen", "shared", "eval"))
        if care == "shared" and not (piece.module.startswith(SHAREABLE) and not chain):
            care = "frozen"
    region = ""
    if rng.random() < 0.04 and not piece.init and not piece.island:
        region = "torch.no_grad()"
    return Statement(piece, operands, results, f"s{len(body.statements)}", choices, holder, chain, care, region)


def _choice(rng: random.Random, key: str, values: Sequence[str], members: int) -> str:
    if not key.startswith("each_"):
        return rng.choice(values)
    rows = [rng.choice(values) for _ in range(members)] if rng.random() < 0.7 else [rng.choice(values)] * members
    return f"[{', '.join(rows)}][b]" if len(set(rows)) > 1 else rows[0]


def _evals(rng: random.Random, body: _Body) -> tuple[str, ...]:
    slots = [s.slot for s in body.statements if s.piece.module and any(n in s.piece.module for n in NORMS)]
    return tuple(dict.fromkeys(slots[:1])) if slots and rng.random() < 0.15 else ()


def _results(body: _Body) -> tuple[str, ...]:
    """Values that no other statement reads, the last float first, at most four."""
    operands = {name for s in body.statements for name in s.operands}
    names = [name for name, kind in body.kinds.items() if kind in FLOATS]
    loose = [name for name in body.kinds if name not in operands]
    first = next((n for n in reversed(names) if body.kinds[n] == "vec"), names[-1] if names else list(body.kinds)[-1])
    rest = [name for name in reversed(loose) if name != first]
    return (first, *rest[: body.rng.choice((0, 1, 2, 3))])


def _loss(rng: random.Random, net: Block, target: str) -> str:
    kinds = net.kinds()
    parts = []
    for index, name in enumerate(net.results):
        kind, picked = kinds[name], net.picked(index)
        if index == 0 and kind == "vec":
            parts.append(rng.choice(VEC_LOSSES[target]).format(y=picked))
        elif kind == "cvec":
            parts.append(f"torch.view_as_real({picked}).sin().mean()")
        elif kind in FLOATS:
            parts.append(f"{picked}.sin().{rng.choice(('mean', 'sum'))}()")
    return " + ".join(parts) or "torch.zeros(())"


def _steps(rng: random.Random, scale: Scale) -> tuple[Step, ...]:
    n, t = rng.choice((3, 4, 5)), rng.choice((3, 4))
    steps = []
    mode = rng.choice(("train", "train", ""))
    for _ in range(rng.randint(1, scale.steps)):
        if rng.random() < scale.turns / 3:
            n, t = rng.choice((2, 3, 6)), rng.choice((t, t, 5))
        steps.append(Step(mode, rng.choice(("step", "step", "backward")), n, t, zeros=rng.random() < 0.8))
        mode = rng.choice(("train", "eval")) if rng.random() < scale.turns else ""
    if rng.random() < scale.turns:
        steps.append(Step("eval", "forward", n, t))
    return tuple(steps)
