"""Modules of unusual kinds: what they take, return, and look at."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def _train(model, loader, step, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in loader:
        loss = step(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class _Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x)
        return self.head(h - h.mean(0, keepdim=True))


def module_that_centres_the_batch():
    """A module whose forward subtracts the batch's mean."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = _Centred()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    return {"loss": _train(model, loader, lambda a, b: F.cross_entropy(model(a), b)), "weights": weights(model)}


class _AcrossBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.softmax(self.q(x) @ self.k(x).T, 1) @ x + x)


def attention_over_the_batch():
    """A module in which samples attend to each other."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = _AcrossBatch()
    loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)
    return {"loss": _train(model, loader, lambda a, b: F.cross_entropy(model(a), b)), "weights": weights(model)}


class _WithLoss(nn.Module):
    def __init__(self, as_dict):
        super().__init__()
        self.body, self.as_dict = nn.Linear(6, 3), as_dict

    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = None if labels is None else F.cross_entropy(logits, labels, ignore_index=-100)
        return {"loss": loss, "logits": logits, "n": len(x)} if self.as_dict else (loss, logits)


def module_that_returns_its_loss():
    """A module that returns (loss, logits), with some labels ignored (-100), unevenly over the batch."""
    torch.manual_seed(0)
    x, y = blobs(26)
    y[torch.tensor([0, 1, 2, 9, 17])] = -100
    model = _WithLoss(False)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    logits = []

    def step(a, b):
        loss, out = model(a, b)
        logits.append(out.detach())
        return loss

    return {"loss": _train(model, loader, step), "logits": torch.cat(logits), "weights": weights(model)}


def module_that_returns_a_dict():
    """A module that returns a dict with its loss, logits and the number of samples it saw."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = _WithLoss(True)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    seen = []

    def step(a, b):
        out = model(a, labels=b)
        seen.append((out["n"], tuple(out["logits"].shape), (out["logits"].argmax(-1) == b).float().mean().item()))
        return out["loss"]

    return {"loss": _train(model, loader, step), "seen": seen, "weights": weights(model)}


class _Regularised(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 1)

    def forward(self, x):
        out = self.body(x)
        return out, self.body.weight.pow(2).sum(), out.abs().mean()

    def penalty(self):
        return self.body.weight.abs().sum()


def module_with_scalar_outputs():
    """A module that also returns a penalty of its weights and a mean activity, and has a method for another one."""
    torch.manual_seed(0)
    x, y = line(26)
    model = _Regularised()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    log = []

    def step(a, b):
        out, decay, activity = model(a)
        log.append((decay.item(), activity.item()))
        return F.mse_loss(out, b) + 0.01 * decay + 0.02 * activity + 0.01 * model.penalty()

    return {"loss": _train(model, loader, step), "log": log, "weights": weights(model)}


class _Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self):
        return self.values.softmax(0)


def module_without_batch_inputs():
    """A module without arguments whose output has 8 entries, as many as the batch has rows."""
    torch.manual_seed(0)
    x, y = line(24, 8)
    mixer, model = _Weights(), nn.Linear(8, 1)
    both = nn.ModuleList([mixer, model])
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    return {"loss": _train(both, loader, lambda a, b: F.mse_loss(model(a * mixer()), b)), "weights": weights(both)}


class _Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, x):
        return self.body(x).mean(0)


def module_output_without_rows():
    """A module that pools the batch to one vector of 6 numbers, where a batch also has 6 rows."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = _Pooled()
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    shapes = []

    def step(a, b):
        pooled = model(a)
        shapes.append((tuple(pooled.shape), pooled.sum().item()))
        return (pooled - a.mean(0)).pow(2).sum() + pooled.std()

    return {"loss": _train(model, loader, step), "shapes": shapes, "weights": weights(model)}


def forward_hooks_that_collect_features():
    """Forward hooks collect activations of an inner layer and their batch statistics."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    features, stats = [], []

    def hook(module, args, output):
        features.append(output.detach())
        stats.append((output.mean().item(), output.shape[0], args[0].shape[0]))

    handle = model[1].register_forward_hook(hook)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    losses = _train(model, loader, lambda a, b: F.cross_entropy(model(a), b) + 0.01 * features[-1].shape[0])
    handle.remove()
    return {"loss": losses, "features": torch.cat(features), "stats": stats}


