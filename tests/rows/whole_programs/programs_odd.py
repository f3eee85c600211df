"""What few users do, and a library might."""

import hashlib
import itertools
import queue
import random
import threading
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def draws_of_the_batch_size():
    """Draws of all kinds outside of modules: like x, of x's shape, in place, from distributions, functional dropout."""
    torch.manual_seed(0)
    x, y = blobs(26)
    own = torch.Generator().manual_seed(3)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        n = len(a)
        p = a.softmax(1)
        drawn = [
            torch.randn(n, 2),
            torch.rand(a.shape),
            torch.rand_like(a),
            torch.randn(a.size(), generator=own),
            torch.randint_like(b, 10).float(),
            torch.bernoulli(p),
            torch.normal(a, 0.1),
            torch.normal(a.mean(), torch.ones(())),
            torch.multinomial(p, 2).float(),
            torch.empty_like(a).exponential_(),
            a.new_empty(n, 3).normal_(),
            a.clone().uniform_(0, 1),
            F.dropout(a, 0.3),
            F.gumbel_softmax(a, tau=0.5),
            torch.distributions.Normal(a, 1.0).rsample(),
            torch.distributions.Dirichlet(p + 0.1).sample(),
            torch.distributions.Bernoulli(logits=a[:, 0]).sample(),
            torch.poisson(p * 3),
            F.rrelu(a, training=True),
            torch.randn(3),
        ]
        seen.append([d.sum().item() for d in drawn] + [d.flatten()[-1].item() for d in drawn])
    return {"seen": seen}


def python_and_numpy_decide():
    """random and numpy.random decide per batch and per sample which augmentation a batch gets."""
    torch.manual_seed(0)
    random.seed(0)
    rng = np.random.default_rng(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        if random.random() < 0.5:
            a = a.flip(1)
        i, j = random.sample(range(len(a)), 2)
        lam = rng.beta(0.5, 0.5, size=len(a))
        a = a + torch.from_numpy(rng.normal(size=tuple(a.shape))).float() * torch.tensor(lam, dtype=torch.float32)[:, None]
        order = rng.permutation(len(a))
        seen.append(
            (a[order].sum(1).tolist(), a[i].sum().item(), b[j].item(), a[torch.as_tensor(order)][0].tolist(), random.choice(b).item())
        )
    return {"seen": seen}


def all_index_forms():
    """Lists, bools, ints of numpy, tensors of no dimensions, slices as objects, pairs of lists, ellipses with None."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
        if len(a) < 3:
            continue
        parts = [
            a[[0, 2]], a[[-1, 0], [1, 2]], a[torch.tensor(1)], a[np.int64(2)], a[slice(1, 3)], a[..., None, 0], a[True], a[()],
            a[:, [0, 2]], a[:, torch.tensor([True, False] * 3)], a[[True] * len(a)], a[1:3, 2:4], a[:0], a[100:], a[None, :, None],
            a[torch.zeros(2, 2, dtype=torch.long)], a[b.bool()], a[b], a[-2], a[-2:-1], a[torch.arange(len(a) - 1, -1, -1)],
            a.select(0, 1), a.take(torch.tensor([0, 7, -1])),
            a.narrow(0, 1, 2), a.masked_select(a > 0), a.index_select(1, torch.tensor([5])),
        ]  # fmt: skip
        seen.append([(tuple(p.shape), p.sum().item()) for p in parts])
        a[[0, 1]] = a[[1, 0]]
        a[[0, 1], [2, 3]] = torch.tensor([5.0, 6.0])
        a[1:3, 2:4] *= 0.5
        a[..., -1][b == 0] = 3
        a.index_put_((torch.tensor([0, 0]), torch.tensor([1, 1])), torch.tensor([1.0, 2.0]), accumulate=True)
        del b
        seen.append(a.tolist())
    return {"seen": seen}


def in_place_shape_changes():
    """unsqueeze_, squeeze_, transpose_, t_, resize by reshape, on batches and on a clone."""
    torch.manual_seed(0)
    x, _ = line(26)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        a.unsqueeze_(1)
        seen.append(tuple(a.shape))
        a.squeeze_(1)
        c = a.clone()
        c.t_()
        seen.append((tuple(c.shape), c[0].tolist(), c.sum(0).tolist()))
        c.transpose_(0, 1)
        seen.append((tuple(c.shape), c.mean(0).tolist(), c.equal(a)))
    return {"seen": seen}


def model_on_parts_of_the_batch():
    """Calls the model on one row, a masked part, an empty part, twice the batch, and each row alone."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        one, none, part = model(a[0]), model(a[b == 99]), model(a[b == 0])
        both = model(torch.cat([a, a.flip(0)]))
        alone = torch.cat([model(a[i : i + 1]) for i in range(len(a))])
        single = torch.stack([model(row) for row in a])
        loss = one.pow(2).sum() + part.pow(2).sum() + both[:, 0].mean() + F.cross_entropy(alone, b) + single[:, 1].var() + none.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), tuple(one.shape), tuple(none.shape), tuple(part.shape), tuple(both.shape), torch.allclose(alone, single)))
    return {"log": log, "weights": weights(model)}


