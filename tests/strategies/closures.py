"""A training by LBFGS, whose closure it calls as often as it likes."""

import torch


def minimized(weight, target, max_iter):
    """How often the closure was called in three steps of ``weight`` towards ``target``, and the loss of each step."""
    calls = 0
    optimizer = torch.optim.LBFGS([weight], max_iter=max_iter, line_search_fn="strong_wolfe")

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = ((weight - target) ** 4).sum() + weight.exp().sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    return calls, losses
