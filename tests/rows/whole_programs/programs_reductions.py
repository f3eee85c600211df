"""Statistics over rows, pairs of rows, and all numbers of a batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def moments_of_batches():
    """Means, standard deviations, variances, medians, quantiles and extremes over rows and over all."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        seen.append([f().tolist() for f in (a.mean, a.std, a.var, a.median, a.max, a.min, a.sum, a.norm)])
        seen.append([a.mean(0).tolist(), a.std(0).tolist(), a.var(dim=0, unbiased=False).tolist(), a.median(0).values.tolist()])
        seen.append(
            [a.max(0).values.tolist(), a.max(0).indices.tolist(), a.min(dim=1)[0].tolist(), a.amax(0).tolist(), a.norm(dim=0).tolist()]
        )
        seen.append([a.quantile(0.3).item(), a.quantile(0.5, dim=0).tolist(), torch.var_mean(a, 0)[1].tolist(), a.prod(1).tolist()])
        seen.append([a.logsumexp(0).tolist(), a.softmax(0)[0].tolist(), F.normalize(a, dim=0)[-1].tolist(), a.aminmax()[1].item()])
    return {"seen": seen}


def gram_matrices():
    """x @ x.T, x.T @ x, einsum, cdist, outer products and cosine similarities of all pairs."""
    torch.manual_seed(0)
    x, _ = line(26)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        pairs, gram = a @ a.T, a.T @ a
        seen.append((tuple(pairs.shape), pairs.sum(0).tolist(), gram.tolist(), torch.cdist(a, a).sum(1).tolist()))
        seen.append((torch.einsum("bi,ci->bc", a, a).trace().item(), torch.einsum("bi,bj->ij", a, a).sum().item()))
        seen.append((torch.outer(a[:, 0], a[:, 1]).sum(1).tolist(), torch.einsum("bi,bj->bij", a, a)[0].sum(0).tolist()))
        seen.append(
            (F.cosine_similarity(a[:, None], a[None], dim=-1).mean(1).tolist(), torch.corrcoef(a.T)[0].tolist(), a.T.cov()[1].tolist())
        )
        seen.append(
            (torch.linalg.norm(a).item(), torch.linalg.svdvals(a).tolist(), torch.triu(pairs, 1).sum().item(), torch.diag(pairs).tolist())
        )
    return {"seen": seen}


def correlation_loss():
    """Trains by 1 - Pearson correlation of predictions and targets in the batch."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            out, target = model(a).squeeze(1), b.squeeze(1)
            out, target = out - out.mean(), target - target.mean()
            loss = 1 - (out * target).sum() / (out.norm() * target.norm() + 1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def barlow_twins_and_vicreg():
    """Cross-correlation of two views' features over the batch, with variance and covariance terms."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8, shuffle=True, drop_last=True):
        z1, z2 = model(a + 0.1 * torch.randn_like(a)), model(a + 0.1 * torch.randn_like(a))
        n = a.shape[0]
        c = ((z1 - z1.mean(0)) / (z1.std(0) + 1e-3)).T @ ((z2 - z2.mean(0)) / (z2.std(0) + 1e-3)) / n
        barlow = (torch.diagonal(c) - 1).pow(2).sum() + 0.05 * (c - torch.diag(torch.diag(c))).pow(2).sum()
        spread = F.relu(1 - torch.sqrt(z1.var(dim=0) + 1e-4)).mean()
        centred = z2 - z2.mean(dim=0)
        covariance = (centred.T @ centred) / (n - 1)
        loss = barlow + spread + 0.04 * covariance.fill_diagonal_(0).pow(2).sum() / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def loss_weighted_by_batch_statistics():
    """Class weights from the counts in this batch, and a loss divided by the targets' spread."""
    torch.manual_seed(0)
    x, y = blobs(26)
    y = torch.where(torch.arange(26) < 15, y.clamp_max(1), y)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        counts = torch.bincount(b, minlength=3).float()
        weight = counts.sum() / (3 * counts.clamp(min=1))
        out = model(a)
        loss = F.cross_entropy(out, b, weight=weight) + out.pow(2).mean() / (b.float().var() + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), weight.tolist()))
    return {"loss": losses, "weights": weights(model)}