def parameters_made_of_a_batch():
    """Optimizes a perturbation of the batch's shape as nn.Parameter, and prototypes that begin as rows."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    for p in model.parameters():
        p.requires_grad_(False)
    log, prototypes = [], None
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        if prototypes is None:
            prototypes = nn.Parameter(a[:3].clone())
            slow = torch.optim.SGD([prototypes], lr=0.1)
        delta = nn.Parameter(torch.zeros_like(a))
        optimizer = torch.optim.SGD([delta], lr=1.0, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a + delta), b) + 0.1 * delta.pow(2).sum() / len(a)
            loss.backward()
            optimizer.step()
        slow.zero_grad()
        pull = torch.cdist(a + delta.detach(), prototypes).min(1).values.mean()
        pull.backward()
        slow.step()
        log.append((loss.item(), delta.norm().item(), delta.grad.sum(0).tolist(), pull.item()))
    return {"log": log, "prototypes": prototypes.detach().clone()}


def data_dependent_initialisation():
    """Sets a bias to the first targets' mean, buffers to the first batch's mean and std, weights by its PCA."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    model.register_buffer("mean", torch.zeros(5))
    model.register_buffer("std", torch.ones(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        if i == 0:
            model.mean, model.std = a.mean(0), a.std(0)
            with torch.no_grad():
                model.bias.copy_(b.mean(0))
            model.weight.data = torch.linalg.eigh(a.T @ a)[1][:, -1:].abs().T.contiguous()
        loss = F.mse_loss(model((a - model.mean) / model.std), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    return {"log": log, "state": {k: v.clone() for k, v in model.state_dict().items()}}


def loader_over_a_batch():
    """PPO-like: a batch becomes a TensorDataset of its own, with mini-batches and several epochs."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=13):
        for _ in range(2):
            for c, d in DataLoader(TensorDataset(a, b), batch_size=5, shuffle=True):
                loss = F.mse_loss(model(c), d)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                log.append((loss.item(), len(c)))
        for order in torch.randperm(len(a)).split(6):
            log.append(F.mse_loss(model(a[order]), b[order]).item())
    return {"log": log, "weights": weights(model)}


def batches_kept_in_a_list():
    """batches = list(loader); several epochs over the list, in random order, then rows of all of them."""
    torch.manual_seed(0)
    random.seed(0)
    x, y = blobs(26)
    batches = list(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        random.shuffle(batches)
        for a, b in batches:
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    everything = torch.cat([a for a, _ in batches])
    return {"loss": losses, "all": everything, "labels": torch.cat([b for _, b in batches]).tolist(), "weights": weights(model)}


def replay_buffer_of_rows():
    """Continual learning: rows of batches go to a deque, random ones are stacked and mixed with new rows."""
    torch.manual_seed(0)
    random.seed(1)
    x, y = blobs(26)
    memory = deque(maxlen=10)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
        inputs, targets = a, b
        if len(memory) >= 4:
            old = random.sample(list(memory), 4)
            inputs = torch.cat([a, torch.stack([m[0] for m in old])])
            targets = torch.cat([b, torch.stack([m[1] for m in old])])
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.extend(zip(a, b, strict=True))
        log.append((loss.item(), len(inputs), len(memory)))
    return {"log": log, "memory": torch.stack([m[0] for m in memory]), "weights": weights(model)}


def prefetcher_thread():
    """A thread reads batches ahead, moves them with .to, and hands them over in a queue."""
    torch.manual_seed(0)
    x, y = blobs(26)
    ready = queue.Queue(2)

    def read():
        for batch in DataLoader(TensorDataset(x, y), batch_size=8):
            ready.put([t.to("cpu", non_blocking=True) for t in batch])
        ready.put(None)

    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    losses = []
    while (batch := ready.get(timeout=20)) is not None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(batch[0])))
    thread.join()
    return {"loss": losses, "weights": weights(model)}


def tensor_type_checks():
    """What helpers of libraries ask: isinstance, type, is_tensor, dtype, device, data_ptr, storage, is_leaf, dlpack, bytes."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        c = a * 1
        seen.append((isinstance(a, torch.Tensor), torch.is_tensor(b), a.is_leaf, a.requires_grad, a.grad_fn is None, a.data_ptr() != 0))
        seen.append(
            (type(c.detach().cpu().numpy()).__name__, torch.from_dlpack(c).sum().item(), np.from_dlpack(c).shape, a.type(), b.type())
        )
        seen.append((hashlib.sha1(b.numpy().tobytes()).hexdigest()[:8], c.data.shape, a.element_size() * a.nelement(), a.nbytes))
        seen.append(
            (
                torch.tensor(a.shape).tolist(),
                torch.result_type(a, b) == torch.float32,
                a.untyped_storage().nbytes() >= a.nbytes,
                hasattr(a, "grad"),
            )
        )
    return {"seen": seen}


def dtypes_and_integers():
    """double, half, bool and integer arithmetic on labels: //, %, ^, &, ~, <<, comparison chains, type promotion."""
    torch.manual_seed(0)
    x, y = blobs(26, classes=5)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        m = (b > 1) & (b != 3) | ~(b <= 3)
        results = [
            b // 2,
            b % 2,
            b ^ 1,
            b << 1,
            -b,
            b**2,
            7 - b,
            b / 2,
            m.int(),
            m ^ (b == 0),
            a.double() @ torch.ones(6, 1).double(),
            a.half().float(),
        ]
        results += [
            a > b[:, None],
            a.to(torch.bfloat16).float(),
            b.float() * a[:, 0],
            a.long(),
            a.bool(),
            torch.bitwise_or(b, 1),
            b.clamp(1, 3),
            b.to(a),
        ]
        seen.append([(str(r.dtype), r.sum().item()) for r in results])
        seen.append(
            (b.sum().item() / len(b), b.float().mean().item(), b.max().item(), (b == b.mode().values).sum().item(), m.sum() * 2 == 4)
        )
    return {"seen": [[bool(v) if isinstance(v, torch.Tensor) else v for v in s] for s in seen]}


def transforms_over_all_dimensions():
    """fft along rows and columns, complex numbers, lstsq, cholesky, svd, roll, rot90, tril, kron of a batch."""
    torch.manual_seed(0)
    x, _ = line(24)
    seen = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8):
        gram = a.T @ a + torch.eye(5)
        seen.append((torch.fft.rfft(a, dim=1).abs().sum(1).tolist(), torch.fft.rfft(a, dim=0).abs().sum(0).tolist()))
        seen.append((torch.fft.fft2(a).real.sum().item(), torch.linalg.lstsq(a, a[:, :1]).solution.flatten().tolist()))
        seen.append(
            (
                torch.linalg.cholesky(gram).diagonal().tolist(),
                torch.linalg.qr(a)[1].diagonal().abs().tolist(),
                torch.linalg.pinv(a).sum().item(),
            )
        )
        seen.append(
            (
                torch.rot90(a).shape,
                torch.rot90(a)[0].tolist(),
                a.tril().sum().item(),
                torch.kron(a[:2], a[2:4]).sum().item(),
                a.trace().item(),
            )
        )
        seen.append(
            (
                torch.complex(a, a * 2).abs().mean().item(),
                a.view(-1)[::3].sum().item(),
                torch.cartesian_prod(a[:, 0], a[:, 1]).sum(0).tolist(),
            )
        )
    return {"seen": seen}


def modules_without_parameters():
    """nn.Softmax(dim=0), nn.BatchNorm1d without affine, nn.Flatten(0), nn.PairwiseDistance, nn.Unflatten over rows."""
    torch.manual_seed(0)
    x, y = blobs(24)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a)
        p = nn.Softmax(dim=0)(out)
        whitened = norm(out)
        flat = nn.Flatten(0)(out)
        two = nn.Unflatten(0, (2, 4))(out)
        loss = (p * whitened).sum() + 0.1 * flat.norm() + (two[0] - two[1]).pow(2).mean() + nn.PairwiseDistance()(out, out.flip(0)).mean()
        loss = loss + F.batch_norm(out, None, None, training=True).relu().mean() + nn.CosineSimilarity(dim=0)(out[:, 0], b.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), p.sum(0).tolist(), tuple(flat.shape), tuple(two.shape), whitened.std().item()))
    return {"log": log, "weights": weights(model)}


