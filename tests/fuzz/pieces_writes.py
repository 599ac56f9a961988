"""Views, and writes into values, also through views."""

from __future__ import annotations

from tests.fuzz.table import piece

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