def criteria_of_all_kinds():
    """The criteria of torch.nn with mean, sum and none, class weights and label smoothing."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = torch.tensor([1.0, 2.0, 0.5])
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a)
        hot = F.one_hot(b, 3).float()
        sign = (b == 0).float() * 2 - 1
        terms = [
            nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(out, b),
            nn.CrossEntropyLoss(reduction="sum")(out, b) / len(b),
            nn.CrossEntropyLoss(ignore_index=2)(out, b),
            nn.CrossEntropyLoss()(out, hot * 0.9 + 0.1 / 3),
            nn.NLLLoss(weight=weight)(out.log_softmax(1), b),
            nn.BCEWithLogitsLoss(pos_weight=weight)(out, hot),
            nn.BCELoss()(out.sigmoid(), hot),
            nn.MSELoss(reduction="sum")(out, hot) / b.numel(),
            nn.SmoothL1Loss(beta=0.5)(out, hot),
            nn.HuberLoss()(out, hot),
            nn.KLDivLoss(reduction="batchmean")(out.log_softmax(1), hot),
            nn.MultiMarginLoss()(out, b),
            nn.MultiLabelSoftMarginLoss()(out, hot),
            nn.SoftMarginLoss()(out[:, 0], sign),
            nn.MarginRankingLoss(margin=0.1)(out[:, 0], out[:, 1], sign),
            nn.CosineEmbeddingLoss()(out, out.flip(1), sign),
            nn.HingeEmbeddingLoss()(out[:, 2].abs(), sign),
            nn.GaussianNLLLoss()(out[:, 0], hot[:, 0], out[:, 1].exp()),
            nn.PoissonNLLLoss()(out, hot),
            nn.TripletMarginLoss()(out, out + 0.1, out.flip(1)),
        ]
        loss = sum(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append([t.item() for t in terms])
    return {"loss": losses, "weights": weights(model)}


def masked_means():
    """Means over the valid positions of a batch only: (loss * mask).sum() / mask.sum()."""
    torch.manual_seed(0)
    x = torch.randn(26, 5, 3)
    lengths = torch.randint(1, 6, (26,))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, n in DataLoader(TensorDataset(x, lengths), batch_size=8):
        mask = (torch.arange(a.size(1))[None] < n[:, None]).float()
        error = (model(a).squeeze(-1) - a.sum(-1)).pow(2)
        loss = (error * mask).sum() / mask.sum()
        per_sample = (error * mask).sum(1) / n
        optimizer.zero_grad()
        (loss + 0.1 * per_sample.max()).backward()
        optimizer.step()
        losses.append((loss.item(), per_sample.tolist(), int(mask.sum()), error[mask.bool()].mean().item()))
    return {"loss": losses, "weights": weights(model)}


def running_statistics_of_a_dataset():
    """Mean and std of the channels of a dataset, summed up by hand over batches."""
    torch.manual_seed(0)
    x, _ = images(26, c=3)
    n, total, squares, low, high = 0, 0.0, torch.zeros(3), float("inf"), -float("inf")
    means = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8):
        n += a.shape[0]
        total += a.mean([2, 3]).sum(0)
        squares += (a**2).mean([2, 3]).sum(0)
        low, high = min(low, a.min().item()), max(high, a.max().item())
        means.append(a.mean())
    mean = total / n
    std = (squares / n - mean**2).sqrt()
    return {"mean": mean, "std": std, "n": n, "range": (low, high), "means": float(sum(means) / len(means))}


def welford():
    """Running mean and variance merged batch by batch, as a normaliser of observations does."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    count, mean, m2 = 0, torch.zeros(6), torch.zeros(6)
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        n, delta = len(a), a.mean(0) - mean
        m2 = m2 + a.var(0, unbiased=False) * n + delta**2 * count * n / (count + n)
        mean = mean + delta * n / (count + n)
        count += n
    return {"mean": mean, "var": m2 / count, "count": count}


def entropy_of_mean_prediction():
    """Mean-teacher style diversity: the entropy of the mean softmax over the batch, and a Sinkhorn step."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        p = model(a).softmax(1)
        with torch.no_grad():
            q = (p / 0.5).exp()
            for _ in range(3):
                q = q / q.sum(0, keepdim=True)
                q = q / q.sum(1, keepdim=True)
        mean = p.mean(0)
        loss = (mean * mean.log()).sum() - (q * p.log()).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), q[0].tolist()))
    return {"loss": losses, "weights": weights(model)}


def mmd_and_coral():
    """Domain adaptation: kernel MMD and CORAL between two loaders' features, zipped."""
    torch.manual_seed(0)
    x, y = blobs(24)
    target = x[torch.randperm(24)] * 1.5 + 0.3
    model, head = nn.Linear(6, 4), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
    losses = []
    for (a, b), (t,) in zip(DataLoader(TensorDataset(x, y), batch_size=7), DataLoader(TensorDataset(target), batch_size=5), strict=False):
        f, g = model(a), model(t)
        both = torch.cat([f, g])
        kernel = torch.exp(-torch.cdist(both, both).pow(2) / 4)
        n = len(f)
        mmd = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
        coral = (torch.cov(f.T) - torch.cov(g.T)).pow(2).mean()
        loss = F.cross_entropy(head(f), b) + mmd + 0.1 * coral
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), mmd.item(), len(both)))
    return {"loss": losses, "weights": weights(model)}
