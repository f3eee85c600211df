"""The private names of mixed precision."""

import torch

from parwrap.torch_private import amp


def test_the_scale_of_a_scaler_is_a_tensor_on_its_device():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    assert torch.equal(torch.tensor(8.0), amp.scale_of(scaler))
