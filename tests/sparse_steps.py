"""Training steps on embeddings with sparse gradients, on this rank's own words."""

import torch

import parwrap


def train_on_words(model, forward):
    """The parameters of ``model`` after five steps, by what ``forward`` gives for a batch of words below 20."""
    generator = torch.Generator().manual_seed(parwrap.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        forward(torch.randint(20, (4, 3), generator=generator)).square().mean().backward()
        assert model.words.weight.grad.is_sparse
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]
