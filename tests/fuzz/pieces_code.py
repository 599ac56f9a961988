"""Pieces that are code: functions of tensors, Python beside them, views and writes."""

from __future__ import annotations

from typing import Any

from tests.fuzz.program import Piece


# Rows of the tables of pieces.
def piece(
    name: str, kinds: str, code: str = "{o} = {s}({0})", *, module: str = "", init: str = "", **more: Any
) -> Piece:
    """``kinds`` reads ``takes->gives``; other keywords than fields of `Piece` are placeholders and choices, ``a|b``."""
    takes, gives = (tuple(filter(None, part.split(","))) for part in kinds.split("->"))
    flags = {name: more.pop(name) for name in ("view", "writes", "island") if name in more}
    choices = {key: tuple(text.split("|")) for key, text in more.items()}
    return Piece(name, takes, gives, code, module, init, choices, **flags)


# Functions of tensors, which have no state.
FUNCTIONS = (
    # of one or two values of one kind
    piece("add", "vec,vec->vec", "{o} = {0} + {1}"),
    piece("residual of img", "img,img->img", "{o} = {0} + {1}"),
    piece("residual of seq", "seq,seq->seq", "{o} = {0} + {1}"),
    piece("residual of sig", "sig,sig->sig", "{o} = {0} - {1}"),
    piece("add with alpha", "vec,vec->vec", "{o} = torch.add({0}, {1}, alpha={a})", a="2|0.5"),
    piece("gate", "vec,vec->vec", "{o} = {0} * torch.sigmoid({1})"),
    piece("gate of seq", "seq,seq->seq", "{o} = torch.tanh({0}) * {1}.sigmoid()"),
    piece("gate of channels", "img,img->img", "{o} = {0} * {1}.mean((2, 3), keepdim=True).sigmoid()"),
    piece("divide", "vec,vec->vec", "{o} = {0} / (1.5 + {1}.abs())"),
    piece("remainder", "vec->vec", "{o} = torch.remainder({0}, {m})", m="2.0|3.5"),
    piece("floor divide", "vec->vec", "{o} = {0} - ({0} / 1.3).floor()"),
    piece("powers", "vec->vec", "{o} = {0}.abs().add(0.5).pow({e})", e="2|0.5|-1|3"),
    piece("power of base", "vec->vec", "{o} = 2.0 ** {0}.tanh()"),
    piece("exp and log", "vec->vec", "{o} = {0}.tanh().exp().log1p()"),
    piece("trigonometry", "vec->vec", "{o} = {0}.{f}()", f="sin|cos|atan|sinc|erf|tanh|sigmoid|asinh"),
    piece("arcs", "vec->vec", "{o} = (0.9 * {0}.tanh()).{f}()", f="asin|acos|atanh|erfinv|tan|sinh|cosh|expm1"),
    piece("gammas", "vec->vec", "{o} = torch.{f}({0}.sigmoid() + 1.0)", f="lgamma|digamma|special.i0e|rsqrt|log2|sqrt"),
    piece("atan2", "vec,vec->vec", "{o} = torch.atan2({0}, {1}.abs() + 0.5)"),
    piece("hypot", "vec,vec->vec", "{o} = torch.hypot({0}, {1} + 3.0)"),
    piece("logaddexp", "vec,vec->vec", "{o} = torch.logaddexp({0}, {1})"),
    piece("extreme of two", "vec,vec->vec", "{o} = torch.{f}({0}, {1} * 0.5)", f="maximum|minimum|fmax|fmin"),
    piece("lerp", "vec,vec->vec", "{o} = torch.lerp({0}, {1}, {w})", w="0.3|torch.sigmoid({0})"),
    piece("addcmul", "vec,vec->vec", "{o} = torch.addcmul({0}, {1}.tanh(), {0}.sin(), value=0.5)"),
    piece("addcdiv", "vec,vec->vec", "{o} = torch.addcdiv({0}, {1}, {0}.abs() + 1.0)"),
    piece("clamp", "vec->vec", "{o} = {0}.clamp({lo}, {hi})", lo="-0.5|None", hi="0.7|1.1"),
    piece("clamp by value", "vec,vec->vec", "{o} = torch.clamp({0}, max={1} * 0.5 + 0.1)"),
    piece("round", "vec->vec", "{o} = {0} + {0}.{f}()", f="round|floor|ceil|trunc|sign|frac"),
    piece("nan to num", "vec->vec", "{o} = torch.nan_to_num({0})"),
    piece(
        "functional relu", "seq->seq", "{o} = F.{f}({0})", f="relu|relu6|gelu|silu|mish|hardtanh|softsign|logsigmoid"
    ),
    piece(
        "functional slopes",
        "img->img",
        "{o} = F.{f}",
        f="leaky_relu({0}, 0.3)|elu({0}, 0.5)|threshold({0}, 0.1, 0.2)|softplus({0}, 2)",
    ),
    piece("functional softmax", "seq->seq", "{o} = F.{f}({0}, dim={d})", f="softmax|log_softmax|softmin", d="-1|1|2"),
    piece("functional dropout", "vec->vec", "{o} = F.{f}({0}, {p}, self.training)", f="dropout|alpha_dropout", p="0.0"),
    piece("functional dropout of all", "vec->vec", "{o} = {0} + F.dropout({0}, 1.0, self.training)"),
    piece("functional norms", "seq->seq", "{o} = F.layer_norm({0}, (6,))"),
    piece("normalize", "vec->vec", "{o} = F.normalize({0} + 0.1, dim={d}, p={p})", d="1|0", p="2.0|1.0"),
    piece("glu", "vec->half", "{o} = F.glu({0}, 1)"),
    # matrices
    piece("matmul of seq", "seq,seq->seq", "{o} = ({0} @ {1}.transpose(1, 2)).softmax(-1) @ {1}"),
    piece("bmm", "mat,mat->mat", "{o} = torch.bmm({0}, {1}).tanh()"),
    piece("baddbmm", "mat,mat->mat", "{o} = torch.baddbmm({0}, {0}, {1}, alpha=0.2)"),
    piece("gram", "vec->vec", "{o} = ({0} @ {0}.t()).div(6) @ {0}"),
    piece("addmm", "vec,vec->vec", "{o} = torch.addmm({0}, {0}.sin(), {1}.t() @ {1}, alpha=0.1)"),
    piece("outer", "half->mat", "{o} = {0}[:, :, None] * {0}[:, None, :]"),
    piece("einsum", "vec,vec->row", '{o} = torch.einsum("ni,ni->n", {0}, {1})'),
    piece("einsum of seq", "seq,vec->seq", '{o} = torch.einsum("nti,ni,ntj->ntj", {0}, {1}, {0}.sin())'),
    piece("einsum of samples", "vec,vec->vec", '{o} = torch.einsum("ni,mi,mj->nj", {0}, {1}, {0}).tanh()'),
    piece("tensordot", "seq,mat->seq", "{o} = torch.tensordot({0}, {1}.mean(0).repeat(2, 2), dims=([2], [0]))"),
    piece("matrix times vector", "mat,half->half", "{o} = ({0} @ {1}[:, :, None]).squeeze(-1)"),
    piece("kron", "mat->num", "{o} = torch.kron({0}[0], {0}[0]).mean()"),
    piece("cdist", "seq,seq->seq", "{o} = torch.cdist({0}, {1} + 5.0).softmax(-1) @ {1}"),
    piece("cross", "half,half->half", "{o} = torch.linalg.cross({0}, {1}, dim=1)"),
    piece(
        "attention",
        "seq->seq",
        "{o} = F.scaled_dot_product_attention({0}, {0}.sin(), {0}, is_causal={c})",
        c="True|False",
    ),
    piece(
        "attention with mask",
        "seq,seq->seq",
        "{o} = F.scaled_dot_product_attention({0}, {1}, {1}, attn_mask={0} @ {1}.mT)",
    ),
    piece("solve", "mat,half->half", "{o} = torch.linalg.solve({0}.tanh() + 4 * torch.eye(3), {1})"),
    piece("inverse", "mat->mat", "{o} = torch.linalg.inv({0}.tanh() + 4 * torch.eye(3))"),
    piece("determinant", "mat->row", "{o} = torch.linalg.{f}({0}.tanh() + 4 * torch.eye(3)).div(64)", f="det"),
    piece("log determinant", "mat->row", "{o} = torch.slogdet({0}.tanh() + 4 * torch.eye(3))[1]"),
    piece("cholesky", "mat->mat", "{o} = torch.linalg.cholesky({0} @ {0}.mT + torch.eye(3))"),
    piece(
        "triangular solve",
        "mat->mat",
        "{o} = torch.linalg.solve_triangular({0}.tanh().tril() + 3 * torch.eye(3), {0}, upper=False)",
    ),
    piece(
        "eigenvalues",
        "mat->half",
        "{o} = torch.linalg.eigvalsh({0} + {0}.mT + torch.diag(torch.tensor([0.0, 5.0, 10.0])))",
    ),
    piece("matrix exponential", "mat->mat", "{o} = torch.matrix_exp({0}.tanh())"),
    piece("qr", "mat->mat", "{o} = torch.linalg.qr({0}.tanh() + 4 * torch.eye(3))[1]"),
    piece("svd", "mat->half", "{o} = torch.linalg.svdvals({0}.tanh() + torch.diag(torch.tensor([2.0, 5.0, 9.0])))"),
    # masks, choices, indices
    piece("compare", "vec,vec->mask", "{o} = {0} {c} {1} + 0.01", c=">|<|>=|!="),
    piece("combine masks", "mask,mask->mask", "{o} = {0} {c} ~{1}", c="&|^"),
    piece("where", "mask,vec,vec->vec", "{o} = torch.where({0}, {1}, {2})"),
    piece("where with number", "mask,vec->vec", "{o} = torch.where({0}, {1}, 0.5)"),
    piece("masked fill", "vec,mask->vec", "{o} = {0}.masked_fill({1}, {v})", v="0.0|-1.5"),
    piece("as number", "mask->vec", "{o} = {0}.to({t}).double()", t="torch.float64|torch.int64|torch.uint8"),
    piece("count", "mask->row", "{o} = {0}.sum(1) / 6"),
    piece("argmax", "vec->lab", "{o} = {0}.argmax(1)"),
    piece("argsort", "vec->lab", "{o} = {0}.argsort(1)[:, 0]"),
    piece("topk", "vec->half", "{o} = {0}.topk(3, dim=1).values"),
    piece("sort", "vec->vec", "{o}, _ = {0}.sort(1, descending={d})", d="True|False"),
    piece("sort and gather", "vec,vec->vec", "{o} = {0}.gather(1, {1}.sort(1).indices)"),
    piece("take along", "vec,lab->row", "{o} = {0}.gather(1, {1}[:, None])[:, 0]"),
    piece("take along dim", "vec,vec->vec", "{o} = torch.take_along_dim({0}, {1}.argsort(1), dim=1)"),
    piece("index by samples", "vec->vec", "{o} = {0}[torch.arange({0}.shape[0]).flip(0)]"),
    piece("index select", "seq->seq", "{o} = {0}.index_select(2, torch.tensor([5, 0, 1, 1, 2, 3]))"),
    piece("index of two", "vec,lab->row", "{o} = {0}[torch.arange({0}.shape[0]), {1}]"),
    piece("scatter", "vec,half->vec", "{o} = {0}.scatter(1, {0}.topk(3, 1).indices, {1})"),
    piece("scatter add", "vec,half->vec", "{o} = {0}.scatter_add(1, torch.zeros_like({1}, dtype=torch.long), {1})"),
    piece("index add", "vec->vec", "{o} = {0}.index_add(1, torch.tensor([1, 1, 3]), {0}[:, :3])"),
    piece(
        "index put", "vec->vec", "{o} = {0}.index_put((torch.tensor([0, 1]), torch.tensor([2, 3])), torch.tensor(0.7))"
    ),
    piece(
        "index put added",
        "vec,row->vec",
        "rows = torch.arange({0}.shape[0])\n{o} = {0}.index_put((rows, rows * 0), {1}, accumulate=True)",
    ),
    piece("one hot", "lab->vec", "{o} = F.one_hot({0}, 6).double()"),
    piece(
        "functional embedding",
        "ids,mat->seq",
        "{o} = F.embedding({0}, torch.cat([{1}[:2].reshape(-1, 6), torch.ones(4, 6)]))",
    ),
    piece("searchsorted", "vec->vec", "{o} = {0} + torch.searchsorted(torch.tensor([-1.0, 0.1, 0.9]), {0}.detach())"),
    piece("bucketize", "vec->vec", "{o} = {0} * torch.bucketize({0}, torch.tensor([-0.5, 0.5]))"),
    # complex numbers and spectra
    piece("complex", "vec,vec->cvec", "{o} = torch.complex({0}, {1})"),
    piece("polar", "vec,vec->cvec", "{o} = torch.polar({0}.sigmoid(), {1})"),
    piece("to complex", "vec->cvec", "{o} = {0}.to(torch.complex128) * (1 + 2j)"),
    piece("complex product", "cvec,cvec->cvec", "{o} = {0} * {1}.conj() / (1 + {1}.abs())"),
    piece("complex parts", "cvec->vec", "{o} = {0}.{p}", p="real|imag|abs()"),
    piece("complex angle", "cvec->vec", "{o} = ({0} + 9).angle()"),
    piece("complex exp", "cvec->cvec", "{o} = torch.exp({0} / (1 + {0}.abs()))"),
    piece("fft", "cvec->cvec", '{o} = torch.fft.{f}({0}, norm="ortho")', f="fft|ifft"),
    piece("fft of reals", "vec->cvec", "{o} = torch.fft.fft({0}, dim={d})", d="1|-1"),
    piece(
        "rfft and back",
        "seq->seq",
        "{o} = torch.fft.irfft(torch.fft.rfft({0}, dim=2) * torch.tensor([1.0, 0.5, 0.0, 0.2]), n=6, dim=2)",
    ),
    piece("fft2 and back", "img->img", "{o} = torch.fft.ifft2(torch.fft.fftshift(torch.fft.fft2({0}))).real"),
    piece("view as real", "cvec->vec", "{o} = torch.view_as_real({0}).flatten(1)[:, 3:9]"),
    # images and signals
    piece(
        "interpolate",
        "img->img",
        '{o} = F.interpolate(F.avg_pool2d({0}, 2), size={0}.shape[2:], mode="{m}")',
        m="nearest|bilinear|bicubic|area",
    ),
    piece(
        "interpolate by factor",
        "sig->sig",
        '{o} = F.interpolate({0}[:, :, ::2], scale_factor=2.0, mode="{m}")',
        m="nearest|linear",
    ),
    piece(
        "grid sample",
        "img->img",
        "grid = F.affine_grid(torch.eye(2, 3).mul(0.7).expand({0}.shape[0], 2, 3), {0}.shape, align_corners=False)\n"
        "{o} = F.grid_sample({0}, grid, align_corners=False)",
    ),
    piece("unfold", "img->vec", "{o} = F.unfold({0}, 3, stride=3).mean(1)[:, [0, 1, 2, 3, 0, 1]]"),
    piece("fold", "img->img", "{o} = F.fold(F.unfold({0}, 3, padding=1), (6, 6), 3, padding=1) / 9"),
    piece("unfold of tensor", "seq->seq", "{o} = {0}.unfold(2, 2, 2).sum(-1).repeat(1, 1, 2)"),
    piece("pools", "img->img", "{o} = F.{f}_pool2d({0}, 2).repeat_interleave(2, 2).repeat(1, 1, 1, 2)", f="max|avg"),
    piece("adaptive pools", "img->img", "{o} = {0} + F.adaptive_{f}_pool2d({0}, 1)", f="avg|max"),
    piece("functional conv", "img->img", "{o} = F.conv2d({0}, torch.ones(4, 1, 1, 1) * {0}.std(), groups=4)"),
    piece(
        "conv by own weights", "sig,sig->sig", "{o} = F.conv1d({0}, {1}[:1, :, :3].tanh().repeat(4, 1, 1), padding=1)"
    ),
    piece("pixel shuffle", "img->img", "{o} = F.pixel_shuffle(F.pixel_unshuffle({0}, 3).sin(), 3)"),
    piece(
        "pad",
        "sig->sig",
        '{o} = F.pad({0}, (1, 1), mode="{m}")[:, :, 1:-1] + F.pad({0}, (2, -2))',
        m="reflect|replicate|circular|constant",
    ),
    # losses as values
    piece(
        "mse", "vec,vec->num", "{o} = F.{f}({0}, {1})", f="mse_loss|l1_loss|smooth_l1_loss|huber_loss|soft_margin_loss"
    ),
    piece("cross entropy inside", "vec,lab->num", "{o} = F.cross_entropy({0}, {1}, label_smoothing={l})", l="0.0|0.2"),
    piece("losses of rows", "vec,lab->row", '{o} = F.cross_entropy({0}, {1}, reduction="none")'),
    piece("kl", "vec,vec->num", '{o} = F.kl_div(F.log_softmax({0}, 1), F.softmax({1}, 1), reduction="batchmean")'),
    piece("bce", "vec,vec->num", "{o} = F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())"),
    # regions
    piece("no grad", "vec->vec", "with torch.no_grad():\n    {o} = {0} * 2\n{o} = {0} + {o}"),
    piece("detach", "vec,vec->vec", "{o} = {0}.detach() * {1}.sigmoid()"),
    piece("checkpoint", "vec->vec", "{o} = torch.utils.checkpoint.checkpoint(torch.sin, {0}, use_reentrant=False)"),
    piece("inner gradient", "vec->vec", "{o} = torch.func.grad(lambda z: (z.sin() * z).sum())({0})"),
    piece("inner vmap", "vec->vec", "{o} = torch.vmap(lambda z: z * z.sum().tanh())({0})"),
)

