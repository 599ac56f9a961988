"""Pieces that are code: functions of tensors, Python beside them, views and writes."""

from __future__ import annotations

from typing import Any

from tests.fuzz.program import Piece


# Rows of the tables of pieces.
def piece(kinds: str, code: str = "{s}({0})", *, module: str = "", init: str = "", **more: Any) -> Piece:
    """Return a piece; keywords that are no fields of `Piece` are placeholders with their choices, ``a|b``.

    Args:
        kinds: what it takes and gives, as ``vec,vec->vec``.
        code: statements; or an expression for the result, where ``{o}`` is not in it.
    """
    takes, gives = (tuple(filter(None, part.split(","))) for part in kinds.split("->"))
    code = f"{{o}} = {code}" if gives and "{o}" not in code else code
    flags = {name: more.pop(name) for name in ("view", "writes", "island") if name in more}
    choices = {key: tuple(text.split("|")) for key, text in more.items()}
    return Piece(takes, gives, code, module, init, choices, **flags)


# Functions of tensors, which have no state.
FUNCTIONS = (
    # of one or two values of one kind
    piece("vec,vec->vec", "{0} + {1}"),
    piece("img,img->img", "{0} + {1}"),
    piece("seq,seq->seq", "{0} + {1}"),
    piece("vec,vec->vec", "{0} * torch.sigmoid({1})"),
    piece("img,img->img", "{0} * {1}.mean((2, 3), keepdim=True).sigmoid()"),
    piece("vec,vec->vec", "{0} / (1.5 + {1}.abs())"),
    piece("vec->vec", "{0}.abs().add(0.5).pow({e})", e="2|0.5|-1|3"),
    piece("vec->vec", "{0}.tanh().exp().log1p()"),
    piece("vec->vec", "{0}.{f}()", f="sin|cos|atan|sinc|erf|tanh|sigmoid|asinh"),
    piece("vec->vec", "(0.9 * {0}.tanh()).{f}()", f="asin|acos|atanh|erfinv|tan|sinh|cosh|expm1"),
    piece("vec,vec->vec", "torch.{f}({0}, {1} * 0.5)", f="maximum|minimum|fmax|fmin"),
    piece("vec,vec->vec", "torch.lerp({0}, {1}, {w})", w="0.3|torch.sigmoid({0})"),
    piece("vec,vec->vec", "torch.addcmul({0}, {1}.tanh(), {0}.sin(), value=0.5)"),
    piece("vec,vec->vec", "torch.addcdiv({0}, {1}, {0}.abs() + 1.0)"),
    piece("vec->vec", "{0}.clamp({lo}, {hi})", lo="-0.5|None", hi="0.7|1.1"),
    piece("vec->vec", "{0} + {0}.{f}()", f="round|floor|ceil|trunc|sign|frac"),
    piece("seq->seq", "F.{f}({0})", f="relu|relu6|gelu|silu|mish|hardtanh|softsign|logsigmoid"),
    piece("img->img", "F.{f}", f="leaky_relu({0}, 0.3)|elu({0}, 0.5)|threshold({0}, 0.1, 0.2)|softplus({0}, 2)"),
    piece("seq->seq", "F.{f}({0}, dim={d})", f="softmax|log_softmax|softmin", d="-1|1|2"),
    piece("vec->vec", "F.{f}({0}, {p}, self.training)", f="dropout|alpha_dropout", p="0.0"),
    piece("seq->seq", "F.layer_norm({0}, (6,))"),
    piece("vec->vec", "F.normalize({0} + 0.1, dim={d}, p={p})", d="1|0", p="2.0|1.0"),
    piece("vec->half", "F.glu({0}, 1)"),
    # matrices
    piece("seq,seq->seq", "({0} @ {1}.transpose(1, 2)).softmax(-1) @ {1}"),
    piece("mat,mat->mat", "torch.bmm({0}, {1}).tanh()"),
    piece("vec->vec", "({0} @ {0}.t()).div(6) @ {0}"),
    piece("vec,vec->row", 'torch.einsum("ni,ni->n", {0}, {1})'),
    piece("seq,vec->seq", 'torch.einsum("nti,ni,ntj->ntj", {0}, {1}, {0}.sin())'),
    piece("seq,seq->seq", "torch.cdist({0}, {1} + 5.0).softmax(-1) @ {1}"),
    piece("seq->seq", "F.scaled_dot_product_attention({0}, {0}.sin(), {0}, is_causal={c})", c="True|False"),
    piece("mat,half->half", "torch.linalg.solve({0}.tanh() + 4 * torch.eye(3), {1})"),
    piece("mat->row", "torch.linalg.{f}({0}.tanh() + 4 * torch.eye(3)).div(64)", f="det"),
    piece("mat->mat", "torch.linalg.cholesky({0} @ {0}.mT + torch.eye(3))"),
    # masks, choices, indices
    piece("vec,vec->mask", "{0} {c} {1} + 0.01", c=">|<|>=|!="),
    piece("mask,mask->mask", "{0} {c} ~{1}", c="&|^"),
    piece("mask,vec,vec->vec", "torch.where({0}, {1}, {2})"),
    piece("vec,mask->vec", "{0}.masked_fill({1}, {v})", v="0.0|-1.5"),
    piece("mask->vec", "{0}.to({t}).double()", t="torch.float64|torch.int64|torch.uint8"),
    piece("vec->lab", "{0}.argmax(1)"),
    piece("vec->half", "{0}.topk(3, dim=1).values"),
    piece("vec->vec", "{o}, _ = {0}.sort(1, descending={d})", d="True|False"),
    piece("vec,vec->vec", "{0}.gather(1, {1}.sort(1).indices)"),
    piece("vec,lab->row", "{0}.gather(1, {1}[:, None])[:, 0]"),
    piece("vec->vec", "{0}[torch.arange({0}.shape[0]).flip(0)]"),
    piece("seq->seq", "{0}.index_select(2, torch.tensor([5, 0, 1, 1, 2, 3]))"),
    piece("vec,half->vec", "{0}.scatter(1, {0}.topk(3, 1).indices, {1})"),
    piece("vec,half->vec", "{0}.scatter_add(1, torch.zeros_like({1}, dtype=torch.long), {1})"),
    piece("vec->vec", "{0}.index_add(1, torch.tensor([1, 1, 3]), {0}[:, :3])"),
    piece(
        "vec,row->vec", "rows = torch.arange({0}.shape[0])\n{o} = {0}.index_put((rows, rows * 0), {1}, accumulate=True)"
    ),
    piece("lab->vec", "F.one_hot({0}, 6).double()"),
    piece("vec->vec", "{0} * torch.bucketize({0}, torch.tensor([-0.5, 0.5]))"),
    # complex numbers and spectra
    piece("vec,vec->cvec", "torch.complex({0}, {1})"),
    piece("cvec,cvec->cvec", "{0} * {1}.conj() / (1 + {1}.abs())"),
    piece("cvec->vec", "{0}.{p}", p="real|imag|abs()"),
    piece("cvec->cvec", 'torch.fft.{f}({0}, norm="ortho")', f="fft|ifft"),
    piece("seq->seq", "torch.fft.irfft(torch.fft.rfft({0}, dim=2) * torch.tensor([1.0, 0.5, 0.0, 0.2]), n=6, dim=2)"),
    piece("cvec->vec", "torch.view_as_real({0}).flatten(1)[:, 3:9]"),
    # images and signals
    piece(
        "img->img",
        'F.interpolate(F.avg_pool2d({0}, 2), size={0}.shape[2:], mode="{m}")',
        m="nearest|bilinear|bicubic|area",
    ),
    piece("img->img", "F.fold(F.unfold({0}, 3, padding=1), (6, 6), 3, padding=1) / 9"),
    piece("img->img", "F.{f}_pool2d({0}, 2).repeat_interleave(2, 2).repeat(1, 1, 1, 2)", f="max|avg"),
    piece("img->img", "{0} + F.adaptive_{f}_pool2d({0}, 1)", f="avg|max"),
    piece("img->img", "F.conv2d({0}, torch.ones(4, 1, 1, 1) * {0}.std(), groups=4)"),
    piece(
        "sig->sig",
        'F.pad({0}, (1, 1), mode="{m}")[:, :, 1:-1] + F.pad({0}, (2, -2))',
        m="reflect|replicate|circular|constant",
    ),
    # losses as values
    piece("vec,vec->num", "F.{f}({0}, {1})", f="mse_loss|l1_loss|smooth_l1_loss|huber_loss|soft_margin_loss"),
    piece("vec,lab->num", "F.cross_entropy({0}, {1}, label_smoothing={l})", l="0.0|0.2"),
    # regions
    piece("vec->vec", "with torch.no_grad():\n    {o} = {0} * 2\n{o} = {0} + {o}"),
    piece("vec,vec->vec", "{0}.detach() * {1}.sigmoid()"),
    piece("vec->vec", "torch.utils.checkpoint.checkpoint(torch.sin, {0}, use_reentrant=False)"),
    piece("vec->vec", "torch.func.grad(lambda z: (z.sin() * z).sum())({0})"),
    piece("vec->vec", "torch.vmap(lambda z: z * z.sum().tanh())({0})"),
)

