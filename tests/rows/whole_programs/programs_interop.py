"""Batches and outputs that leave torch: numpy, pandas, pickles, printing, metrics."""

import copy
import io
import json
import pickle

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def numpy_conversions():
    """np.asarray(x), x.numpy(), np.mean(x), arithmetic with arrays, torch.from_numpy back."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        n = a.numpy()
        m = np.asarray(a)
        seen.append((n.shape, m.shape, float(np.mean(n)), float(np.mean(m)), float(np.mean(a.numpy(), axis=0)[0]), n.dtype.name))
        seen.append((np.bincount(b.numpy(), minlength=3).tolist(), float(np.std(m)), np.argsort(m[:, 0]).tolist(), np.array(b).tolist()))
        again = torch.from_numpy(n * 2)
        seen.append(((again - a).sum().item(), torch.as_tensor(m).equal(a), torch.tensor(n).shape[0], type(again) is torch.Tensor))
        seen.append((np.concatenate([m, m]).shape, np.unique(b).tolist(), float(np.max(a.detach().cpu().numpy())), float(np.sum(m[:2]))))
    return {"seen": seen}


def pandas_frame_of_predictions():
    """A DataFrame of predictions, labels and confidences, grouped by class."""
    import pandas as pd

    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3).eval()
    rows = []
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            p = model(a).softmax(1)
            confidence, predicted = p.max(1)
            rows.append(pd.DataFrame({"label": b.numpy(), "predicted": predicted.numpy(), "confidence": confidence.tolist()}))
            rows[-1]["first"] = a[:, 0]
    frame = pd.concat(rows, ignore_index=True)
    table = frame.groupby("label")[["confidence", "first"]].mean()
    return {
        "n": len(frame),
        "table": torch.tensor(table.to_numpy()),
        "cross": pd.crosstab(frame.label, frame.predicted).to_numpy().tolist(),
    }


def sklearn_metrics():
    """Accuracy, F1, AUC and a confusion matrix of sklearn on lists and arrays of outputs."""
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score

    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3).eval()
    labels, predicted, scores, per_batch = [], [], [], []
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            out = model(a)
            labels.extend(b.tolist())
            predicted.extend(out.argmax(1).cpu().numpy())
            scores.append(out.softmax(1).numpy())
            per_batch.append((float(accuracy_score(b, out.argmax(1))), float(f1_score(b.numpy(), out.argmax(dim=1), average="macro"))))
    auc = roc_auc_score(labels, np.concatenate(scores), multi_class="ovr")
    return {"per_batch": per_batch, "matrix": confusion_matrix(labels, predicted).tolist(), "auc": float(auc)}


def torchmetrics_accuracy_and_auroc():
    """torchmetrics objects that are updated each batch, with their values for a batch and for all."""
    import torchmetrics

    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    auroc = torchmetrics.AUROC(task="multiclass", num_classes=3)
    mean = torchmetrics.MeanMetric()
    matrix = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3)
    values = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a).detach()
        values.append(accuracy(out, b).item())
        auroc.update(out.softmax(1), b)
        mean.update(F.cross_entropy(out, b), weight=len(b))
        matrix.update(out.argmax(1), b)
    return {
        "values": values,
        "all": accuracy.compute().item(),
        "auroc": auroc.compute().item(),
        "mean": mean.compute().item(),
        "m": matrix.compute(),
    }


def matplotlib_of_a_batch():
    """Draws images and a scatter plot of a batch (Agg) and reads the numbers back from the axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    torch.manual_seed(0)
    x, y = images(14, s=4)
    shown = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        figure, axes = plt.subplots(1, 2)
        picture = axes[0].imshow(a[0].squeeze(), cmap="gray")
        points = axes[1].scatter(a[:, 0, 0, 0], a[:, 0, 1, 1], c=b)
        axes[1].set_title(f"batch of {len(a)}, label {b[0]}")
        shown.append((float(picture.get_array().sum()), points.get_offsets().sum(0).tolist(), axes[1].get_title()))
        shown.append(axes[1].hist(a.flatten().numpy(), bins=3)[0].tolist())
        plt.close(figure)
    return {"shown": shown}