REDUCTIONS = (
    piece("mean of seq", "seq->vec", "{o} = {0}.{f}(1)", f="mean|sum|logsumexp|amax"),
    piece("last of seq", "seq->vec", "{o} = {0}[:, -1]", view=True),
    piece("max of seq", "seq->vec", "{o} = {0}.{f}(dim=1)[0]", f="max|min|median"),
    piece("mean of img", "img->sig", "{o} = {0}.mean(3)[:, :, [0, 1, 2, 3, 4, 5, 0, 1]]"),
    piece(
        "sum of vec",
        "vec->row",
        "{o} = {0}.{f}(1)",
        f="sum|mean|norm|std|var|logsumexp|amax|amin|median(1).values.unsqueeze(1).sum",
    ),
    piece("prod", "vec->row", "{o} = ({0}.tanh() + 1.2).prod(1)"),
    piece("norms", "vec->row", "{o} = torch.linalg.vector_norm({0} + 2.0, ord={p}, dim=1)", p="1|2|3"),
    piece("all of it", "vec->num", "{o} = {0}.{f}()", f="mean|sum|std|max|norm|min|var"),
    piece("var and mean", "vec->row,row", "{o}, {o1} = torch.var_mean({0}, dim=1, correction={c})", c="0|1"),
    piece("over samples", "vec->vec", "{o} = {0} - {0}.{f}(0, keepdim=True)", f="mean|sum|var"),
    piece("amax over samples", "vec->vec", "{o} = {0} - {0}.amax(0)"),
    piece(
        "cumulative", "vec->vec", "{o} = {0}.{f}", f="cumsum(1)|tanh().add(1.1).cumprod(1)|logcumsumexp(1)|cumsum(0)"
    ),
    piece("cummax", "vec->vec", "{o} = {0}.{f}(1).values", f="cummax|cummin"),
    piece("diff", "vec->vec", "{o} = torch.diff({0}, dim=1, prepend={0}[:, :1])"),
    piece("quantile", "vec->row", "{o} = {0}.quantile(0.4, dim=1)"),
    piece("kthvalue", "vec->row", "{o} = {0}.kthvalue(2, dim=1).values"),
    piece("softmax pooling", "seq->vec", "{o} = ({0}.softmax(1) * {0}).sum(1)"),
    piece("number over rows", "row->num", "{o} = {0}.{f}()", f="mean|sum|amax|logsumexp(0).clone"),
    piece("trace", "mat->row", "{o} = {0}.diagonal(dim1=1, dim2=2).sum(-1)"),
    piece("any and all", "mask->row", "{o} = {0}.any(1).double() - {0}.all(1).double()"),
)

