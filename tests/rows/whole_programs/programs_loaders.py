"""Loaders of all kinds and batches of all structures."""

import itertools
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from whole_programs._small_data import blobs, images, line, weights

Sample = namedtuple("Sample", ["x", "y", "name"])


class _Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class _Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x, self.y, strict=True)


def _fit(loader, lr=0.1, inputs=6, outputs=3):
    model = nn.Linear(inputs, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, sizes = [], []
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sizes.append(len(a))
    return {"loss": losses, "sizes": sizes, "weights": weights(model)}


def dict_batches_with_strings():
    """Samples are dicts with tensors, strings, ints and floats; each batch is a dict of them."""
    torch.manual_seed(0)
    x, y = blobs(26)
    data = _Items([{"x": x[i], "y": int(y[i]), "name": f"s{i}", "weight": 0.1 * i, "nested": {"two": (x[i, :2], i)}} for i in range(26)])
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log, by_name = [], {}
    for batch in DataLoader(data, batch_size=8, shuffle=True):
        batch = {k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        loss = (each * batch["weight"]).sum().float() / batch["weight"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        by_name.update(zip(batch["name"], each.tolist(), strict=True))
        log.append((loss.item(), len(batch["name"]), batch["name"][-1], batch["nested"]["two"][1].tolist(), str(batch["weight"].dtype)))
    return {"log": log, "by_name": dict(sorted(by_name.items())), "weights": weights(model)}


def namedtuple_batches():
    """Samples are namedtuples; batches keep the type and are updated with _replace."""
    torch.manual_seed(0)
    x, y = blobs(26)
    log = []
    for batch in DataLoader(_Items([Sample(x[i], y[i], str(i)) for i in range(26)]), batch_size=7):
        batch = batch._replace(x=batch.x * 2)
        log.append((type(batch).__name__, batch.x.sum().item(), batch.y.tolist(), batch.name[0], len(batch.name), tuple(batch.x.shape)))
    return {"log": log}


def _detection(samples):
    return torch.stack([s[0] for s in samples]), [s[1] for s in samples]


def detection_targets():
    """Images are stacked; targets are a list of dicts with different numbers of boxes (custom collate_fn)."""
    torch.manual_seed(0)
    x, _ = images(26)
    counts = torch.randint(0, 4, (26,)).tolist()
    data = _Items([(x[i], {"boxes": torch.rand(n, 4), "labels": torch.randint(0, 3, (n,)), "id": i}) for i, n in enumerate(counts)])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    log = []
    for a, targets in DataLoader(data, batch_size=8, shuffle=True, collate_fn=_detection):
        out, losses = model(a), []
        for i, target in enumerate(targets):
            if len(target["boxes"]):
                losses.append(F.l1_loss(out[i].expand_as(target["boxes"]), target["boxes"]))
        normaliser = max(sum(len(t["labels"]) for t in targets), 1)
        loss = sum(losses) / normaliser + torch.stack([o.pow(2).mean() for o in out]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), normaliser, [t["id"] for t in targets], len(targets) == len(a)))
    return {"log": log, "weights": weights(model)}


def _pad(samples):
    order = sorted(samples, key=lambda s: -len(s[0]))
    tokens = pad_sequence([s[0] for s in order], batch_first=True)
    return tokens, torch.tensor([len(s[0]) for s in order]), torch.tensor([s[1] for s in order])


def _sentences(n=26):
    lengths = torch.randint(1, 8, (n,)).tolist()
    return _Items([(torch.randint(1, 9, (k,)), i % 2) for i, k in enumerate(lengths)])


def packed_sequences():
    """Padded by a collate function, embedded, packed, run through a GRU, and unpacked."""
    torch.manual_seed(0)
    data = _sentences()
    embed, rnn, head = nn.Embedding(9, 4, padding_idx=0), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*embed.parameters(), *rnn.parameters(), *head.parameters()], lr=0.1)
    log = []
    for tokens, lengths, labels in DataLoader(data, batch_size=8, shuffle=True, collate_fn=_pad):
        packed = pack_padded_sequence(embed(tokens), lengths, batch_first=True)
        out, hidden = rnn(packed)
        out, n = pad_packed_sequence(out, batch_first=True)
        mean = out.sum(1) / n[:, None]
        loss = F.cross_entropy(head(hidden[-1] + mean), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), tuple(tokens.shape), n.tolist(), labels.tolist()))
    return {"log": log, "weights": weights(rnn), "embedding": weights(embed)}


class _Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 9)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out)


def packed_sequences_in_the_module():
    """The module packs and unpacks: its output is as wide as the longest sequence that it sees."""
    torch.manual_seed(0)
    data = _sentences()
    model = _Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for tokens, lengths, _ in DataLoader(data, batch_size=8, collate_fn=_pad):
        out = model(tokens, lengths)
        loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), tuple(out.shape)))
    return {"log": log, "weights": weights(model)}