def phases_of_a_tutorial():
    """for phase in ['train', 'val'] with set_grad_enabled, running loss times batch size, best accuracy, k folds."""
    torch.manual_seed(0)
    x, y = blobs(26)
    data, log = TensorDataset(x, y), []
    for fold in range(2):
        torch.manual_seed(fold)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        split = {"train": [i for i in range(26) if i % 3 != fold], "val": [i for i in range(26) if i % 3 == fold]}
        loaders = {k: DataLoader(Subset(data, v), batch_size=5, shuffle=k == "train") for k, v in split.items()}
        best = 0.0
        for _ in range(2):
            for phase in ["train", "val"]:
                model.train(phase == "train")
                running_loss, corrects = 0.0, 0
                for inputs, labels in loaders[phase]:
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        _, preds = torch.max(outputs, 1)
                        loss = F.cross_entropy(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    running_loss += loss.item() * inputs.size(0)
                    corrects += torch.sum(preds == labels.data)
                n = len(loaders[phase].dataset)
                accuracy = corrects.double() / n
                log.append(f"{fold} {phase} Loss: {running_loss / n:.3f} Acc: {accuracy:.4f}")
                if phase == "val" and accuracy > best:
                    best = accuracy
        log.append(float(best))
    return {"log": log, "weights": weights(model)}


def checkpointed_segments():
    """torch.utils.checkpoint around a part of the model, in the loop and over a batch statistic."""
    torch.manual_seed(0)
    x, y = blobs(26)
    body, head = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        h = checkpoint(body, a, use_reentrant=False)
        h = checkpoint(lambda t: t - t.mean(0), h, use_reentrant=False)
        loss = F.cross_entropy(head(h), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(body), "head": weights(head)}


def ensemble_by_vmap():
    """An ensemble of models stacked and called with vmap over one batch, majority votes by mode."""
    torch.manual_seed(0)
    x, y = blobs(26)
    models = [nn.Linear(6, 3) for _ in range(3)]
    params, buffers = stack_module_state(models)
    optimizer = torch.optim.SGD(params.values(), lr=0.3)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        outs = vmap(lambda p, s, t: functional_call(models[0], (p, s), (t,)), in_dims=(0, 0, None))(params, buffers, a)
        loss = torch.stack([F.cross_entropy(o, b) for o in outs]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        vote = outs.argmax(2).mode(0).values
        log.append((loss.item(), tuple(outs.shape), (vote == b).float().mean().item(), outs.detach().var(0).mean().item()))
    return {"log": log, **{k: v.detach().clone() for k, v in params.items()}}


def normalised_weights():
    """spectral_norm and weight_norm parametrizations, tied weights, a sparse embedding."""
    torch.manual_seed(0)
    x, y = blobs(26)
    by = nn.utils.parametrizations
    model = nn.Sequential(by.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), by.weight_norm(nn.Linear(6, 3)))
    table = nn.Embedding(3, 6, sparse=True)
    optimizer, slow = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(table.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = F.cross_entropy(model(a + 0.1 * table((b + 1) % 3)), b)
        optimizer.zero_grad()
        slow.zero_grad()
        loss.backward()
        optimizer.step()
        slow.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model), "table": weights(table)}