def printing():
    """repr and str of batches and outputs, formats of numbers, shapes in f-strings."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 2)
    lines = []
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=9)):
        out = model(a)
        loss = F.mse_loss(out, a[:, :2])
        lines.append(f"{i}: {a.mean():.4f} {loss:.3f} {loss.item():.3f} {a.shape} {tuple(out.shape)} {len(b)} {b[0]} {b}")
        lines.append(f"{a.round(decimals=2)}")
        lines.append(str(b) + repr(b[:2]) + "%d %s" % (b.sum(), b.dtype))  # noqa: UP031
        lines.append(f"{a.std(0)[0]:.3f} {out[0, 0]:.3f} {out.max():8.3f} {(b == 0).sum()} {type(a).__name__} {a.dtype} {a.device}")
        lines.append("{:.3f} {}".format(a.abs().max(), (b == 1).any()))  # noqa: UP032
    return {"lines": lines}


def iterating_over_a_batch():
    """for row in x, zip(x, y), enumerate, list(x), sorted, sum, len, in, unpacking of shapes."""
    torch.manual_seed(0)
    x, y = blobs(26)
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        n, d = a.shape
        norms = [row.norm().item() for row in a]
        pairs = [(int(k), round(float(r.sum()), 4)) for r, k in zip(a, b, strict=True)]
        best = max(enumerate(a), key=lambda p: p[1][0].item())[0]
        first, *_, last = a
        seen.append((n, d, norms, pairs, best, first.tolist(), last.sum().item(), len(list(a)), sum(b).item(), sorted(b.tolist())))
        seen.append(
            ({k: sum(1 for v in b if v == k) for k in range(3)}, [float(v) for v in a[:, 1]], a.tolist()[-1], a.size()[0] * a.stride(0))
        )
    return {"seen": seen}


def save_and_load_batches():
    """torch.save of a batch and outputs to a BytesIO, torch.load, pickle, deepcopy; training goes on with the copies."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, seen = [], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        out = model(a)
        file = io.BytesIO()
        torch.save({"x": a, "y": b, "out": out.detach(), "part": a[:2]}, file)
        file.seek(0)
        loaded = torch.load(file)
        again = pickle.loads(pickle.dumps((a, b)))
        twin = copy.deepcopy(a)
        twin += 1
        loss = F.mse_loss(model(loaded["x"]), again[1]) + F.mse_loss(model(twin), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen.append((tuple(loaded["out"].shape), loaded["part"].sum().item(), bool((loaded["y"] == b).all()), torch.equal(again[0], a)))
        seen.append((twin.sum().item(), a.sum().item(), copy.copy(b).shape[0]))
    return {"loss": losses, "seen": seen, "weights": weights(model)}


def predictions_gathered_in_a_list():
    """Collects all predictions and labels in lists, torch.cat at the end, confusion matrix and accuracy."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3).eval()
    outs, labels, losses, n = [], [], [], 0
    with torch.inference_mode():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            out = model(a)
            losses.append(F.cross_entropy(out, b))
            outs.append(out.cpu())
            labels.append(b)
            n += b.size(0)
    outs, labels = torch.cat(outs), torch.cat(labels)
    matrix = torch.zeros(3, 3, dtype=torch.long)
    for t, p in zip(labels.view(-1), outs.argmax(1).view(-1), strict=True):
        matrix[t, p] += 1
    order = outs.max(1).values.argsort(descending=True)
    return {
        "n": n,
        "out": outs,
        "matrix": matrix,
        "loss": (sum(losses) / len(losses)).item(),
        "stacked": torch.stack(losses).mean().item(),
        "accuracy": (outs.argmax(1) == labels).float().mean().item(),
        "precision": (matrix.diag() / matrix.sum(0).clamp(min=1)).tolist(),
        "ranked": labels[order].tolist(),
        "bincount": torch.bincount(3 * labels + outs.argmax(1), minlength=9).view(3, 3).tolist(),
    }


def average_precision_by_hand():
    """Retrieval: embeddings of all batches, distance matrix, recall@1 and average precision by sort and cumsum."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 4).eval()
    z, labels = torch.Tensor(), torch.LongTensor()
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            z, labels = torch.cat((z, F.normalize(model(a)))), torch.cat((labels, b))
    d = torch.cdist(z, z).fill_diagonal_(float("inf"))
    recall = (labels[d.argmin(1)] == labels).float().mean().item()
    hit = labels[d.argsort(1)[:, :-1]] == labels[:, None]
    precision = hit.cumsum(1) / torch.arange(1, hit.shape[1] + 1)
    ap = (precision * hit).sum(1) / hit.sum(1)
    return {"recall": recall, "ap": ap, "shape": tuple(z.shape)}


def json_log_and_best_of():
    """A history dict of plain numbers for json, with min, max and the batch of the best loss."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = {"loss": [], "mae": [], "size": []}
    worst = (-1.0, None)
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        out = model(a)
        loss = F.mse_loss(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history["loss"].append(loss.detach())
        history["mae"].append((out - b).abs().mean().item())
        history["size"].append(len(a))
        worst = max(worst, ((out - b).abs().max().item(), i))
    history["loss"] = [round(float(v), 3) for v in history["loss"]]
    history["mae"] = [round(v, 3) for v in history["mae"]]
    return {"json": json.dumps(history), "worst": list(worst), "average": float(np.average(history["mae"], weights=history["size"]))}


def hash_maps_keyed_by_labels():
    """Dictionaries of lists per label with .item() keys, tensors as keys of branches, isin, tensor comparisons."""
    torch.manual_seed(0)
    x, y = blobs(26)
    groups, firsts = {}, {}
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        for i, k in enumerate(b):
            groups.setdefault(k.item(), []).append(a[i].mean().item())
            if k.item() not in firsts:
                firsts[int(k)] = a[i]
        keep = torch.isin(b, torch.tensor([0, 2]))
        groups.setdefault("kept", []).append(int(keep.sum()))
        groups.setdefault("equal", []).append((torch.equal(a, a.clone()), torch.allclose(a, a + 1e-9), bool((a == a).all()), a is not b))
    return {"groups": {str(k): v for k, v in groups.items()}, "firsts": torch.stack([firsts[k] for k in range(3)])}


def scalars_as_python_numbers():
    """Sums used as ints: range(b.sum()), list index by a tensor, math functions, torch.Size arithmetic, numel."""
    import math

    torch.manual_seed(0)
    x, y = blobs(26)
    names, seen = ["a", "b", "c"], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        count = 0
        for _ in range(b.sum()):
            count += 1
        seen.append((count, names[b[0]], [names[k] for k in b], math.sqrt(a.pow(2).sum()), round(a.mean().item(), 3), int(a.argmax())))
        seen.append(
            (
                divmod(int(b.max()), 2),
                b.sum() // 2 == int(b.sum()) // 2,
                a.shape[0] * 2 == a[:, :2].numel(),
                a.nelement(),
                f"{b.float().mean():.2%}",
            )
        )
        seen.append((max(a.mean(), torch.tensor(0.0)).item(), (a.sum() > 0).item() and 1, not (b == 7).any(), float(a.norm()) ** 2))
    return {"seen": [[bool(v) if isinstance(v, torch.Tensor) else v for v in s] for s in seen]}