def token_losses_with_ignore_index():
    """Language modelling over padded tokens: ignore_index=0, perplexity over all tokens, accuracy on real tokens."""
    torch.manual_seed(0)
    data = _sentences()
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    total, count, right, losses = 0.0, 0, 0, []
    for tokens, _, _ in DataLoader(data, batch_size=7, collate_fn=_pad):
        if tokens.shape[1] < 2:
            continue
        logits, target = model(tokens[:, :-1]), tokens[:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        real = target != 0
        n = real.sum().item()
        total += loss.item() * n
        count += n
        right += ((logits.argmax(-1) == target) & real).sum().item()
        losses.append(loss.item())
    return {
        "loss": losses,
        "perplexity": float(torch.exp(torch.tensor(total / count))),
        "count": count,
        "right": right,
        "weights": weights(model),
    }


def transformer_with_padding_and_causal_mask():
    """A Transformer encoder with src_key_padding_mask and a causal mask on batches of different widths."""
    torch.manual_seed(0)
    data = _sentences()
    embed, layer, head = nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 9)
    both = nn.ModuleList([embed, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    losses = []
    for tokens, _, _ in DataLoader(data, batch_size=8, collate_fn=_pad):
        padding = tokens == 0
        causal = torch.triu(torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool), 1)
        out = both[2](both[1](both[0](tokens), mask=causal, src_key_padding_mask=padding))
        loss = F.cross_entropy(out[~padding], tokens[~padding])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "out": tuple(out.shape), "weights": weights(both)}


def _flat_graphs(samples):
    sizes = torch.tensor([len(s[0]) for s in samples])
    return (
        torch.cat([s[0] for s in samples]),
        torch.repeat_interleave(torch.arange(len(samples)), sizes),
        torch.tensor([s[1] for s in samples]),
    )


def sets_packed_along_one_dimension():
    """Point sets concatenated along rows with an index of their set, pooled by index_add (as graphs are)."""
    torch.manual_seed(0)
    sizes = torch.randint(1, 6, (26,)).tolist()
    data = _Items([(torch.randn(k, 3) + i % 2, i % 2) for i, k in enumerate(sizes)])
    node, head = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*node.parameters(), *head.parameters()], lr=0.1)
    log = []
    for points, index, labels in DataLoader(data, batch_size=8, collate_fn=_flat_graphs):
        h = node(points).relu()
        n = int(index.max()) + 1
        pooled = torch.zeros(n, 4).index_add_(0, index, h) / torch.bincount(index)[:, None]
        loss = F.cross_entropy(head(pooled), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), tuple(points.shape), n))
    return {"log": log, "weights": weights(node)}


def drop_last_and_generator():
    """drop_last=True with a generator of its own for shuffling."""
    torch.manual_seed(0)
    x, y = blobs(26)
    return _fit(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(7)))


def batch_sampler():
    """A BatchSampler over a RandomSampler, and a list of batches of different sizes as batch_sampler."""
    torch.manual_seed(0)
    x, y = blobs(26)
    data = TensorDataset(x, y)
    first = _fit(DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 7, drop_last=False)))
    second = _fit(DataLoader(data, batch_sampler=[[0, 5, 2], list(range(6, 17)), [20], [25, 24, 23, 22]]))
    return {"first": first, "second": second}


def sampler_with_weights():
    """A WeightedRandomSampler that balances classes, and a SubsetRandomSampler-like permutation."""
    torch.manual_seed(0)
    x, y = blobs(26)
    weight = (1.0 / torch.bincount(y).float())[y]
    sampler = WeightedRandomSampler(weight.tolist(), 20)
    found = _fit(DataLoader(TensorDataset(x, y), batch_size=6, sampler=sampler))
    order = torch.randperm(26)[:11].tolist()
    return {**found, "subset": _fit(DataLoader(Subset(TensorDataset(x, y), order), batch_size=4, sampler=SequentialSampler(range(11))))}


def iterable_dataset():
    """An IterableDataset that yields samples, batched by the loader."""
    torch.manual_seed(0)
    x, y = blobs(26)
    return _fit(DataLoader(_Stream(x, y), batch_size=8))


def loader_without_batching():
    """batch_size=None over a dataset that yields whole batches of its own."""
    torch.manual_seed(0)
    x, y = blobs(26)
    chunks = _Items([(x[i : i + 7], y[i : i + 7]) for i in range(0, 26, 7)])
    return {"map": _fit(DataLoader(chunks, batch_size=None)), "stream": _fit(DataLoader(_Stream(x.split(6), y.split(6)), batch_size=None))}


def one_worker():
    """A loader with one worker process."""
    torch.manual_seed(0)
    x, y = blobs(26)
    return _fit(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, num_workers=1))