def greedy_decoding():
    """Autoregressive decoding: tokens grow by cat along columns, finished rows are masked, the loop ends when all are."""
    torch.manual_seed(0)
    prompts = torch.randint(1, 6, (26, 2))
    embed, rnn, head = nn.Embedding(6, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 6)
    with torch.no_grad():
        head.weight.mul_(6)
    made = []
    with torch.no_grad():
        for (tokens,) in DataLoader(TensorDataset(prompts), batch_size=8):
            done = torch.zeros(tokens.size(0), dtype=torch.bool)
            for _ in range(8):
                out = head(rnn(embed(tokens))[0][:, -1])
                new = out.argmax(-1).masked_fill(done, 0)
                tokens = torch.cat([tokens, new[:, None]], dim=1)
                done |= new == 0
                if done.all():
                    break
            made.append((tokens.tolist(), int(done.sum()), (tokens != 0).sum(1).float().mean().item()))
    return {"made": made}


def spatial_transformer_and_augmentation():
    """affine_grid and grid_sample with a matrix per sample, interpolate, pad, crops by random offsets, ctc loss."""
    torch.manual_seed(0)
    x, y = images(26)
    model = nn.Linear(64, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        n = len(a)
        angle = (torch.rand(n) - 0.5) * 0.6
        theta = torch.zeros(n, 2, 3)
        theta[:, 0, 0] = theta[:, 1, 1] = angle.cos()
        theta[:, 0, 1], theta[:, 1, 0] = -angle.sin(), angle.sin()
        a = F.grid_sample(a, F.affine_grid(theta, a.shape, align_corners=False), align_corners=False)
        top, left = torch.randint(0, 3, (2,)).tolist()
        a = F.interpolate(F.pad(a, (1, 1, 1, 1))[:, :, top : top + 6, left : left + 6], size=8, mode="bilinear")
        logp = model(a.flatten(1)).view(n, 4, 3).log_softmax(2).permute(1, 0, 2)
        targets = b.clamp(min=1)[:, None]
        loss = F.ctc_loss(logp, targets, torch.full((n,), 4), torch.ones(n, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), a.mean((1, 2, 3)).tolist()))
    return {"loss": losses, "weights": weights(model)}