def multihead_attention_in_the_loop():
    """nn.MultiheadAttention with a key padding mask and an attention mask, weights returned."""
    torch.manual_seed(0)
    x, lengths = torch.randn(26, 5, 8), torch.randint(1, 6, (26,))
    attention, head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)
    both = nn.ModuleList([attention, head])
    maps = []

    def step(a, n):
        padding = torch.arange(5)[None] >= n[:, None]
        out, w = attention(a, a, a, key_padding_mask=padding, attn_mask=torch.zeros(5, 5))
        maps.append(w.detach()[:, 0].sum(0).tolist())
        out = head(out.masked_fill(padding[..., None], 0).sum(1) / n[:, None])
        return F.cross_entropy(out, (n > 2).long())

    loader = DataLoader(TensorDataset(x, lengths), batch_size=8)
    return {"loss": _train(both, loader, step), "maps": maps, "weights": weights(both)}


def attention_outside_of_modules():
    """F.scaled_dot_product_attention, F.linear, F.layer_norm and F.conv1d in the loop with bare parameters."""
    torch.manual_seed(0)
    x, y = torch.randn(26, 4, 6), torch.arange(26) % 2
    qkv = nn.Parameter(torch.randn(18, 6) * 0.3)
    kernel, out_weight = nn.Parameter(torch.randn(6, 6, 3) * 0.2), nn.Parameter(torch.randn(2, 6))
    both = nn.ParameterList([qkv, kernel, out_weight])

    def step(a, b):
        q, k, v = F.linear(F.layer_norm(a, (6,)), qkv).view(len(a), 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = F.conv1d(h.transpose(1, 2), kernel, padding=1)
        h = F.gelu(F.adaptive_avg_pool1d(h, 1)).squeeze(-1)
        return F.cross_entropy(h @ out_weight.T, b)

    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    return {"loss": _train(both, loader, step), "weights": weights(both)}


def compiled_model():
    """A model through torch.compile(backend='eager'), trained and evaluated."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    fast = torch.compile(model, backend="eager")
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    losses = _train(model, loader, lambda a, b: F.cross_entropy(fast(a), b))
    with torch.no_grad():
        right = sum(int((fast(a).argmax(1) == b).sum()) for a, b in loader)
    return {"loss": losses, "right": right, "weights": weights(model)}


def compiled_training_step():
    """The whole step (forward, loss over the batch) compiled with backend='eager'."""
    torch.manual_seed(0)
    x, y = blobs(24)
    model = nn.Linear(6, 3)

    @torch.compile(backend="eager")
    def step(a, b):
        out = model(a)
        return F.cross_entropy(out, b) + (out - out.mean(0)).pow(2).mean() * 0.1 / a.shape[0]

    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    return {"loss": _train(model, loader, step), "weights": weights(model)}


def data_parallel_wrapper():
    """nn.DataParallel around the model, with .module for saving."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.DataParallel(nn.Linear(6, 3))
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    losses = _train(model, loader, lambda a, b: F.cross_entropy(model(a), b))
    return {"loss": losses, "weights": weights(model.module), "keys": list(model.state_dict())}


class _VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.decoder(z), mu, logvar


def vae_reparameterized_in_the_module():
    """A VAE that draws in its forward; what does not hang on the draws is compared, and an evaluation of fixed weights."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    model = _VAE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x), batch_size=8)
    start = copy.deepcopy(model.state_dict())
    shapes, kls, finite = [], [], True
    for (a,) in loader:
        out, mu, logvar = model(a)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum() / len(a)
        if not shapes:
            kls.append(kl.item())
        loss = F.mse_loss(out, a, reduction="none").sum(1).mean() + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        finite = finite and bool(torch.isfinite(loss))
        shapes.append((tuple(out.shape), tuple(mu.shape)))
    model.load_state_dict(start)
    model.eval()
    with torch.no_grad():
        total = sum(F.mse_loss(model(a)[0], a, reduction="sum").item() for (a,) in loader)
    return {"shapes": shapes, "kl": kls, "finite": finite, "total": total}


def dropout_module():
    """A model with dropout: sane losses, and its evaluation with a learning rate of zero."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    zeros = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        model.train()
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zeros.append(bool(0 < loss.item() < 20))
    model.eval()
    return {"sane": zeros, "out": model(a).detach().tolist(), "weights": weights(model)}


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.GRUCell(3, 4), nn.Linear(4, 1), None

    def forward(self, x):
        if self.state is None or self.state.shape[0] != x.shape[0]:
            self.state = x.new_zeros(x.shape[0], 4)
        self.state = self.cell(x, self.state.detach())
        return self.head(self.state)


def module_that_keeps_hidden_state():
    """A module that keeps its hidden state as an attribute over batches; the script reads it."""
    torch.manual_seed(0)
    x, y = line(24, 3)
    model = _Recurrent()
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    log = []

    def step(a, b):
        loss = F.mse_loss(model(a), b)
        log.append((tuple(model.state.shape), model.state.detach().mean().item()))
        return loss

    return {"loss": _train(model, loader, step), "log": log, "weights": weights(model)}


class _MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x):
        p = self.gate(x).softmax(1)
        chosen = p.argmax(1)
        out = torch.zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * p[rows, i : i + 1])
        share = F.one_hot(chosen, 3).float().mean(0)
        return out, 3 * (share * p.mean(0)).sum()


