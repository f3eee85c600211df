"""A loop in fp16, plain and with torch's GradScaler by hand."""

import torch
from torch import nn

FP16 = torch.float16
LOW = {"dtype": "fp16", "init_scale": 1024.0}
"""So low that nothing overflows by itself."""


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(count=12, overflowing=()):
    """Inputs and targets; the gradients of batches ``overflowing`` are not finite in float16."""
    generator = torch.Generator().manual_seed(1)
    made = [(x, x[:, :1] * 2) for x in torch.randn(count, 8, 6, generator=generator)]
    return [(x, y * (1e4 if number in overflowing else 1)) for number, (x, y) in enumerate(made)]


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


class Recorder:
    """What a loop by hand and one under parwrap have in common: each step's gradients and scale are remembered."""

    def __init__(self):
        self.seen = []

    def see(self, model, scale):
        self.seen.append([scale, *(None if p.grad is None else p.grad.clone() for p in model.parameters())])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def by_hand(data, micro=1, clip=None, **policy):
    model, recorder = build(), Recorder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **policy)
    for number, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=FP16):
            loss = loss_of(model, x, y) / micro
        scaler.scale(loss).backward()
        if (number + 1) % micro == 0:
            scaler.unscale_(optimizer)
            recorder.see(model, scaler.get_scale())
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()["state"], scaler.get_scale(), recorder.seen