def kmeans_over_all_features():
    """k-means on the features of all batches, then pseudo labels by index for the next epoch (DeepCluster)."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    data = TensorDataset(x, torch.arange(26))
    body, head = nn.Linear(6, 4), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    log = []
    for _ in range(2):
        with torch.no_grad():
            features = torch.zeros(26, 4)
            for a, i in DataLoader(data, batch_size=8):
                features[i] = body(a)
            centres = features[:3].clone()
            for _ in range(3):
                label = torch.cdist(features, centres).argmin(1)
                centres = torch.stack([features[label == k].mean(0) if (label == k).any() else centres[k] for k in range(3)])
        for a, i in DataLoader(data, batch_size=8, shuffle=True):
            loss = F.cross_entropy(head(body(a)), label[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append(loss.item())
    return {"log": log, "label": label, "weights": weights(body)}


class _Trainer:
    def __init__(self, model, lr):
        self.model, self.step_number, self.ema_loss = model, 0, None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 1 / (1 + i))

    def step(self, batch):
        loss = self.loss(batch)
        loss.backward()
        if self.ema_loss is not None and loss > 3 * self.ema_loss:
            self.optimizer.zero_grad()
            return "skipped"
        self.ema_loss = loss.item() if self.ema_loss is None else 0.9 * self.ema_loss + 0.1 * loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.schedule.step()
        self.step_number += 1
        return loss.detach()

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.model(x).view_as(y), y)

    def fit(self, loader, steps):
        stream = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(stream, steps):
            yield self.step(batch)


def trainer_class_with_generators():
    """A Trainer class whose fit is a generator over islice of an endless chain of loaders; it skips outlier steps."""
    torch.manual_seed(0)
    x, y = line(26)
    y[20] = 40.0
    trainer = _Trainer(nn.Linear(5, 1), 0.1)
    results = [r if isinstance(r, str) else r.item() for r in trainer.fit(DataLoader(TensorDataset(x, y), batch_size=8), 7)]
    return {"results": results, "ema": trainer.ema_loss, "steps": trainer.step_number, "weights": weights(trainer.model)}


def errors_that_scripts_catch():
    """Wrong shapes raise what one process raises and are caught; asserts on shapes; the loop goes on."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        assert a.shape == (len(b), 6), "a wrong shape"
        assert a.shape[0] in (8, 2)
        for wrong in (
            lambda a=a: model(a[:, :3]),
            lambda a=a: a + torch.zeros(5),
            lambda a=a: a[len(a)],
            lambda a=a: a.view(-1, 7),
            lambda a=a: bool(a > 0),
            lambda a=a: a.item(),
            lambda a=a: int(a.sum(0)),
            lambda a=a, b=b: a[b > 5].max(),
        ):
            try:
                wrong()
                log.append("no error")
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                log.append(type(error).__name__)
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    return {"log": log, "weights": weights(model)}