REDUCTIONS = (
    piece("seq->vec", "{0}.{f}(1)", f="mean|sum|logsumexp|amax"),
    piece("seq->vec", "{0}[:, -1]", view=True),
    piece("seq->vec", "{0}.{f}(dim=1)[0]", f="max|min|median"),
    piece("vec->row", "{0}.{f}(1)", f="sum|mean|norm|std|var|logsumexp|amax|amin|median(1).values.unsqueeze(1).sum"),
    piece("vec->row", "torch.linalg.vector_norm({0} + 2.0, ord={p}, dim=1)", p="1|2|3"),
    piece("vec->num", "{0}.{f}()", f="mean|sum|std|max|norm|min|var"),
    piece("vec->row,row", "{o}, {o1} = torch.var_mean({0}, dim=1, correction={c})", c="0|1"),
    piece("vec->vec", "{0} - {0}.{f}(0, keepdim=True)", f="mean|sum|var"),
    piece("vec->vec", "{0}.{f}", f="cumsum(1)|tanh().add(1.1).cumprod(1)|logcumsumexp(1)|cumsum(0)"),
    piece("vec->vec", "{0}.{f}(1).values", f="cummax|cummin"),
    piece("seq->vec", "({0}.softmax(1) * {0}).sum(1)"),
    piece("row->num", "{0}.{f}()", f="mean|sum|amax|logsumexp(0).clone"),
)