SHAPES = (
    piece("cat and linear", "vec,vec->vec", "{o} = torch.cat([{0}, {1}], 1)[:, ::2]"),
    piece("cat of halves", "half,half->vec", "{o} = torch.cat(({0}, {1}), dim=-1)"),
    piece("cat of samples", "vec,vec->vec", "{o} = torch.cat([{0}, {1}])[: {0}.shape[0]]"),
    piece("stack", "vec,vec->seq", "{o} = torch.stack([{0}, {1}, {0}.sin()], dim=1)"),
    piece(
        "split",
        "vec->half,half",
        "{o}, {o1} = {0}.{f}",
        f="split(3, 1)|chunk(2, 1)|tensor_split(2, dim=1)|split([3, 3], dim=-1)",
        view=True,
    ),
    piece("unbind", "seq->vec", "{o} = {0}.unbind(1)[0]", view=True),
    piece("unbind of vec", "vec->row,row", "{o}, _, {o1}, _, _, _ = {0}.unbind(1)", view=True),
    piece("reshape to mat", "vec->mat", "{o} = torch.cat([{0}, {0}[:, :3].sin()], 1).{f}(-1, 3, 3)", f="view|reshape"),
    piece("mat to vec", "mat->vec", "{o} = {0}.{f}[:, 1:7]", f="flatten(1)|reshape(-1, 9)|mT.reshape(-1, 9)"),
    piece(
        "row to vec", "row,vec->vec", "{o} = {1} + {0}.{f}", f="unsqueeze(1)|view(-1, 1)|reshape(-1, 1).expand(-1, 6)"
    ),
    piece("number to vec", "num,vec->vec", "{o} = {1} * {0}.tanh()"),
    piece("vec to seq", "vec,seq->seq", "{o} = {0}[:, None].expand(-1, {1}.shape[1], -1) + {1}"),
    piece("add to channels", "vec,img->img", "{o} = {1} + {0}[:, :4, None, None]"),
    piece("img to sig", "img->sig", "{o} = {0}.flatten(2)[:, :, 5:13]", view=True),
    piece("sig to seq", "sig->seq", "{o} = {0}[:, :, :6]", view=True),
    piece("sig transposed", "sig->seq", "{o} = {0}.transpose(1, 2)[:, :, [0, 1, 2, 3, 2, 1]]"),
    piece("img to seq", "img->seq", "{o} = {0}.flatten(1, 2)[:, ::3]", view=True),
    piece("sig to vol", "sig->vol", "{o} = {0}.view(-1, 2, 4, 4)[..., None].expand(-1, -1, -1, -1, 4)"),
    piece("vol to img", "vol->img", "{o} = F.pad({0}.flatten(1, 2)[:, :4], (1, 1, 1, 1))"),
    piece("flip", "vec->vec", "{o} = {0}.{f}", f="flip(1)|flip(0, 1)|roll(2, 1)|roll(1, 0)|fliplr()"),
    piece(
        "flips of img",
        "img->img",
        "{o} = {0}.{f}",
        f="flip(2, 3)|roll((1, -1), (2, 3))|rot90(1, (2, 3))|transpose(2, 3)|mT|permute(0, 1, 3, 2)",
    ),
    piece("movedim", "img->img", "{o} = {0}.movedim(1, -1).sin().movedim(-1, 1)"),
    piece("channels last", "img->img", "{o} = {0}.contiguous(memory_format=torch.channels_last)"),
    piece("repeat", "half->vec", "{o} = {0}.{f}", f="repeat(1, 2)|repeat_interleave(2, dim=1)|tile(2)"),
    piece("broadcast", "half,vec->vec", "{o} = ({0}[:, None, :] + {1}.view(-1, 2, 3)).flatten(1)"),
    piece("broadcast tensors", "row,vec->vec", "{o}, _ = torch.broadcast_tensors({0}[:, None], {1})\n{o} = {o} * 1.5"),
    piece("triangle", "mat->mat", "{o} = {0}.{f}(1)", f="tril|triu"),
    piece("diagonal matrix", "half->mat", "{o} = torch.{f}({0})", f="diag_embed"),
    piece("heads", "seq->seq", "{o} = {0}.unflatten(2, (2, 3)).transpose(1, 2).sin().transpose(1, 2).flatten(2)"),
    piece("shift in time", "seq->seq", "{o} = F.pad({0}, (0, 0, 1, 0))[:, :-1]"),
    piece("odd steps", "seq->seq", "{o} = torch.cat([{0}[:, 1:], {0}[:, :1]], 1)"),
    piece(
        "new tensors",
        "vec->vec",
        "{o} = {0} + torch.{f}",
        f="ones_like({0})|full_like({0}, 0.3)|linspace(0, 1, 6)|arange(6)|zeros(6, 6).add(1.0)[0]|eye(6)[2]",
    ),
    piece("positions", "seq->seq", "{o} = {0} + torch.arange({0}.shape[1])[None, :, None] * 0.1"),
    piece(
        "mesh", "img->img", '{o} = {0} + torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")[0] * 0.1'
    ),
    piece("sizes as numbers", "seq->seq", "{o} = {0} / ({0}.shape[1] ** 0.5 + {0}.size(0))"),
    piece(
        "tokens to positions",
        "ids,seq->seq",
        "{o} = {1} * ({0} != 1).unsqueeze(-1) if {0}.shape == {1}.shape[:2] else {1}",
    ),
    piece(
        "converted",
        "vec->vec",
        "{o} = {0}.{f}",
        f="to(torch.float64)|double()|type_as({0})|contiguous()|clone()|to({0})",
    ),
)


