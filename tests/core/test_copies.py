"""Copies of tensors are like the tensors."""

from __future__ import annotations

import torch

from hfusion.core.copies import copies_in_like_memory


def test_copies_have_memory_of_their_own_with_the_same_aliases() -> None:
    base = torch.arange(40.0).view(4, 10)
    tensors = [base, base[1:3], base[:, ::2].t(), base[0].expand(3, 10), base, torch.tensor(5), base.to_sparse()]
    copies = copies_in_like_memory(tensors)
    for a, b in zip(tensors, copies, strict=True):
        assert torch.equal(a.to_dense(), b.to_dense())
        if a.layout is torch.strided:
            assert a.stride() == b.stride()
            assert a.data_ptr() != b.data_ptr()
    assert copies[0] is copies[4]
    copies[0][1].zero_()
    assert not copies[1][0].any()
    assert not copies[2][:, 1].any()
    assert base[1].all()


def test_a_copy_takes_no_more_than_what_is_used_of_a_storage() -> None:
    data = torch.arange(10_000.0)
    (few,), pair = copies_in_like_memory([data[5000:5004]]), copies_in_like_memory([data[:4], data[9000:9004]])
    assert few.untyped_storage().nbytes() == 16
    assert [copy.untyped_storage().nbytes() for copy in pair] == [16, 16]
    assert torch.equal(pair[1], data[9000:9004])


def test_copies_need_a_gradient_where_the_tensors_do() -> None:
    leaf = torch.ones(3, requires_grad=True)
    copies = copies_in_like_memory([leaf, leaf * 2, leaf.detach(), torch.ones(2, dtype=torch.complex64).conj()])
    assert [copy.requires_grad for copy in copies] == [True, True, False, False]
    assert all(copy.is_leaf for copy in copies)