SHAPES = (
    piece("vec,vec->vec", "torch.cat([{0}, {1}], 1)[:, ::2]"),
    piece("half,half->vec", "torch.cat(({0}, {1}), dim=-1)"),
    piece("vec,vec->seq", "torch.stack([{0}, {1}, {0}.sin()], dim=1)"),
    piece(
        "vec->half,half",
        "{o}, {o1} = {0}.{f}",
        f="split(3, 1)|chunk(2, 1)|tensor_split(2, dim=1)|split([3, 3], dim=-1)",
        view=True,
    ),
    piece("seq->vec", "{0}.unbind(1)[0]", view=True),
    piece("vec->mat", "torch.cat([{0}, {0}[:, :3].sin()], 1).{f}(-1, 3, 3)", f="view|reshape"),
    piece("mat->vec", "{0}.{f}[:, 1:7]", f="flatten(1)|reshape(-1, 9)|mT.reshape(-1, 9)"),
    piece("row,vec->vec", "{1} + {0}.{f}", f="unsqueeze(1)|view(-1, 1)|reshape(-1, 1).expand(-1, 6)"),
    piece("num,vec->vec", "{1} * {0}.tanh()"),
    piece("vec,img->img", "{1} + {0}[:, :4, None, None]"),
    piece("img->sig", "{0}.flatten(2)[:, :, 5:13]", view=True),
    piece("sig->seq", "{0}[:, :, :6]", view=True),
    piece("sig->vol", "{0}.view(-1, 2, 4, 4)[..., None].expand(-1, -1, -1, -1, 4)"),
    piece("vol->img", "F.pad({0}.flatten(1, 2)[:, :4], (1, 1, 1, 1))"),
    piece("vec->vec", "{0}.{f}", f="flip(1)|flip(0, 1)|roll(2, 1)|roll(1, 0)|fliplr()"),
    piece(
        "img->img",
        "{0}.{f}",
        f="flip(2, 3)|roll((1, -1), (2, 3))|rot90(1, (2, 3))|transpose(2, 3)|mT|permute(0, 1, 3, 2)",
    ),
    piece("half->vec", "{0}.{f}", f="repeat(1, 2)|repeat_interleave(2, dim=1)|tile(2)"),
    piece("half,vec->vec", "({0}[:, None, :] + {1}.view(-1, 2, 3)).flatten(1)"),
    piece("mat->mat", "{0}.{f}(1)", f="tril|triu"),
    piece("seq->seq", "{0}.unflatten(2, (2, 3)).transpose(1, 2).sin().transpose(1, 2).flatten(2)"),
    piece(
        "vec->vec",
        "{0} + torch.{f}",
        f="ones_like({0})|full_like({0}, 0.3)|linspace(0, 1, 6)|arange(6)|zeros(6, 6).add(1.0)[0]|eye(6)[2]",
    ),
    piece("seq->seq", "{0} + torch.arange({0}.shape[1])[None, :, None] * 0.1"),
    piece("vec->vec", "{0}.{f}", f="to(torch.float64)|double()|type_as({0})|contiguous()|clone()|to({0})"),
)


