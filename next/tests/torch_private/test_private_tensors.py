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
