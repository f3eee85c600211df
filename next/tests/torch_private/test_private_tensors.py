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


def test_the_values_of_a_sparse_tensor_are_its_own_memory():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=False)
    tensors.sparse_values(sparse).mul_(2)

    assert [6.0, 0.0, 0.0] == sparse.to_dense().tolist()


class Noting(torch.Tensor):
    called = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.called += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_can_be_turned_off():
    tensor = torch.ones(2).as_subclass(Noting)
    before = Noting.called
    with tensors.disable_torch_function():
        tensor + 1
    assert before == Noting.called
    tensor + 1

    assert before + 1 == Noting.called


def test_a_tensor_of_a_subclass_takes_no_memory():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    tensor = tensors.make_wrapper_subclass(Wrapper, (2**20, 2**20), dtype=torch.float16, device=torch.device("cpu"))

    assert (Wrapper, (2**20, 2**20), torch.float16) == (type(tensor), tuple(tensor.shape), tensor.dtype)


def test_lists_are_added_and_multiplied():
    ones, twos = [torch.ones(1), torch.ones(2)], [torch.full((1,), 2.0), torch.full((2,), 2.0)]

    assert [[3.0], [3.0, 3.0]] == [each.tolist() for each in tensors.foreach_add(ones, twos)]
    tensors.foreach_add_(ones, twos)
    assert [[3.0], [3.0, 3.0]] == [each.tolist() for each in ones]
    tensors.foreach_mul_(ones, torch.tensor(2.0))
    assert [[6.0], [6.0, 6.0]] == [each.tolist() for each in ones]