# Views, and writes into values, also through views.
VIEWS = tuple(
    piece(kinds, code, view=True)
    for kinds, codes in {
        "vec->half": (
            "{0}[:, :3]",
            "{0}[:, ::2]",
            "{0}.narrow(1, 2, 3)",
            "{0}.view(-1, 2, 3)[:, 1]",
            "{0}.chunk(2, 1)[1]",
        ),
        "vec->row": ("{0}[:, 1]", "{0}.select(1, 0)", "{0}.T[2]", "{0}.unbind(1)[3]", "{0}.split(1, 1)[5].squeeze(1)"),
        "vec->vec": (
            "{0}.view_as({0})",
            "{0}[:]",
            "{0}.t().t()",
            "{0}.unsqueeze(1).squeeze(1)",
            "{0}.view(-1, 2, 3).flatten(1)",
            "{0}.detach()",
        ),
        "half->row": ("{0}[..., 0]", "{0}.mT[1]"),
        "seq->vec": ("{0}[:, 0]", "{0}.select(1, -1)", "{0}.transpose(0, 1)[0]"),
        "seq->seq": ("{0}[:, :, :]", "{0}.view_as({0})", "{0}.permute(0, 1, 2)", "{0}.swapaxes(1, 2).mT"),
        "img->img": ("{0}[...]", "{0}.view_as({0})", "{0}.mT.mT", "{0}.unflatten(1, (2, 2)).flatten(1, 2)"),
        "img->seq": ("{0}[:, 0]", "{0}.select(1, 2)", "{0}.diagonal(dim1=1, dim2=2).mT[:, :3]"),
        "sig->sig": ("{0}.view(-1, 4, 8)", "{0}.narrow(2, 0, 8)"),
        "mat->half": ("{0}.diagonal(dim1=1, dim2=2)", "{0}[:, 1]", "{0}[:, :, 0]"),
        "cvec->vec": ("{0}.real", "torch.view_as_real({0})[..., 1]"),
    }.items()
    for code in codes
)

_OF_VEC = (
    "{0}.relu_()",
    "{0}.mul_(0.5)",
    "{0}.add_(1.0)",
    "{0}.sin_()",
    "{0} += 0.3",
    "{0} *= 1.5",
    "{0}[:, 1:3] = 0.5",
    "{0}[:, 0] += 1",
    "{0}[0] = 0.2",
    "{0}[-1, 2:] *= 2",
    "{0}[:, ::2].mul_(0.5)",
    "{0}.t()[0].mul_(0.5)",
    "{0}.t().add_(0.1)",
    "{0}.view(-1)[::2].mul_(0.1)",
    "{0}.view(-1, 2, 3)[:, 0].sin_()",
    "{0}.diagonal().add_(1.0)",
    "{0}[:, None].squeeze(1).add_(0.2)",
    "{0}.select(1, 2).fill_(0.4)",
    "{0}.clamp_(-0.8, 0.9)",
    "{0}.masked_fill_({0} > 0.7, 0.3)",
    "{0}.index_fill_(1, torch.tensor([0, 3]), 0.6)",
    "{0}.zero_().add_(0.1)",
    "F.relu_({0})",
    "F.leaky_relu({0}, 0.2, inplace=True)",
    "F.elu({0}, inplace=True)",
    "F.dropout({0}, 0.0, self.training, inplace=True)",
    "{0}.pow_(2)",
    "{0}.sub_({0}.mean())",
    "{0}.div_(2).tanh_()",
    "{0}.t_().t_()",
    "{0}[:, [1, 4]] = 0.25",
    "{0}[torch.arange({0}.shape[0]), 0] = 0.75",
    "{0}.cumsum_(1)",
    "{0}.fill_diagonal_(0.9)",
)