# Python code beside tensors: metadata that forward reads, conditions on numbers, state in attributes.
_PARAMETER = "self.{s} = nn.Parameter(torch.randn(6))"
_NUMBER = "number = {0}.detach().{f}.item()\n"

METADATA = (
    piece("contiguous", "seq->seq", "{o} = {0} * 2 if {0}.is_contiguous() else {0}.sin()"),
    piece("contiguous view", "seq->seq", "{o} = {0} * 2 if {0}.transpose(1, 2).is_contiguous() else {0}.sin()"),
    piece("stride", "vec->vec", "{o} = {0} * 2 if {0}.stride() == (6, 1) else {0}.cos()"),
    piece("strides of what was computed", "img->img", "y = {0} * 2\n{o} = y if y.stride(1) > 1 else y.sin()"),
    piece(
        "memory format", "img->img", "{o} = {0} if {0}.is_contiguous(memory_format=torch.channels_last) else {0} * 2"
    ),
    piece("storage offset", "vec->vec", "{o} = {0} * (1 + {0}[:, 1:].storage_offset() % 2)"),
    piece("leaf", "vec->vec", "{o} = {0} * 2 if {0}.is_leaf else {0}.sin()"),
    piece("needs a gradient", "vec->vec", "{o} = {0} * 2 if {0}.requires_grad else {0}.sin()"),
    piece("gradient of a parameter", "vec->vec", "{o} = {0} * {s} if {s}.grad is None else {0} - {s}", init=_PARAMETER),
    piece("trained parameter", "vec->vec", "{o} = {0} * {s} if {s}.requires_grad else {0} - {s}", init=_PARAMETER),
    piece("attribute of a tensor", "vec->vec", "{0}.mark = 2.0\n{o} = {0} * {0}.mark"),
    piece("attribute that is missing", "vec->vec", 'y = {0} + 1\n{o} = y * getattr(y, "mark", 0.5)'),
    piece("threads", "vec->vec", "{o} = {0} * (1 + torch.get_num_threads() % 2)"),
    piece("deterministic", "vec->vec", "{o} = {0} * (2 if torch.are_deterministic_algorithms_enabled() else 3)"),
    piece("inference mode", "vec->vec", "{o} = {0} * (2 if torch.is_inference_mode_enabled() else 3)"),
    piece("gradients are on", "vec->vec", "{o} = {0} * (2 if torch.is_grad_enabled() else 3)"),
)

