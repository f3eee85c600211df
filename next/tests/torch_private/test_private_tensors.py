"""The private names of tensors that parwrap uses."""

import torch

from parwrap.torch_private import tensors


def test_a_change_in_place_gives_another_version():
    tensor = torch.zeros(2)
    before = tensors.version_of(tensor)
    tensor + 1
    assert before == tensors.version_of(tensor)
    tensor[:1].add_(1)

    assert before + 1 == tensors.version_of(tensor)


def test_the_values_of_a_sparse_tensor_are_those_that_it_holds():
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))
    values = tensors.sparse_values(sparse)
    values.mul_(2)

    assert [0, 10, 0, 0] == sparse.to_dense().tolist()