_TWO = {
    "vec,vec->": (
        "{0}.add_({1})",
        "{0}.mul_({1}.sigmoid())",
        "{0} += {1}",
        "{0}.copy_({1})",
        "{0}[:, 1:3] = {1}[:, :2]",
        "{0}[:, 4].copy_({1}[:, 0])",
        "{0}.view(-1, 2, 3)[:, 1] = {1}[:, 3:]",
        "{0}.addcmul_({1}, {1}.sin(), value=0.3)",
        "{0}.lerp_({1}, 0.3)",
        "{0}[1:] = {1}[:-1]",
        "{0}.t().copy_({1}.t())",
        "{0}[:, [0, 2]] = {1}[:, :2]",
        "{0}.sub_({1}, alpha=0.5)",
    ),
    "vec,mask->": ("{0}.masked_fill_({1}, 0.3)", "{0}[{1}] = 0.1", "{0}.mul_({1})"),
    "vec,half->": (
        "{0}[:, 3:] = {1}",
        "{0}[:, 1:4] += {1}",
        "{0}.scatter_(1, torch.tensor([[0, 2, 4]]).expand({1}.shape[0], 3), {1})",
    ),
    "vec,row->": (
        "{0}[:, 2] = {1}",
        "{0}.T[1].add_({1})",
        "{0}.add_({1}[:, None])",
        "{0}.index_add_(1, torch.tensor([3]), {1}[:, None])",
    ),
    "half,half->": ("{0}.add_({1})", "{0}.copy_({1})"),
    "half,row->": ("{0}[:, 0] = {1}", "{0}.mul_({1}[:, None])"),
    "row,row->": ("{0}.add_({1})", "{0}.copy_({1}.sin())"),
    "seq,vec->": ("{0}[:, 0] = {1}", "{0}[:, -1].add_({1})", "{0} += {1}[:, None]"),
    "seq,seq->": ("{0}[:, 1:] += {1}[:, :-1]", "{0}.add_({1})", "{0}[..., :2] = {1}[..., 4:]"),
    "img,img->": ("{0} += {1}", "{0}[:, :2].copy_({1}[:, 2:])", "{0}[:, :, 1:-1, 1:-1] = {1}[:, :, :4, :4]"),
    "sig,sig->": ("{0}[:, :, ::2] = {1}[:, :, 1::2]", "{0}.mul_({1}.tanh())"),
    "mat,half->": ("{0}.diagonal(dim1=1, dim2=2).copy_({1})", "{0}[:, 1] += {1}", "{0}.mT[:, 0].copy_({1})"),
    "cvec,cvec->": ("{0}.add_({1})", "{0}[:, :2] = {1}[:, 2:4]"),
    "cvec,vec->": ("{0}.mul_({1})", "{0}.real.add_({1})", "{0}[:, 0] = {1}[:, 0]"),
}

WRITES = (
    *(piece("vec->", code, writes=True) for code in _OF_VEC),
    # The other operand as a copy: what overlaps what is written has no defined value.
    *(piece(kinds, code.replace("{1}", "{1}.clone()"), writes=True) for kinds, codes in _TWO.items() for code in codes),
    *(
        piece(f"{kind}->", code, writes=True)
        for kind, codes in {
            "half": ("{0}.neg_()", "{0}[:, 0].add_(1)", "{0}.tanh_()"),
            "row": ("{0}.mul_(2)", "{0}[0] = 0.5", "{0}.sigmoid_()"),
            "seq": (
                "{0}[:, 0].zero_()",
                "{0}[:, :, 1:3] *= 2",
                "{0}.transpose(1, 2)[:, 0].add_(0.3)",
                "F.gelu({0}).add_({0})",
            ),
            "img": (
                "{0}.relu_()",
                "{0}[:, 0].mul_(0.5)",
                "{0}[:, :, ::2, 1:3] = 0.0",
                "{0}.flatten(2)[:, :, :4].sin_()",
                "F.hardtanh_({0})",
            ),
            "sig": ("{0}.tanh_()", "{0}.permute(2, 0, 1)[3].fill_(0.2)"),
            "mat": ("{0}.diagonal(dim1=1, dim2=2).add_(1.0)", "{0}.tril_()", "{0}.mT.mul_(0.5)"),
        }.items()
        for code in codes
    ),
    piece("vec,vec->vec", "{o} = {0}.clone()\n{o}[:, 2:4] = {1}[:, :2]\n{o}.mul_({0}.sigmoid())"),
    piece("seq->seq", "{o} = torch.zeros_like({0})\n{o}[:, 0] = {0}[:, -1]\n{o}[:, 1:] += {0}[:, :-1] * 0.5"),
    piece("vec->vec", "{o} = torch.empty_like({0})\nfor k in range(6):\n    {o}[:, k] = {0}[:, 5 - k] * k"),
    piece("vec->vec", "{o} = {0}.new_zeros({0}.shape[0], 6)\n{o}[:, :3].copy_({0}[:, 3:])\n{o}[:, 3:] += {o}[:, :3]"),
    piece("vec->row", "{o} = {0} * 1.0\nbase, {o} = {o}, {o}[:, 1]\nbase.mul_(3.0)"),
    piece("vec->half", "part = {0}.clone()\n{o} = part[:, :3]\npart[:, 1].add_({0}[:, 5])"),
)


# Pieces with state: submodules of torch.nn, parameters, buffers, attributes, and code that no graph holds.

# Submodules of torch.nn.
P = "0.0|1.0"

