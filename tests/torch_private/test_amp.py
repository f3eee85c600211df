"""The private names of mixed precision."""

import torch

from parwrap.torch_private import amp


def test_the_scale_of_a_scaler_is_a_tensor_on_its_device():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    assert torch.equal(torch.tensor(8.0), amp.scale_of(scaler))


def test_an_autocast_knows_whether_it_is_enabled():
    assert (True, False) == tuple(amp.autocast_enabled(torch.autocast("cpu", enabled=enabled)) for enabled in (True, False))


def test_the_kernel_of_a_scaler_multiplies_and_finds_what_is_not_finite():
    grads, found = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], torch.zeros(())
    amp.check_finite_and_unscale_(grads, found, torch.tensor(0.5))

    assert ([0.5, 1.0], [1.5], 0.0) == (grads[0].tolist(), grads[1].tolist(), found.item())
    amp.check_finite_and_unscale_([torch.tensor([torch.nan])], found, torch.ones(()))

    assert 1.0 == found.item()