def batch_used_after_the_loop():
    """The last batch and running sums are used after the loop, with lazily added tensors (no item in the loop)."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, right, per_class, peak = torch.tensor(0.0), 0, torch.zeros(3), torch.tensor(-1e9)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a)
        loss = F.cross_entropy(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * a.size(0)
        right = right + (out.argmax(1) == b).sum()
        per_class += F.one_hot(b, 3).sum(0)
        peak = torch.maximum(peak, out.detach().max())
    final = model(a).detach()
    return {
        "total": (total / 26).item(),
        "right": int(right),
        "accuracy": (right / 26).item(),
        "per_class": per_class,
        "peak": peak.item(),
        "last": (a.sum().item(), b.tolist(), loss.item(), final.tolist()),
        "weights": weights(model),
    }


def exact_type_checks():
    """A helper of a library that dispatches on type(x) is torch.Tensor, singledispatch, and a dict of handlers by type."""
    torch.manual_seed(0)
    x, y = blobs(26)

    def describe(value):
        handlers = {
            torch.Tensor: lambda t: ("tensor", t.sum().item()),
            list: lambda v: ("list", [describe(u) for u in v]),
            int: lambda v: ("int", v),
        }
        return handlers[type(value)](value)

    seen = []
    for batch in DataLoader(TensorDataset(x, y), batch_size=8):
        seen.append(describe(batch))
        seen.append(
            [type(t).__name__ for t in batch] + [type(t) is torch.Tensor for t in batch] + [t.__class__ is torch.Tensor for t in batch]
        )
    return {"seen": seen}