LAYERS = (
    *(
        piece(kinds, module=module)
        for kinds, module in (
            ("vec->vec", "nn.Linear(6, 6)"),
            ("vec->vec", "nn.Linear(6, 6, bias=False)"),
            ("seq->seq", "nn.Linear(6, 6)"),
            ("half->half", "nn.Linear(3, 3)"),
            ("vec->half", "nn.Linear(6, 3)"),
            ("half->vec", "nn.Linear(3, 6)"),
            ("sig->sig", "nn.Conv1d(4, 4, 3, padding=1)"),
            ("sig->sig", "nn.Conv1d(4, 4, 1)"),
            ("sig->sig", 'nn.Conv1d(4, 4, 4, padding="same")'),
            ("sig->sig", 'nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect")'),
            ("sig->sig", "nn.Conv1d(4, 4, 3, padding=2, dilation=2, groups=2)"),
            ("img->img", "nn.Conv2d(4, 4, 3, padding=1)"),
            ("img->img", "nn.Conv2d(4, 4, 3, padding=1, bias=False)"),
            ("img->img", "nn.Conv2d(4, 4, 1)"),
            ("img->img", "nn.Conv2d(4, 4, 3, padding=1, groups=4)"),
            ("img->img", 'nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")'),
            ("img->img", "nn.Conv2d(4, 4, (1, 3), padding=(0, 1))"),
            ("vol->vol", "nn.Conv3d(2, 2, 3, padding=1)"),
            ("vol->vol", "nn.Conv3d(2, 2, 1, groups=2)"),
            ("sig->sig", "nn.ConvTranspose1d(4, 4, 3, padding=1)"),
            ("img->img", "nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2)"),
            ("vol->vol", "nn.ConvTranspose3d(2, 2, 3, padding=1)"),
            ("vec->vec", "nn.BatchNorm1d(6)"),
            ("sig->sig", "nn.BatchNorm1d(4)"),
            ("img->img", "nn.BatchNorm2d(4)"),
            ("vol->vol", "nn.BatchNorm3d(2)"),
            ("img->img", "nn.BatchNorm2d(4, affine=False, track_running_stats=False)"),
            ("vec->vec", "nn.BatchNorm1d(6, momentum=None)"),
            ("sig->sig", "nn.InstanceNorm1d(4, affine=True)"),
            ("img->img", "nn.InstanceNorm2d(4, track_running_stats=True)"),
            ("seq->seq", "nn.LayerNorm(6)"),
            ("img->img", "nn.LayerNorm([4, 6, 6], elementwise_affine=False)"),
            ("img->img", "nn.GroupNorm(2, 4)"),
            ("sig->sig", "nn.GroupNorm(1, 4)"),
            ("img->img", "nn.LocalResponseNorm(3)"),
            ("sig->sig", "nn.MaxPool1d(3, stride=1, padding=1)"),
            ("img->img", "nn.MaxPool2d(3, stride=1, padding=1)"),
            ("vol->vol", "nn.MaxPool3d(3, stride=1, padding=1)"),
            ("sig->sig", "nn.AvgPool1d(3, stride=1, padding=1)"),
            ("img->img", "nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)"),
            ("vol->vol", "nn.AvgPool3d(3, stride=1, padding=1)"),
            ("sig->sig", "nn.Sequential(nn.Softplus(), nn.LPPool1d(2, 3, stride=1), nn.ReplicationPad1d(1))"),
            ("sig->sig", "nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Upsample(scale_factor=2))"),
            ("img->img", "nn.Sequential(nn.AdaptiveMaxPool2d(3), nn.Upsample(scale_factor=2.0))"),
            ("img->img", "nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.PixelShuffle(2), nn.Conv2d(2, 4, 1))"),
            ("img->img", "nn.Sequential(nn.PixelUnshuffle(2), nn.ConvTranspose2d(16, 4, 2, stride=2))"),
            ("img->img", "nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3))"),
            ("img->img", "nn.Sequential(nn.ZeroPad2d((1, 1, 0, 0)), nn.Conv2d(4, 4, (1, 3)))"),
            ("sig->sig", "nn.Sequential(nn.ConstantPad1d((2, 0), 0.3), nn.Conv1d(4, 4, 3))"),
            ("img->img", "nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((6, 6), 2, stride=2))"),
            ("img->img", 'nn.Sequential(nn.AvgPool2d(2), nn.Upsample((6, 6), mode="bilinear"))'),
            ("img->img", "nn.ChannelShuffle(2)"),
            ("vec->vec", "torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))"),
            ("vec->vec", "torch.nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))"),
            ("vec->vec", "nn.Identity()"),
            ("img->vec", "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))"),
            ("sig->vec", "nn.Sequential(nn.Flatten(), nn.Linear(32, 6))"),
            ("vol->vec", "nn.Sequential(nn.Flatten(), nn.Linear(128, 6))"),
            ("vec->img", "nn.Sequential(nn.Linear(6, 144), nn.Unflatten(1, (4, 6, 6)))"),
            ("vec->sig", "nn.Sequential(nn.Linear(6, 32), nn.Unflatten(1, (4, 8)))"),
            ("vec->vol", "nn.Sequential(nn.Linear(6, 128), nn.Unflatten(-1, (2, 4, 4, 4)))"),
            ("ids->seq", "nn.Embedding(5, 6)"),
            ("ids->seq", "nn.Embedding(5, 6, padding_idx=1)"),
            ("ids->seq", "nn.Embedding(5, 6, scale_grad_by_freq=True)"),
            ("ids->seq", "nn.Embedding(5, 6, max_norm=1.0)"),
            ("lab->vec", "nn.Embedding(6, 6)"),
        )
    ),
    piece("ids->vec", module='nn.EmbeddingBag(5, 6, mode="{mode}")', mode="sum|mean|max"),
    piece("vec->vec", module="torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))"),
    piece("vec->vec", module="nn.BatchNorm1d(6, eps={each_e})", each_e="1e-5|1e-3|0.1"),
    piece("img->img", module="nn.BatchNorm2d(4, momentum={each_m})", each_m="0.1|0.3|0.9"),
    piece("vec->vec", module="nn.LayerNorm(6, eps={each_e})", each_e="1e-5|1e-3|0.1"),
    piece("vec->vec", module="nn.Dropout({p})", p=P),
    piece("seq->seq", module="nn.Dropout({each_p})", each_p=P),
    piece("seq->seq", module="nn.Dropout({p}, inplace=True)", p=P),
    piece("sig->sig", module="nn.Dropout1d({p})", p=P),
    piece("vec->vec", module="nn.AlphaDropout({p})", p="0.0"),
    piece("seq->seq", "{o}, _ = {s}({0})", module='nn.RNN(6, 6, batch_first=True, nonlinearity="{k}")', k="tanh|relu"),
    piece("seq->seq", "{o}, _ = {s}({0})", module="nn.LSTM(6, 6, batch_first=True)"),
    piece("seq->seq", "{o}, _ = {s}({0})", module="nn.LSTM(6, 3, batch_first=True, bidirectional=True)"),
    piece("seq->seq", "{o}, _ = {s}({0})", module="nn.GRU(6, 6, batch_first=True)"),
    piece("vec,vec->vec,vec", "{o}, {o1} = {s}({0}, ({1}, {1}))", module="nn.LSTMCell(6, 6)"),
    piece("vec,vec->vec", "{s}({0}, {1})", module="nn.GRUCell(6, 6)"),
    piece(
        "seq->seq",
        "{o}, _ = {s}({0}, {0}, {0}, need_weights={w})",
        module="nn.MultiheadAttention(6, {h}, batch_first=True)",
        h="2|3",
        w="True|False",
    ),
    piece(
        "seq->seq",
        module='nn.TransformerEncoderLayer(6, 2, 8, 0.0, activation="{a}", batch_first=True, norm_first={f})',
        a="relu|gelu",
        f="True|False",
    ),
)

