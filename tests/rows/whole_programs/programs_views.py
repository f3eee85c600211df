"""Views, slices, and shapes of batches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def inputs_and_target_in_one_tensor():
    """A table holds inputs and the target; columns are sliced out of each batch."""
    torch.manual_seed(0)
    x, y = line(26, 4)
    loader = DataLoader(TensorDataset(torch.cat([x, y], 1)), batch_size=8, shuffle=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for (row,) in loader:
            inputs, target = row[:, :-1], row[:, -1]
            loss = F.mse_loss(model(inputs)[..., 0], target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def first_and_last_rows():
    """Looks at single samples and parts of each batch by all kinds of slices."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a).detach()
        parts = [a[0], a[-1], a[:3], a[1:], a[::2], a[-2:], a[1:-1], a[:, :2], a[:, -1], a[0, 0], out[0], out[-1], out[:1], out[1::3]]
        seen.append([[*list(p.shape), float(p.sum())] for p in parts])
        seen.append([int(b[0]), int(b[-1]), b[:3].tolist(), b[-3:].tolist(), b[::2].sum().item()])
    return {"seen": seen}


def flatten_images_by_view():
    """Trains an MLP on images that the loop flattens with view(x.size(0), -1)."""
    torch.manual_seed(0)
    x, y = images(26)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, right = [], 0
    for images_, labels in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        out = model(images_.view(images_.size(0), -1))
        loss = F.cross_entropy(out, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        right += (out.argmax(1) == labels).sum().item()
    return {"loss": losses, "right": right, "weights": weights(model)}


def columns_one_by_one():
    """Iterates over the feature columns of a batch, with x[:, i] and unbind(1)."""
    torch.manual_seed(0)
    x, _ = blobs(24)
    means, spreads, shapes = [], [], []
    for (a,) in DataLoader(TensorDataset(x), batch_size=5):
        means.append([a[:, i].mean().item() for i in range(a.shape[1])])
        spreads.append([c.std().item() if len(c) > 1 else 0.0 for c in a.unbind(1)])
        shapes.append([tuple(c.shape) for c in a.split(2, dim=1)] + [tuple(c.shape) for c in a.T])
    return {"means": means, "spreads": spreads, "shapes": shapes}


def new_axes_and_broadcasts():
    """Uses x[:, None], x[None], x[..., None] and broadcasts against prototypes."""
    torch.manual_seed(0)
    x, y = blobs(26)
    prototypes = nn.Parameter(torch.randn(3, 6))
    optimizer = torch.optim.SGD([prototypes], lr=0.2)
    losses, shapes = [], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        distances = ((a[:, None] - prototypes[None]) ** 2).sum(-1)
        loss = F.cross_entropy(-distances, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        shapes.append([tuple(v.shape) for v in (a[:, None], a[None], a[..., None], a[..., 0], a[None, :, 0], distances)])
    return {"loss": losses, "prototypes": prototypes.detach().clone(), "shapes": shapes}


def merge_batch_and_time():
    """A sequence model's logits are reshaped to (batch * time, classes) for the loss, and back."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (26, 5))
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, firsts = [], []
    for (t,) in DataLoader(TensorDataset(tokens), batch_size=8):
        logits = model(t[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 7), t[:, 1:].reshape(-1), reduction="none")
        per_sample = loss.view(t.size(0), -1).mean(1)
        optimizer.zero_grad()
        per_sample.mean().backward()
        optimizer.step()
        losses.append(per_sample.tolist())
        firsts.append(logits.view(-1, 7)[:3].sum(1).tolist())
    return {"loss": losses, "firsts": firsts, "weights": weights(model)}


def time_first_rnn():
    """Transposes batches to time-first for a GRU and takes the last step's output."""
    torch.manual_seed(0)
    x = torch.randn(26, 5, 3)
    y = x.sum((1, 2), keepdim=False)[:, None]
    rnn, head = nn.GRU(3, 6), nn.Linear(6, 1)
    params = [*rnn.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        out, hidden = rnn(a.transpose(0, 1))
        loss = F.mse_loss(head(out[-1]), b) + 0.01 * hidden.squeeze(0).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "out": tuple(out.shape), "weights": weights(rnn), "head": weights(head)}


def time_first_transformer():
    """Feeds a TransformerEncoderLayer with time-first batches made with permute."""
    torch.manual_seed(0)
    x, y = torch.randn(26, 4, 8), torch.arange(26) % 2
    layer, head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        hidden = layer(a.permute(1, 0, 2))
        out = head(hidden.mean(0))
        loss = F.cross_entropy(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "hidden": tuple(hidden.shape), "last": out.tolist(), "weights": weights(layer)}


def chunks_and_splits():
    """Splits a batch in micro-batches with chunk and split, and accumulates gradients."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, sizes = [], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(a.split(3), b.split(3), strict=True):
            loss = F.mse_loss(model(part), target, reduction="sum") / len(a)
            loss.backward()
            total += loss.item()
            sizes.append(len(part))
        optimizer.step()
        losses.append(total)
        halves = a.chunk(2)
        losses.append([h.mean().item() for h in halves])
    return {"loss": losses, "sizes": sizes, "weights": weights(model)}


def flips_and_rolls():
    """Pairs each sample with another one by flip(0) and roll, for a contrast term."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        z = model(a)
        same = (b == b.roll(1)).float()
        other = (z - z.roll(1, 0)).pow(2).mean(1)
        loss = (same * other + (1 - same) * F.relu(1 - other)).mean() + 0.1 * (z * z.flip(0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def neighbours_in_the_batch():
    """Penalises differences of neighbouring rows, out[1:] - out[:-1]."""
    torch.manual_seed(0)
    x, y = line(24)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        out = model(a)
        smooth = (out[1:] - out[:-1]).abs().mean()
        loss = F.mse_loss(out, b) + 0.1 * smooth
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), smooth.item(), torch.diff(b, dim=0).sum().item()))
    return {"loss": losses, "weights": weights(model)}


def repeats_and_expands():
    """Draws several samples an input: repeat_interleave, expand, repeat and a reduction over them."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
        n, k = len(a), 3
        many = a.repeat_interleave(k, dim=0) + 0.1 * torch.randn(n * k, 5)
        out = model(many).view(n, k, 1)
        loss = F.mse_loss(out, b[:, None].expand(n, k, 1))
        tiled = a.repeat(2, 1)
        wide = a.unsqueeze(1).expand(-1, 2, -1).reshape(2 * n, -1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), tiled[n].tolist(), wide[1].tolist(), out.std(1).mean().item()))
    return {"loss": losses, "weights": weights(model)}


def squeeze_of_the_last_sample():
    """squeeze() without a dimension, where the last batch has one sample."""
    torch.manual_seed(0)
    x, y = line(25)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, shapes = [], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out, target = model(a).squeeze(), b.squeeze()
        loss = F.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        shapes.append((tuple(out.shape), out.dim(), a.ndim, a.numel()))
    return {"loss": losses, "shapes": shapes, "weights": weights(model)}


def patches_by_unfold():
    """Cuts images in patches with unfold and reshape, and embeds them."""
    torch.manual_seed(0)
    x, y = images(24)
    embed, head = nn.Linear(16, 4), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        patches = a.unfold(2, 4, 4).unfold(3, 4, 4)
        n, c, h, w, p, q = patches.shape
        tokens = embed(patches.permute(0, 2, 3, 1, 4, 5).reshape(n, h * w, c * p * q))
        loss = F.cross_entropy(head(tokens.mean(1)), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "shape": tuple(tokens.shape), "weights": weights(embed)}


def channels_last_grid():
    """Makes a picture of the first images of a batch: permute, pad, cat of rows in a grid."""
    torch.manual_seed(0)
    x, _ = images(26, c=3, s=4)
    grids = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8):
        first = a[:2].permute(0, 2, 3, 1).clamp(0, 1)
        grid = torch.cat([F.pad(i, (0, 0, 1, 1, 1, 1)) for i in first], 1)
        grids.append((tuple(grid.shape), grid.sum().item(), tuple(a.permute(0, 2, 3, 1).contiguous().stride())))
        grids.append((a.is_contiguous(), a.stride(), a.transpose(0, 1).is_contiguous()))
    return {"grids": grids}


def stacks_and_cats():
    """Stacks batches of one shape, concatenates along rows and columns, and takes them apart again."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        n = len(a)
        wide = torch.cat([a, a * 2, b[:, None].float()], dim=1)
        long = torch.cat([a, -a, a[:1]])
        pair = torch.stack([a, a + 1])
        inner = torch.stack([a, a + 1], dim=1)
        seen.append([tuple(t.shape) for t in (wide, long, pair, inner)])
        seen.append(
            [wide.sum().item(), long.sum(1).tolist(), pair[1].sum(0).tolist(), inner[:, 1].sum(1).tolist(), long[n : 2 * n].mean().item()]
        )
        first, second = torch.cat([a, b[:, None].float()], 1).split([6, 1], dim=1)
        seen.append((first.equal(a), bool((second.squeeze(1) == b).all())))
    return {"seen": seen}
