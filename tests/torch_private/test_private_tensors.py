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


def test_a_part_of_another_shape_may_be_changed_in_place_without_the_others():
    flat = torch.ones(4, requires_grad=True) * 1
    one, other = (tensors.unsafe_view(each, (1, 2)) for each in torch.unsafe_split_with_sizes(flat, [2, 2]))
    product = other * other
    one.mul_(2)
    product.sum().backward()  # a view would have changed

    assert one.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return "seen"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_a_subclass_may_have_a_shape_and_no_memory():
    made = tensors.make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.float64, device=torch.device("cpu"))

    assert "seen" == made.size()
    with tensors.disable_torch_function():
        assert ((2, 3), torch.float64, Wrapper) == (made.size(), made.dtype, type(made))