# Without Hardsigmoid: its eager gradient takes a sixth rounded to float32 in float64, too, and a compiled one does not.
ACTIVATIONS = (
    *(
        piece(f"{kind}->{kind}", module=f"nn.{name}()")
        for kind, names in {
            "vec": "ReLU Tanh Sigmoid GELU SiLU ELU SELU CELU Mish Softplus Softsign Hardswish PReLU LogSigmoid",
            "img": "ReLU ReLU6 Hardtanh Hardswish LeakyReLU PReLU Softshrink Tanhshrink Mish RReLU",
            "seq": "GELU ELU SiLU Hardshrink Tanh Softplus",
            "sig": "ReLU LeakyReLU CELU Sigmoid",
            "vol": "ReLU SELU",
        }.items()
        for name in names.split()
        if name != "RReLU"
    ),
    piece("vec->vec", module="nn.ReLU(inplace=True)", writes=True, view=True),
    piece("img->img", module="nn.Hardswish(inplace=True)", writes=True, view=True),
    piece("vec->vec", module="nn.LeakyReLU({each_a})", each_a="0.01|0.2|0.5"),
    piece("img->img", module="nn.LeakyReLU({each_a}, inplace=True)", each_a="0.01|0.2", writes=True, view=True),
    piece("vec->vec", module="nn.ELU({each_a})", each_a="1.0|0.5|2.0"),
    piece("img->img", module="nn.PReLU(4, init={each_a})", each_a="0.25|0.1"),
    piece("seq->seq", module="nn.Softmax({d})", d="-1|1"),
    piece("vec->vec", module="nn.LogSoftmax(1)"),
    piece("vec->vec", module="nn.RReLU(0.2, 0.2)"),
)


