"""Losses over pairs in a batch, queues and momentum encoders."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from whole_programs._small_data import blobs, weights


def infonce_two_towers():
    """CLIP-style: logits of all pairs of two towers, labels torch.arange(len(x)), a learned temperature."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    t = x @ torch.randn(6, 5) + 0.1 * torch.randn(26, 5)
    image, text = nn.Linear(6, 4), nn.Linear(5, 4)
    scale = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([*image.parameters(), *text.parameters(), scale], lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, t), batch_size=8, shuffle=True):
        u, v = F.normalize(image(a), dim=-1), F.normalize(text(b), dim=-1)
        logits = scale.exp() * u @ v.t()
        labels = torch.arange(len(a), device=a.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), (logits.argmax(1) == labels).float().mean().item(), tuple(logits.shape)))
    return {"loss": losses, "scale": scale.item(), "weights": weights(image), "text": weights(text)}


class _TwoViews(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1, self.x[i] * 0.9


def simclr_two_views_concatenated():
    """SimCLR: the two views are concatenated, one encoder call, a 2n x 2n similarity with the diagonal masked."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses = []
    for first, second in DataLoader(_TwoViews(x), batch_size=7, shuffle=True):
        n = first.size(0)
        z = F.normalize(encoder(torch.cat([first, second], dim=0)), dim=1)
        similarity = z @ z.t() / 0.5
        similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        loss = F.cross_entropy(similarity, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "shape": tuple(similarity.shape), "weights": weights(encoder)}


def simclr_stacked_views():
    """SimCLR with views stacked in a dimension: (n, 2, d) flattened for the encoder, chunked after it."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    views = torch.stack([x + 0.1, x * 0.9], 1)
    encoder = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses = []
    for (v,) in DataLoader(TensorDataset(views), batch_size=7):
        n = len(v)
        z = encoder(v.flatten(0, 1)).view(n, 2, -1)
        z = F.normalize(torch.cat(torch.unbind(z, dim=1), dim=0), dim=1)
        a, b = z.chunk(2)
        positive = (a * b).sum(1).repeat(2)
        mask = ~torch.eye(2 * n, dtype=bool)
        negative = ((z @ z.T)[mask].view(2 * n, -1)).exp().sum(1)
        loss = (negative.log() - positive).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(encoder)}


def supervised_contrastive():
    """SupCon: positives are pairs with equal labels, mask = y[:, None] == y[None]."""
    torch.manual_seed(0)
    x, y = blobs(26)
    encoder = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        z = F.normalize(encoder(a), dim=1)
        logits = torch.matmul(z, z.T) / 0.3
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        mask = torch.eq(b.view(-1, 1), b.view(-1, 1).T).float()
        others = torch.scatter(torch.ones_like(mask), 1, torch.arange(len(b)).view(-1, 1), 0)
        mask = mask * others
        logp = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        has = mask.sum(1) > 0
        if not has.any():
            continue
        loss = -((mask * logp).sum(1)[has] / mask.sum(1)[has]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), int(has.sum())))
    return {"loss": losses, "weights": weights(encoder)}


def triplet_batch_hard():
    """Batch-hard triplets: the farthest positive and the nearest negative of each anchor."""
    torch.manual_seed(0)
    x, y = blobs(26)
    encoder = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        z = encoder(a)
        d = torch.cdist(z, z)
        same = b[:, None] == b[None, :]
        positive = d.masked_fill(~same, 0.0).max(1).values
        negative = d.masked_fill(same, 1e6).min(1)[0]
        each = F.relu(positive - negative + 1)
        loss = each[each > 0].mean() if (each > 0).any() else each.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), (each > 0).sum().item()))
    return {"loss": losses, "weights": weights(encoder)}


def triplets_mined_in_python():
    """Mines triplets with Python loops over labels and indexes the embeddings with the lists."""
    torch.manual_seed(0)
    x, y = blobs(26)
    encoder = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        z, labels = encoder(a), b.tolist()
        found = []
        for i, k in enumerate(labels):
            positives = [j for j, m in enumerate(labels) if m == k and j != i]
            negatives = [j for j, m in enumerate(labels) if m != k]
            if positives and negatives:
                found.append((i, positives[0], negatives[-1]))
        i, j, k = map(list, zip(*found, strict=True))
        loss = F.triplet_margin_loss(z[i], z[j], z[k], margin=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(found)))
    return {"loss": losses, "weights": weights(encoder)}