CONDITIONS = (
    piece("not a number", "vec->vec", _NUMBER + "{o} = {0}.sin() if number != number else {0} * 2", f="mean()|sum()"),
    piece("a number", "vec->vec", _NUMBER + "{o} = {0} * 2 if number == number else {0} * 0", f="log().mean()|sum()"),
    piece(
        "infinite", "vec->vec", _NUMBER + "{o} = {0} * 2 if number - number == 0 else {0}.cos()", f="log().sum()|sum()"
    ),
    piece("times nothing", "vec->vec", _NUMBER + "{o} = {0} + number * 0", f="mean()|max()"),
    piece("remainder", "vec->vec", _NUMBER + "{o} = {0} * 2 if number % 1 > 0.5 else {0}.cos()", f="sum()|max()"),
    piece("sign by text", "vec->vec", _NUMBER + '{o} = -{0} if str(number)[0] == "-" else {0}', f="sum()|mean()"),
    piece("list of numbers", "vec->vec", "a, b, *_ = {0}.detach()[0].tolist()\n{o} = {0} * 2 if a > b else {0}.sin()"),
    piece("rounded", "vec->vec", _NUMBER + "{o} = {0} * (2 if round(number) % 2 else 3)", f="sum()|max()"),
    piece("check that raises", "vec->vec", 'if {0}.isnan().any():\n    raise ValueError("nan")\n{o} = {0} * 2'),
    piece("assertion", "vec->vec", "assert bool(torch.isfinite({0}).all())\n{o} = {0} * 2"),
    piece(
        "validated distribution",
        "vec->vec",
        "{o} = torch.distributions.Normal({0}, {0}.sigmoid() + 0.1).log_prob({0}.sin())",
    ),
)