# Parameters, buffers, attributes; and code that cannot be captured in a graph.
_BUFFER = 'self.register_buffer("{s}", torch.{f}(6))'
COUNT = 'self.register_buffer("{s}", torch.tensor(0))'

STATE = (
    piece("vec->vec", "{0} * {s}", init="self.{s} = nn.Parameter(torch.randn(6))"),
    piece("vec->vec", "{0} @ {s}", init="self.{s} = nn.Parameter(torch.randn(6, 6) / 3)"),
    piece("vec->vec", "{0} + {s}", init="self.{s} = nn.Parameter(torch.randn(6), requires_grad=False)"),
    piece("seq->seq", "{0} + {s}[: {0}.shape[1]]", init="self.{s} = nn.Parameter(torch.randn(20, 6) * 0.1)"),
    piece(
        "vec->vec",
        "{o} = {0}\nfor w in {s}:\n    {o} = {o} * w",
        init="self.{s} = nn.ParameterList([torch.randn(6) for _ in range(2)])",
    ),
    piece("vec->vec", "{0} + {s}", init=_BUFFER, f="randn|arange"),
    piece("vec->vec", "{0} * {s}", init="self.{s} = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.2, 0.3]){v}", v="| * (b + 1)"),
    piece(
        "vec->vec",
        "with torch.no_grad():\n    {s}.mul_(0.9).add_({0}.mean(0), alpha=0.1)\n{o} = {0} - {s}",
        init=_BUFFER,
        f="zeros",
    ),
    piece("vec->vec", "{o} = {0} + {s}\n{s}.copy_({0}.detach()[0])", init=_BUFFER, f="zeros"),
    piece("vec->vec", "{s} += 1\n{o} = {0} / ({s} + 1)", init=COUNT),
    piece("vec->vec", "{s} = {s} * 0.5 + {0}.detach().mean(0)\n{o} = {0} - {s}", init=_BUFFER, f="zeros"),
    piece(
        "vec->vec",
        "part = {s}[1:4]\n{o} = {0} + {s}\npart.add_({0}.detach()[0, :3])\n{o} = {o} * {s}",
        init=_BUFFER,
        f="ones",
    ),
    piece(
        "vec->vec",
        "{o} = {s}[torch.cdist({0}, {s}).argmin(1)]\n{o} = {0} + ({o} - {0}).detach()",
        init='self.register_buffer("{s}", torch.randn(5, 6))',
    ),
    piece(
        "seq->seq",
        "({0} @ {0}.mT).masked_fill({s}[: {0}.shape[1], : {0}.shape[1]], -1e9).softmax(-1) @ {0}",
        init='self.register_buffer("{s}", torch.ones(20, 20, dtype=torch.bool).triu(1))',
    ),
    piece("vec->vec", "{0} * {s}", init="self.{s} = {each_a}", each_a="0.5|1.0|2.0"),
    piece("vec->vec", "({0}.abs() + 0.5) ** {s}", init="self.{s} = {each_a}", each_a="0.5|1.5"),
    piece("vec->row", "{0}[:, {s}]", init="self.{s} = {each_a}", each_a="1|2"),
    piece("vec->vec", "{0}.roll({s}, 1)", init="self.{s} = {each_a}", each_a="1|2"),
    piece("vec->vec", "F.linear({0}, {s}.weight.t()) + {s}({0})", init="self.{s} = nn.Linear(6, 6)"),
)

ISLANDS = (
    piece("vec->vec", "if {0}.sum() > 0:\n    {o} = {0} * 2\nelse:\n    {o} = {0}.sin()", island=True),
    piece("vec->vec", "{0} * float({0}.detach().abs().mean())", island=True),
    piece("vec->num", "{0}.flatten()[({0} > 0).flatten().nonzero()[:, 0]].sum()", island=True),
    piece("vec->vec", "if {0}.sum() > 0:\n    {s}.add_(1)\n{o} = {0} + {s}", init=COUNT, island=True),
    piece(
        "vec->vec",
        "{0} * {s} if {0}.sum() > 0 else {0} - 0.5 * {s}",
        init="self.{s} = nn.Parameter(torch.randn(6))",
        island=True,
    ),
    piece("vec->", "if {0}.sum() > 0:\n    {0}.mul_(0.5)\nelse:\n    {0}[:, 0] = 0.1", island=True, writes=True),
    piece("img->img", "{0} * 2 if {0}.mean() > 0 else {0} + 0.2", island=True),
)