def moco_queue():
    """MoCo: a momentum encoder by deepcopy, keys enqueued in a buffer by position, logits against the queue."""
    torch.manual_seed(0)
    x, _ = blobs(24)
    query = nn.Linear(6, 4)
    key = copy.deepcopy(query)
    for p in key.parameters():
        p.requires_grad = False
    queue, at = F.normalize(torch.randn(4, 12), dim=0), 0
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for (a,) in DataLoader(TensorDataset(x), batch_size=6, drop_last=True):
            q = F.normalize(query(a), dim=1)
            with torch.no_grad():
                for p, t in zip(query.parameters(), key.parameters(), strict=True):
                    t.data.mul_(0.9).add_(p.data, alpha=0.1)
                k = F.normalize(key(a + 0.1), dim=1)
            positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
            negative = torch.einsum("nc,ck->nk", q, queue.clone().detach())
            logits = torch.cat([positive, negative], dim=1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue[:, at : at + k.shape[0]] = k.T
            at = (at + k.shape[0]) % 12
            losses.append(loss.item())
    return {"loss": losses, "queue": queue, "at": at, "weights": weights(query), "key": weights(key)}


class _MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.arange(48.0).view(12, 4).cos(), dim=1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, a, b):
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for p, t in zip(self.query.parameters(), self.key.parameters(), strict=True):
                t.mul_(0.9).add_(p, alpha=0.1)
            k = F.normalize(self.key(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T.clone()], 1) / 0.2
        with torch.no_grad():
            at = int(self.at)
            self.queue[at : at + len(k)] = k
            self.at[0] = (at + len(k)) % 12
        return logits, torch.zeros(len(a), dtype=torch.long)


def moco_queue_in_the_module():
    """MoCo as one module whose forward fills the queue buffer with the batch's keys."""
    torch.manual_seed(0)
    x, _ = blobs(24)
    model = _MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for (a,) in DataLoader(TensorDataset(x), batch_size=6):
            logits, target = model(a, a + 0.1)
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"loss": losses, "queue": model.queue.clone(), "at": int(model.at), "weights": weights(model)}


def byol_with_ema_target():
    """BYOL: predictor, target network updated by EMA after the step, symmetric cosine loss, stop gradient."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    online, predictor = nn.Linear(6, 4), nn.Linear(4, 4)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.1)
    losses = []
    for u, v in DataLoader(_TwoViews(x), batch_size=8, shuffle=True):
        p1, p2 = predictor(online(u)), predictor(online(v))
        with torch.no_grad():
            t1, t2 = target(u), target(v)
        loss = (2 - 2 * F.cosine_similarity(p1, t2.detach(), dim=-1)).mean() + (2 - 2 * F.cosine_similarity(p2, t1.detach(), dim=-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, t in zip(online.parameters(), target.parameters(), strict=True):
                t.lerp_(p, 0.1)
        losses.append((loss.item(), F.normalize(t1, dim=1).std(0).mean().item()))
    return {"loss": losses, "weights": weights(online), "target": weights(target)}


def memory_of_an_earlier_batch():
    """Compares each batch with the features of the batch before it, which a variable keeps."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before, losses = None, []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8):
        z = model(a)
        loss = z.pow(2).mean()
        if before is not None:
            loss = loss + torch.cdist(z, before).mean() + (z[:2] - before[:2]).abs().mean()
            if before.shape == z.shape:
                loss = loss + F.mse_loss(z, before)
        before = z.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "last": before.tolist(), "weights": weights(model)}


def center_loss():
    """Center loss: class centres in a plain tensor move to the means of this batch's features."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model, head = nn.Linear(6, 4), nn.Linear(4, 3)
    centres = torch.zeros(3, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        f = model(a)
        loss = F.cross_entropy(head(f), b) + 0.1 * (f - centres[b]).pow(2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for k in b.unique():
                centres[k] += 0.5 * (f[b == k].mean(0) - centres[k])
        losses.append(loss.item())
    return {"loss": losses, "centres": centres, "weights": weights(model)}


class _Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.register_buffer("centres", torch.zeros(3, 4))

    def forward(self, a, b=None):
        f = self.body(a)
        if self.training and b is not None:
            with torch.no_grad():
                hot = F.one_hot(b, 3).float()
                counts = hot.sum(0)
                means = hot.T @ f / counts.clamp(min=1)[:, None]
                self.centres.copy_(torch.where((counts > 0)[:, None], 0.8 * self.centres + 0.2 * means, self.centres))
        return -torch.cdist(f, self.centres.clone()).pow(2)


def prototypes_in_a_buffer_of_the_module():
    """A module whose buffer follows the class means of the batches that it sees; then an evaluation."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = _Prototypes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    for a, b in loader:
        loss = F.cross_entropy(model(a, b), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in loader)
    return {"loss": losses, "centres": model.centres.clone(), "right": right, "weights": weights(model)}


def vq_codebook_with_ema():
    """VQ-VAE: nearest codes by argmin of cdist, straight-through gradients, EMA codebook from batch counts."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    encoder, decoder = nn.Linear(6, 3), nn.Linear(3, 6)
    codes, count, total = torch.randn(5, 3), torch.ones(5), None
    total = codes.clone()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.05)
    losses = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8):
        z = encoder(a)
        nearest = torch.cdist(z, codes).argmin(1)
        q = codes[nearest]
        loss = F.mse_loss(decoder(z + (q - z).detach()), a) + 0.25 * F.mse_loss(z, q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hot = F.one_hot(nearest, 5).float()
        count = 0.9 * count + 0.1 * hot.sum(0)
        total = 0.9 * total + 0.1 * hot.T @ z.detach()
        codes = total / count[:, None]
        use = hot.mean(0)
        losses.append((loss.item(), torch.exp(-(use * (use + 1e-9).log()).sum()).item()))
    return {"loss": losses, "codes": codes, "weights": weights(encoder)}