ATTRIBUTES = (
    piece(
        "attribute like a global", "vec->vec", "{o} = {0} * self.tick", init="self.tick = {each_a}", each_a="0.5|2.0"
    ),
    piece(
        "parameter like a global", "vec->vec", "{o} = {0} * self.tock", init="self.tock = nn.Parameter(torch.randn(6))"
    ),
    piece("global", "vec->vec", "{o} = {0} * (1 + tick)"),
    piece("global in a condition", "vec->vec", "{o} = {0} * 2 if tock else {0}.sin()"),
    piece("cleared state", "vec->vec", "{s}.state = None\n{o} = {s}({0})", module="Cell()"),
    piece("cleared history", "vec->vec", "{s}.state = None\n{o} = {s}({0})\n{o} = {s}({o})", module="Cell(True)"),
    piece("lasting state", "vec->vec", "{o} = {s}({0})", module="Cell()"),
    piece("state set by value", "vec->vec", "{s}.state = {0}.detach().mean(0)\n{o} = {s}({0})", module="Cell()"),
    piece("reset neuron", "vec->vec", "{s}.reset()\n{o} = {s}({0}) + {s}({0} * 0.5)", module="Spiking()"),
    piece("neuron", "vec->vec", "{o} = {s}({0})", module="Spiking()"),
    piece(
        "list of a caller", "vec->vec", "cache = []\n{o} = {s}({0}, cache)\n{o} = {s}({o}, cache)", module="Appending()"
    ),
    piece("properties", "vec->vec", "{o} = {s}({0}) + {s}.points", module="Properties({each_a})", each_a="0.5|2.0"),
    piece("property set", "vec->vec", "{s}.gain = 0.5\n{o} = {s}({0}) * {s}.gain", module="Properties(2.0)"),
    piece("own optimizer", "vec->vec", "{o} = {s}({0})", module="Learner()"),
)


