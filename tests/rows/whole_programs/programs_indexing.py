"""Masks, gathers, sorts, counts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, line, weights


def boolean_masks():
    """Selects rows of a batch by class, also classes that some or all parts of the batch lack."""
    torch.manual_seed(0)
    x, y = blobs(26)
    y = y.sort().values
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        for k in range(4):
            mask = b == k
            chosen = a[mask]
            seen.append((tuple(chosen.shape), chosen.sum().item(), mask.any().item(), bool(mask.all()), a[mask, 0].tolist()))
            if len(chosen) > 1:
                seen.append(chosen.std(0).tolist())
    return {"seen": seen}


def loss_on_masked_rows():
    """Semi-supervised: rows with the label -1 give no supervised loss; some batches have few labels."""
    torch.manual_seed(0)
    x, y = blobs(26)
    y[torch.tensor([0, 1, 2, 3, 8, 9, 10, 20, 21, 22])] = -1
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a)
        labelled = b >= 0
        loss = torch.zeros(())
        if labelled.any():
            loss = loss + F.cross_entropy(out[labelled], b[labelled])
        if (~labelled).any():
            p = out[~labelled].softmax(1)
            loss = loss + 0.1 * -(p * p.log()).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), int(labelled.sum())))
    return {"loss": losses, "weights": weights(model)}


def permuted_gathers():
    """Manifold mixup: permuted rows of inputs and hidden features, and index_select / take_along_dim."""
    torch.manual_seed(0)
    x, y = blobs(26)
    body, head = nn.Linear(6, 5), nn.Linear(5, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        order = torch.randperm(len(a))
        h = body(a).tanh()
        h = 0.7 * h + 0.3 * h[order]
        out = head(h)
        loss = 0.7 * F.cross_entropy(out, b) + 0.3 * F.cross_entropy(out, b.index_select(0, order))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        picked = torch.take_along_dim(out, b[:, None], 1).sum().item()
        losses.append((loss.item(), picked, a[order[0]].sum().item(), out.gather(1, b.view(-1, 1)).mean().item()))
    return {"loss": losses, "weights": weights(body), "head": weights(head)}


def sorts_and_topk():
    """Sorts rows by a score, takes topk over rows and columns, argsort, kthvalue."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        score = a.pow(2).sum(1)
        values, order = score.sort(descending=True)
        top, where = score.topk(2)
        seen.append((values.tolist(), order.tolist(), top.tolist(), where.tolist(), b[order].tolist(), a[order][0].tolist()))
        columns = a.topk(2, dim=1)
        down = a.topk(1, dim=0)
        seen.append(
            (columns.indices.tolist(), down.indices.tolist(), down.values.tolist(), a.argsort(1)[:, 0].tolist(), a.argsort(0)[0].tolist())
        )
        seen.append((a.sort(0).values[:1].tolist(), score.kthvalue(1).values.item(), score.argmax().item(), a.argmin().item()))
    return {"seen": seen}


def cumulative_over_rows():
    """cumsum, cumprod and cummax over the rows of a batch, as for a Lorenz curve."""
    torch.manual_seed(0)
    x, _ = line(26)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        c = a.abs().cumsum(0)
        share = c / c[-1]
        seen.append((c[-1].tolist(), share[:, 0].tolist(), a.cumsum(1)[:, -1].tolist(), a.cummax(0).values[-1].tolist()))
        seen.append((torch.cumprod(1 + 0.1 * a[:, 0], 0).tolist(), a[:, 1].logcumsumexp(0).tolist(), (share > 0.5).sum(0).tolist()))
    return {"seen": seen}


def counts_and_histograms():
    """unique, bincount, histc, nonzero and one_hot of labels and values."""
    torch.manual_seed(0)
    x, y = blobs(26, classes=4)
    seen, total, hist = [], torch.zeros(4, dtype=torch.long), torch.zeros(5)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        values, counts = b.unique(return_counts=True)
        total += torch.bincount(b, minlength=4)
        hist += torch.histc(a, bins=5, min=-3, max=3)
        seen.append((values.tolist(), counts.tolist(), (b == 1).nonzero().flatten().tolist(), F.one_hot(b, 4).sum(0).tolist()))
        i, j = torch.where(a > 1.5)
        seen.append((i.tolist(), j.tolist(), torch.nonzero(a > 1.5).shape[0], torch.count_nonzero(b).item(), b.unique().numel()))
    return {"seen": seen, "total": total, "histogram": hist}


def hard_example_mining():
    """Trains on the half of each batch with the largest losses (topk of reduction='none')."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, hardest = [], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        each = F.cross_entropy(model(a), b, reduction="none")
        top, index = each.topk(max(1, len(each) // 2))
        loss = top.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), each.mean().item()))
        hardest.append((index.tolist(), b[index].tolist(), a[index].sum().item()))
    return {"loss": losses, "hardest": hardest, "weights": weights(model)}


def predictions_of_labelled_indices():
    """Picks log probabilities by out[range(n), y] and by advanced indexing with None."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        logp = model(a).log_softmax(-1)
        loss = -logp[range(len(b)), b].mean() - 0.1 * logp[torch.arange(b.size(0))[:, None], torch.tensor([[0, 1]])].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), logp[0, b[0]].item(), logp[-1][b[-1]].item()))
    return {"loss": losses, "weights": weights(model)}


def class_tables():
    """Looks class weights, class means and embeddings up by the labels: table[y]."""
    torch.manual_seed(0)
    x, y = blobs(26)
    table = torch.tensor([0.5, 1.0, 2.0])
    centres = nn.Parameter(torch.zeros(3, 6))
    optimizer = torch.optim.SGD([centres], lr=0.3)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        loss = (table[b] * (a - centres[b]).pow(2).sum(1)).mean() + F.embedding(b, centres).abs().mean() * 0.01
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "centres": centres.detach().clone()}


def rows_chosen_at_random():
    """Picks a random subset, a multinomial sample and a random single row of each batch."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        subset = torch.randperm(len(a))[:3]
        weight = a.pow(2).sum(1)
        drawn = torch.multinomial(weight, 4, replacement=True)
        one = int(torch.randint(len(a), (1,)))
        coin = torch.rand(len(a)) < 0.5
        seen.append((a[subset].sum(1).tolist(), b[drawn].tolist(), a[one].tolist(), b[coin].tolist(), a[coin].mean(1).tolist()))
    return {"seen": seen}


def threshold_decisions():
    """Python branches on a batch: if (out > 0).any(), while, max of lists, isnan checks."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 1)
    events = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=5):
        out = model(a)
        if (out > 1.0).any():
            events.append(("large", out.max().item()))
        if torch.isnan(out).any() or not torch.isfinite(out).all():
            raise ValueError("not finite")
        if b[0] == 0 and b.sum() > 3:
            events.append(("first", int(b.sum())))
        while out.abs().max() > 0.5:
            out = out / 2
        events.append((out.abs().max().item(), max(out.flatten().tolist()), min(b.tolist()), 0 in b, bool(a[0].sum() > 0)))
    return {"events": events}
