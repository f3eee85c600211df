"""Writes into batches and into what a model gives."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def normalise_in_place():
    """Standardises each batch in place with sub_, div_ and clamp_ by its own statistics."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        a.sub_(a.mean(0)).div_(a.std(0, unbiased=False) + 1e-2).clamp_(-2, 2)
        a += 0.1
        a *= 0.5
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), a.max().item(), a.sum().item()))
    return {"loss": losses, "weights": weights(model)}


def masked_writes():
    """Sets entries to 0 by boolean masks, of elements and of rows, also where no row is meant."""
    torch.manual_seed(0)
    x, y = blobs(26)
    sums = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        a[a < -1] = 0
        a[b == 2] = -1.0
        a[b == 99] = 7.0
        a[a[:, 0] > 0.5, 1] = 3.0
        c = a.clone()
        c[c > 0] = c[c > 0] * 2
        c[b == 0] = a.mean(0)
        sums.append((a.sum(0).tolist(), c.sum(1).tolist(), (c > 0).sum().item()))
    return {"sums": sums}


def column_writes():
    """Writes columns of a batch: x[:, 0] = 1, x[..., -1] *= 2, x[:, 1:3] = other."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        a[:, 0] = 1
        a[..., -1] *= 2
        a[:, 1:3] = a[:, 1:3].tanh()
        a[:, 3] = torch.arange(len(a)) / 10
        b[:, 0] -= 0.5
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), a.sum().item(), b.sum().item()))
    return {"loss": losses, "weights": weights(model)}


def row_writes_by_number():
    """Writes single rows and ranges of rows: x[0] = 0, x[-1] += 1, x[2:4] = ..., x[idx] = ..."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    sums = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        a[0] = 0
        a[-1] += 1
        a[2:4] = torch.full((2, 6), 0.5)[: len(a[2:4])]
        idx = torch.tensor([len(a) - 1, 1])
        a[idx] = torch.stack([a[1], a[-1]])
        a[0, 0] = 9.0
        a[::2, 1] = -1
        sums.append((a.sum(1).tolist(), a[:, 1].tolist()))
    return {"sums": sums}


def views_share_memory():
    """Writes through views (flattened, transposed, sliced) must show in the batch."""
    torch.manual_seed(0)
    x, _ = images(26, s=4)
    sums = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        flat = a.view(len(a), -1)
        flat[:, 0] = 5.0
        a.transpose(2, 3)[:, :, 0, 1] = -1.0
        first = a[0]
        first.zero_()
        last = a[-1]
        last += 1
        a[1:3].mul_(2)
        for row in a:
            row[0, 0, 0] += 0.25
        sums.append((a.sum((1, 2, 3)).tolist(), flat.sum(0).tolist(), first.sum().item(), last.sum().item()))
    return {"sums": sums}


def scatter_and_index_add():
    """One-hot targets by scatter_, sums and counts per class by index_add_, scatter_add_ and bincount."""
    torch.manual_seed(0)
    x, y = blobs(26, classes=4)
    sums, counts = torch.zeros(4, 6), torch.zeros(4)
    hot = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        sums.index_add_(0, b, a)
        counts.scatter_add_(0, b, torch.ones(len(b)))
        target = torch.zeros(a.size(0), 4).scatter_(1, b.unsqueeze(1), 1.0)
        hot.append(target.sum(0).tolist())
        target.index_fill_(1, torch.tensor([0]), 0.5)
        hot.append(target.mean().item())
    return {"means": sums / counts[:, None], "counts": counts, "hot": hot}


def fills_and_copies():
    """masked_fill_, copy_, fill_, zero_, torch.where into new tensors, out= arguments."""
    torch.manual_seed(0)
    x, y = blobs(26)
    buffer = torch.zeros(8, 6)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        n = len(a)
        buffer[:n].copy_(a)
        buffer[n:] = 0
        new = torch.empty_like(a)
        torch.mul(a, 2, out=new)
        total = torch.empty(6)
        torch.sum(a, 0, out=total)
        a.masked_fill_((b == 1)[:, None], -3.0)
        other = a.new_zeros(n, 6)
        other.copy_(a)
        other[:, 0].fill_(1.0)
        seen.append((buffer.sum(1).tolist(), new.mean().item(), total.tolist(), other.sum().item(), torch.zeros_like(b).sum().item()))
    return {"seen": seen}


def preallocated_predictions():
    """Fills a tensor of all predictions by slices [start:start + n] during evaluation."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1).eval()
    predictions, targets, start = torch.empty(26), torch.zeros(26, 1), 0
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            n = a.shape[0]
            predictions[start : start + n] = model(a)[:, 0]
            targets[start : start + n] += b
            start += n
    return {"predictions": predictions, "targets": targets, "start": start}


def cutmix():
    """CutMix: a random box of each image comes from another one, written in place."""
    torch.manual_seed(0)
    x, y = images(26, c=2)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        order = torch.randperm(a.size(0))
        top, left = (int(v) for v in torch.randint(0, 5, (2,)))
        a[:, :, top : top + 4, left : left + 3] = a[order, :, top : top + 4, left : left + 3]
        lam = 1 - 12 / (a.shape[-1] * a.shape[-2])
        out = model(a)
        loss = lam * F.cross_entropy(out, b) + (1 - lam) * F.cross_entropy(out, b[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def random_erasing():
    """Erases a box of some images, in a Python loop over the batch."""
    torch.manual_seed(0)
    x, _ = images(26, s=6)
    sums = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        for i in range(len(a)):
            if torch.rand(1).item() < 0.5:
                t = torch.randint(0, 4, (2,))
                a[i, :, t[0] : t[0] + 2, t[1] : t[1] + 2] = 0.0
        sums.append(a.sum((1, 2, 3)).tolist())
    return {"sums": sums}


def in_place_on_outputs():
    """Masks logits in place before the loss (out[:, 0] = -inf style) and keeps gradients."""
    torch.manual_seed(0)
    x, y = blobs(26, classes=4)
    y = y.clamp_min(1)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a)
        out = out * 1.0
        out[:, 0] = -1e4
        out[torch.arange(len(b)), b] -= 0.2
        out.add_(0.1).mul_(2)
        loss = F.cross_entropy(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}