def mixture_of_experts_with_balance_loss():
    """Top-1 routing: experts see different numbers of rows; the balance loss is a product of batch means."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = _MoE()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    balances = []

    def step(a, b):
        out, balance = model(a)
        balances.append(balance.item())
        return F.cross_entropy(out, b) + 0.1 * balance

    return {"loss": _train(model, loader, step), "balance": balances, "weights": weights(model)}


def criterion_module_with_parameters():
    """A criterion that is a module with parameters (ArcFace-like margin head, uncertainty weights)."""

    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.log_var = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(2))

        def forward(self, f, labels):
            cosine = F.linear(F.normalize(f), F.normalize(self.weight)).clamp(-0.99, 0.99)
            angle = torch.acos(cosine)
            logits = 4 * torch.where(F.one_hot(labels, 3).bool(), torch.cos(angle + 0.2), cosine)
            ce = F.cross_entropy(logits, labels)
            return (torch.exp(-self.log_var) * torch.stack([ce, f.pow(2).mean()])).sum() + self.log_var.sum()

    torch.manual_seed(0)
    x, y = blobs(26)
    both = nn.ModuleList([nn.Linear(6, 4), Margin()])
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    return {"loss": _train(both, loader, lambda a, b: both[1](both[0](a), b)), "weights": weights(both)}


def siamese_one_model_two_inputs():
    """One model called twice per step and once with pairs; distances decide accuracy by a median threshold."""
    torch.manual_seed(0)
    x, y = blobs(26)
    pairs = TensorDataset(x, x.roll(5, 0), (y == y.roll(5)).float())
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    log = []

    def step(a, b, same):
        d = F.pairwise_distance(model(a), model(b))
        threshold = d.median()
        log.append((threshold.item(), ((d < threshold) == (same > 0.5)).float().mean().item()))
        return (same * d.pow(2) + (1 - same) * F.relu(1 - d).pow(2)).mean()

    return {"loss": _train(model, DataLoader(pairs, batch_size=7), step), "log": log, "weights": weights(model)}


def conv_and_transposed_unet():
    """A small U-Net for segmentation with pixel losses, class weights and IoU by hand."""
    torch.manual_seed(0)
    x, _ = images(26)
    mask = (x[:, 0] > 0.7).long()

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.out = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(4, 2, 1)

        def forward(self, a):
            return self.out(torch.cat([self.up(F.relu(self.down(a))), a], 1))

    model = UNet()
    inter, union = torch.zeros(2), torch.zeros(2)

    def step(a, m):
        out = model(a)
        p = out.argmax(1)
        for k in range(2):
            inter[k] += ((p == k) & (m == k)).sum()
            union[k] += ((p == k) | (m == k)).sum()
        soft = out.softmax(1)[:, 1]
        dice = 1 - (2 * (soft * m).sum() + 1) / (soft.sum() + m.sum() + 1)
        return F.cross_entropy(out, m, weight=torch.tensor([1.0, 2.0])) + dice

    losses = _train(model, DataLoader(TensorDataset(x, mask), batch_size=7), step)
    return {"loss": losses, "iou": inter / union.clamp(min=1), "weights": weights(model)}
