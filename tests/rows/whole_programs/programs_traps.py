"""Cases in which a tensor in parts can give itself away."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from whole_programs._small_data import blobs, line, weights


class _Chunks(Dataset):
    def __init__(self, chunks):
        self.chunks = chunks

    def __len__(self):
        return len(self.chunks)

    def __getitem__(self, i):
        return self.chunks[i]


def numpy_functions_on_tensors():
    """numpy's functions called with tensors themselves, and mixed arithmetic."""

    def call(f, value):
        try:
            return float(f(value))
        except (TypeError, RuntimeError) as error:  # np.mean hands torch arguments that it does not know
            return type(error).__name__

    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        seen.append([call(f, a) for f in (np.mean, np.sum, np.max, np.min, np.linalg.norm, np.median)])
        seen.append((np.shape(a), np.ndim(a), np.ndim(b), len(np.array(a)), np.stack([a, a]).shape, np.concatenate([b, b]).tolist()))
        seen.append(
            (float(np.float32(a.mean())), np.array([a.sum(), a.max()]).tolist(), np.isin(b, [0, 2]).tolist(), np.where(b == 1)[0].tolist())
        )
        seen.append(
            (
                np.vstack([r.numpy() for r in a]).sum().item(),
                (a + np.float32(1)).sum().item(),
                np.dot(a.numpy().T, a.numpy()).trace().item(),
            )
        )
    return {"seen": seen}


def numpy_shares_memory():
    """Writes into x.numpy() must show in x, as in one process."""
    torch.manual_seed(0)
    x, _ = line(26)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        array = a.numpy()
        array[:, 0] = 1
        array[-1] += 2
        seen.append((a.sum(0).tolist(), a[-1].tolist()))
        a[0] = 0
        a[:, 1].mul_(3)
        seen.append((array.sum(0).tolist(), array[0].tolist()))
    return {"seen": seen}


def data_and_detached_writes():
    """Writes through .data and .detach(), and into parts of outputs without gradients."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        a.data[:, 0] = 2
        a.detach().mul_(0.5)
        a.data = a.data + 0.1
        out = model(a)
        out.data.clamp_(-3, 3)
        out.detach()[0] = 0
        loss = F.mse_loss(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), a.sum(0).tolist(), out.sum().item(), out[0].item()))
    return {"loss": losses, "weights": weights(model)}


def collected_copies_go_stale():
    """Reads a batch whole (sort, tolist, numpy copy), writes it, and reads again, several times."""
    torch.manual_seed(0)
    x, _ = line(26)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        first = a.sort(0).values
        view = a[:, :2]
        seen.append(first[0].tolist())
        a += 1
        seen.append(a.sort(0).values[0].tolist())
        view.zero_()
        seen.append((a.sort(0).values[0].tolist(), a.tolist()[0], (a @ a.T).sum().item()))
        gram = a @ a.T
        gram.fill_diagonal_(0)
        first.zero_()
        seen.append((gram.sum().item(), (a @ a.T).diagonal().sum().item(), a.sort(0).values[-1].tolist()))
        a.copy_(a.flip(0))
        a[1:] = a[:-1].clone()
        seen.append(a.sum(1).tolist())
    return {"seen": seen}


def stream_of_the_datasets_own_tensors():
    """batch_size=None hands over the dataset's own tensors: writes in place show in the next epoch and afterwards."""
    torch.manual_seed(0)
    x, y = line(26)
    chunks = [(x[i : i + 7], y[i : i + 7]) for i in range(0, 26, 7)]
    sums = []
    for _ in range(2):
        for a, b in DataLoader(_Chunks(chunks), batch_size=None):
            a.mul_(2)
            b[0] = 1
            sums.append((a.sum().item(), b.sum().item()))
    return {"sums": sums, "x": x.sum(0).tolist(), "y": y.flatten().tolist()}


def in_place_errors_of_autograd():
    """Changing what backward needs raises RuntimeError, as does a second backward; the script catches both."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a).exp()
        out.add_(1)
        try:
            out.mean().backward()
            log.append("no error")
        except RuntimeError:
            log.append("in place")
        optimizer.zero_grad()
        loss = F.mse_loss(model(a).exp(), b)
        loss.backward()
        try:
            loss.backward()
            log.append("no error")
        except RuntimeError:
            log.append("twice")
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        log.append(loss.item())
    return {"log": log, "weights": weights(model)}


def gradient_penalty_through_batch_norm():
    """A gradient penalty (create_graph) through a critic with batch norm and layer norm."""
    torch.manual_seed(0)
    x, _ = blobs(27)
    critic = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.02)
    log = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8):
        a = a.clone().requires_grad_(True)
        out = critic(a)
        (g,) = torch.autograd.grad(out.sum(), a, create_graph=True)
        penalty = (g.norm(dim=1) - 1).pow(2).mean()
        loss = out.pow(2).mean() + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), penalty.item()))
    return {"log": log, "mean": critic[1].running_mean.clone(), "var": critic[1].running_var.clone(), "weights": weights(critic)}


def square_batches_transposed():
    """Batches of 6 samples with 6 features; the model is called on the batch and on its transpose."""
    torch.manual_seed(0)
    x, y = blobs(24)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
        across = model(a.T)
        loss = F.cross_entropy(model(a), b) + 0.1 * across.pow(2).mean() + 0.1 * (a.T @ across)[b].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), across.sum(0).tolist(), a.mean(0).tolist(), a.mean(1).tolist(), (a - a.T).norm().item()))
    return {"log": log, "weights": weights(model)}


def rows_as_time():
    """A batch of 2 dimensions goes to an LSTM and a Conv1d, which take its rows for time steps."""
    torch.manual_seed(0)
    x, y = blobs(26)
    both = nn.ModuleList([nn.LSTM(6, 4), nn.Conv1d(4, 3, 3, padding=1)])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out, (h, _) = both[0](a)
        logits = both[1](out.T[None])[0].T
        loss = F.cross_entropy(logits, b) + 0.01 * h.pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), tuple(out.shape), tuple(h.shape)))
    return {"loss": losses, "weights": weights(both)}


def batch_first_forgotten():
    """Batch-first data goes to a Transformer layer and a GRU without batch_first: they mix samples, in one process too."""
    torch.manual_seed(0)
    x, y = torch.randn(26, 4, 8), torch.arange(26) % 2
    both = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.GRU(8, 6), nn.Linear(6, 2)])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out, _ = both[1](both[0](a))
        loss = F.cross_entropy(both[2](out[:, -1]), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(both)}


def pairs_of_batches():
    """A loader inside a loader: every batch meets batches of another loader of another size."""
    torch.manual_seed(0)
    x, y = blobs(14)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer, inner = DataLoader(TensorDataset(x, y), batch_size=5), DataLoader(TensorDataset(x.flip(0), y.flip(0)), batch_size=4)
    log = []
    for a, b in outer:
        total = 0.0
        for c, d in inner:
            u, v = model(a), model(c)
            same = (b[:, None] == d[None]).float()
            total = total + F.binary_cross_entropy_with_logits(u @ v.T, same) + F.cross_entropy(v, d)
            n = min(len(a), len(c))
            total = total + (u[:n] - v[:n]).pow(2).mean() * 0.1
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        log.append(total.item())
    return {"log": log, "weights": weights(model)}