def last_batch_of_one_sample():
    """25 samples in batches of 8, 6 or 4: the last batch has one sample; variances guard against it."""
    torch.manual_seed(0)
    x, y = blobs(25)
    log = []
    for size in (8, 6, 4):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=size):
            spread = a.std(0).mean().item() if len(a) > 1 else -1.0
            log.append((spread, a[0].sum().item(), a[-1].sum().item(), a.mean().item(), b.item() if b.numel() == 1 else b.sum().item()))
    return {"log": log, **_fit(DataLoader(TensorDataset(x, y), batch_size=8))}


def batches_of_one_and_two():
    """Batch size 1 and 2: fewer samples than ranks."""
    torch.manual_seed(0)
    x, y = blobs(7)
    return {"one": _fit(DataLoader(TensorDataset(x, y))), "two": _fit(DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))}


def two_loaders_zipped():
    """Labelled and unlabelled loaders with different batch sizes, zip and itertools.cycle (FixMatch)."""
    torch.manual_seed(0)
    x, y = blobs(12)
    u = torch.randn(26, 6)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for (a, b), (c,) in zip(
        itertools.cycle(DataLoader(TensorDataset(x, y), batch_size=5)), DataLoader(TensorDataset(u), batch_size=8), strict=False
    ):
        n = len(a)
        out = model(torch.cat([a, c, c + 0.1]))
        labelled, (weak, strong) = out[:n], out[n:].chunk(2)
        p, pseudo = weak.detach().softmax(1).max(1)
        mask = (p > 0.5).float()
        loss = F.cross_entropy(labelled, b) + (F.cross_entropy(strong, pseudo, reduction="none") * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), mask.mean().item(), len(out)))
    return {"log": log, "weights": weights(model)}


def infinite_iterator():
    """while step < n: next(iterator), with StopIteration starting the loader anew."""
    torch.manual_seed(0)
    x, y = blobs(26)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterator, losses = iter(loader), []
    for _ in range(6):
        try:
            a, b = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            a, b = next(iterator)
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(a)))
    return {"loss": losses, "weights": weights(model)}


def first_batch_for_shapes():
    """next(iter(loader)) builds the model from the first batch's shape; then a loop and a fixed batch."""
    torch.manual_seed(0)
    x, y = blobs(26)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    fixed, labels = next(iter(loader))
    model = nn.Linear(fixed.shape[1], int(y.max()) + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            log.append((loss.item(), F.cross_entropy(model(fixed), labels).item(), (fixed[: len(a)] - a).abs().sum().item()))
    return {"log": log, "n": len(loader), "samples": len(loader.dataset), "weights": weights(model)}


def concatenated_datasets_and_epochs():
    """A ConcatDataset over two sets, several epochs, stats per epoch with len(loader) and len(dataset)."""
    torch.manual_seed(0)
    x, y = blobs(26)
    loader = DataLoader(ConcatDataset([TensorDataset(x[:9], y[:9]), TensorDataset(x[9:], y[9:])]), batch_size=8, shuffle=True)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=3, steps_per_epoch=len(loader))
    log = []
    for epoch in range(3):
        total, right, batches = 0.0, 0, 0
        for a, b in loader:
            out = model(a)
            loss = F.cross_entropy(out, b, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
            right += (out.argmax(1) == b).sum()
            batches += 1
        log.append((epoch, total / len(loader), f"{100 * right / len(loader.dataset):.1f}%", batches, optimizer.param_groups[0]["lr"]))
    return {"log": log, "weights": weights(model)}


def losses_remembered_by_index():
    """A dataset that returns its index, which the loop uses to keep losses for each sample over epochs."""
    torch.manual_seed(0)
    x, y = blobs(26)
    loader = DataLoader(TensorDataset(x, y, torch.arange(26)), batch_size=8, shuffle=True)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory, weight = torch.zeros(26), torch.ones(26)
    for _ in range(2):
        for a, b, index in loader:
            each = F.cross_entropy(model(a), b, reduction="none")
            loss = (weight[index] * each).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            memory[index] = each.detach()
        weight = 26 * memory.softmax(0)
    return {"memory": memory, "weight": weight, "weights": weights(model)}


def regression_with_float64_and_ints():
    """Python floats become float64 batches, ints int64 ones; .float() in the loop, targets with .unsqueeze(1)."""
    torch.manual_seed(0)
    x, y = line(26)
    data = _Items([(x[i].tolist(), float(y[i]), i, i % 2 == 0) for i in range(26)])
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = []
    for columns, target, index, even in DataLoader(data, batch_size=8):
        a = torch.stack(columns, dim=1).float()
        loss = F.mse_loss(model(a), target.float().unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), str(target.dtype), index.tolist(), str(even.dtype), int(even.sum()), tuple(a.shape)))
    return {"log": log, "weights": weights(model)}