# Views, and writes into values, also through views.
VIEWS = tuple(
    piece(f"view {kinds} {code}", kinds, f"{{o}} = {code}", view=True)
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
    *(piece(f"write {code}", "vec->", code, writes=True) for code in _OF_VEC),
    # The other operand as a copy: what overlaps what is written has no defined value.
    *(
        piece(f"write {kinds} {code}", kinds, code.replace("{1}", "{1}.clone()"), writes=True)
        for kinds, codes in _TWO.items()
        for code in codes
    ),
    *(
        piece(f"write {kind} {code}", f"{kind}->", code, writes=True)
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
    piece("written copy", "vec,vec->vec", "{o} = {0}.clone()\n{o}[:, 2:4] = {1}[:, :2]\n{o}.mul_({0}.sigmoid())"),
    piece(
        "filled buffer",
        "seq->seq",
        "{o} = torch.zeros_like({0})\n{o}[:, 0] = {0}[:, -1]\n{o}[:, 1:] += {0}[:, :-1] * 0.5",
    ),
    piece(
        "filled in a loop",
        "vec->vec",
        "{o} = torch.empty_like({0})\nfor k in range(6):\n    {o}[:, k] = {0}[:, 5 - k] * k",
    ),
    piece(
        "new zeros",
        "vec->vec",
        "{o} = {0}.new_zeros({0}.shape[0], 6)\n{o}[:, :3].copy_({0}[:, 3:])\n{o}[:, 3:] += {o}[:, :3]",
    ),
    piece("view then write to base", "vec->row", "{o} = {0} * 1.0\nbase, {o} = {o}, {o}[:, 1]\nbase.mul_(3.0)"),
    piece("write then read old view", "vec->half", "part = {0}.clone()\n{o} = part[:, :3]\npart[:, 1].add_({0}[:, 5])"),
)
