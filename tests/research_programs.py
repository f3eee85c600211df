"""Random programs of the kinds that researchers write, each of which knows what its numbers must be.

Gradients by ``torch.func``, buffers that train, compiled models, loops that only look at data, evaluations that are no mean, caught
exceptions. ``research_programs()`` draws what a program does and ``train`` does it in plain torch; ``programs.run`` runs it on ranks.
"""

from dataclasses import dataclass

from hypothesis import strategies as st

__all__ = ["Numbers", "ResearchProgram", "research_programs", "train", "train_by_hand", "train_synced"]

FEATURES = 4


@dataclass(frozen=True)
class ResearchProgram:
    """What a program does.

    Attributes:
        gradients: where they come from: ``loss.backward()``, ``torch.autograd.grad``, ``torch.func.grad``, or clipped for each sample.
        draws: how a batch comes: from a loader, from one that is read a batch ahead, from what was kept of its first pass, or cut by hand
            from rows drawn at random.
        buffers: what the forward reads that changes in training: nothing, running statistics, or a codebook.
        norm: no BatchNorm, one, or one in a compiled model.
        weighted: whether classes have weights in the loss.
        mode: whether the model is set to train before each epoch, only at first, or never.
        looks: what a pass over the training loader finds out first: nothing, the mean of the data, or how many rows there are.
        metric: what is found out about all rows at the end of an epoch.
        evaluates: how: with ``@evaluate``, in a plain loop without gradients, or in a loop with them.
        copies: whether it is a deep copy of the model that is evaluated.
        parts: whether the model is two modules in one optimizer.
        fails: the step in which the backward of the last rank raises, which the script catches.
        samples, batch_size, epochs: how many.
    """

    gradients: str = "backward"
    draws: str = "loader"
    buffers: str = "none"
    norm: str = "none"
    weighted: bool = False
    mode: str = "train"
    looks: str = "nothing"
    metric: str = "accuracy"
    evaluates: str = "plain"
    copies: bool = False
    parts: bool = False
    fails: int | None = None
    samples: int = 37
    batch_size: int = 6
    epochs: int = 2

    @property
    def same_by_theory(self):
        """Whether ranks that split each batch must come to the weights of a single process.

        Without a backward it is not known which batch is meant that was drawn ahead or kept, nor what weights a loss inside of
        ``torch.func`` has.
        """
        if self.gradients != "backward" and (self.draws in ("ahead", "kept") or self.weighted):
            return False
        return self.draws != "random" and self.buffers == "none" and self.gradients != "per_sample" and self.fails is None

    @property
    def has_equal_by_hand(self):
        """Whether hand-written DDP with a ``DistributedSampler`` must come to the same weights.

        Without a backward, buffers that training changes wait for the evaluation. A share of two batches that is read ahead to its
        end before anything was trained is taken for a look, with a warning.
        """
        if self.gradients == "autograd" and self.buffers != "none":
            return False
        if self.draws == "ahead" and self.samples <= 3 * 2 * self.batch_size:  # for up to 3 ranks
            return False
        return self.draws != "random" and self.looks == "nothing" and self.fails is None


@dataclass(frozen=True)
class Numbers:
    """What a program has found out, beside what that must be, which it has computed without a loader."""

    found: dict[str, float]
    expected: dict[str, float]


CHOICES = {
    "gradients": ["backward", "backward", "autograd", "func", "per_sample"],
    "draws": ["loader", "loader", "ahead", "kept", "random"],
    "buffers": ["none", "none", "statistics", "codebook"],
    "norm": ["none", "batch", "none", "batch", "none", "compiled"],
    "mode": ["train", "train", "once", "never"],
    "looks": ["nothing", "mean", "rows"],
    "metric": ["accuracy", "auc", "rmse", "median", "largest", "per_class"],
    "evaluates": ["decorated", "plain", "with_gradients"],
}


@st.composite
def research_programs(draw):
    """A random :class:`ResearchProgram`."""
    chosen = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items()}
    if chosen["gradients"] in ("func", "per_sample"):
        chosen["buffers"] = chosen["norm"] = "none"  # functional gradients leave no state behind
    normed = chosen["norm"] != "none"  # BatchNorm refuses a batch of one row, also where it is what a rank has of it
    return ResearchProgram(
        **chosen,
        weighted=draw(st.booleans()),
        copies=draw(st.booleans()),
        parts=draw(st.booleans()),
        fails=draw(st.none() | st.integers(1, 3)) if chosen["gradients"] == "backward" else None,
        samples=36 if normed else draw(st.integers(20, 50)),
        batch_size=6 if normed else draw(st.integers(3, 8)),
        epochs=draw(st.integers(1, 3)),
    )


def train_synced(program):
    """As :func:`train`, with BatchNorm over all ranks."""
    import parwrap

    return parwrap.sync_bn(train)(program)


def train_by_hand(program):
    """As :func:`train`, with ``DistributedDataParallel`` written by hand."""
    return train(program, by_hand=True)


def train(program, by_hand=False):
    """Run ``program`` as any user would have written it; returns the model and its :class:`Numbers`."""
    import copy

    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import parwrap

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(FEATURES, 6)
            self.norm = nn.BatchNorm1d(6) if program.norm != "none" else nn.Identity()
            self.register_buffer("mean", torch.zeros(FEATURES))
            self.register_buffer("codes", torch.linspace(-1, 1, 5))

        def forward(self, x):
            if program.buffers == "statistics":
                if self.training:
                    self.mean.mul_(0.9).add_(0.1 * x.mean(0))
                x = x - self.mean
            x = self.norm(torch.tanh(self.first(x)))
            if program.buffers == "codebook":
                nearest = (x.detach()[..., None] - self.codes).abs().argmin(-1)
                if self.training:
                    self.codes[nearest.flatten()[0]] += 0.1 * x.detach().mean()
                x = x + (self.codes[nearest] - x).detach() * 0.5
            return x

    torch.manual_seed(5)
    rows, classes = torch.randn(program.samples, FEATURES), 3
    labels = (rows[:, 0] > 0).long() + (rows[:, 1] > 0.3).long()
    loader = DataLoader(TensorDataset(rows, labels), program.batch_size, shuffle=True)
    if by_hand:
        sampler = torch.utils.data.DistributedSampler(loader.dataset, seed=5)
        loader = DataLoader(loader.dataset, program.batch_size, sampler=sampler)
    encoder, head = Encoder(), nn.Linear(6, classes)
    model = nn.Sequential(encoder, head)
    parameters = [*encoder.parameters(), *head.parameters()] if program.parts else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    weight = torch.tensor([0.2, 1.0, 3.0]) if program.weighted else None
    forward = nn.parallel.DistributedDataParallel(model) if by_hand else model
    if program.norm == "compiled":
        forward = torch.compile(forward, backend="aot_eager")
    found, expected, kept = {}, {}, []

    def set_mode(training):
        for module in (encoder, head) if program.parts else (model,):
            module.train(training)

    def batches():
        if program.draws == "loader":
            yield from loader
        elif program.draws == "kept" and kept:
            yield from list(kept)
        elif program.draws == "kept":
            for batch in loader:
                kept.append(batch)
                yield batch
        elif program.draws == "ahead":
            drawing = iter(loader)
            following = next(drawing, None)
            while following is not None:
                batch, following = following, next(drawing, None)
                yield batch
        else:
            for _ in range(6):
                drawn = torch.randint(program.samples, (program.batch_size,))
                yield rows[drawn], labels[drawn]

    def loss_of(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y, weight=weight)

    def leave_gradients(x, y):
        named = dict(model.named_parameters())
        if program.gradients == "backward":
            F.cross_entropy(forward(x), y, weight=weight).backward()
            return
        if program.gradients == "autograd":
            gradients = torch.autograd.grad(F.cross_entropy(forward(x), y, weight=weight), list(named.values()))
        elif program.gradients == "func":
            gradients = torch.func.grad(loss_of)({name: p.detach() for name, p in named.items()}, x, y).values()
        else:
            each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(
                {name: p.detach() for name, p in named.items()}, x[:, None], y[:, None]
            )
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            gradients = [torch.einsum("n,n...->...", (1 / norms).clamp(max=1), g) / len(x) for g in each.values()]
        for p, gradient in zip(named.values(), gradients, strict=True):
            if by_hand:
                gradient = gradient.clone()
                torch.distributed.all_reduce(gradient)
                gradient /= torch.distributed.get_world_size()
            p.grad = gradient

    def evaluate(evaluated, data):
        scores, truth = [], []
        for x, y in data:
            scores.append(evaluated(x).detach())
            truth.append(y)
        return metric_of(torch.cat(scores), torch.cat(truth))

    def metric_of(scores, truth):
        if program.metric == "accuracy":
            return (scores.argmax(1) == truth).float().mean().item()
        if program.metric == "per_class":
            recalls = [(scores[truth == c].argmax(1) == c).float().mean().item() for c in range(classes) if (truth == c).any()]
            return sum(recalls) / len(recalls)
        if program.metric == "auc":
            above, below = scores[truth > 0, 0], scores[truth == 0, 0]
            return (above[:, None] > below).float().mean().item() if len(above) and len(below) else 0.5
        errors = (scores[:, 0] - truth).square()
        return {"rmse": errors.mean().sqrt(), "median": errors.median(), "largest": errors.max()}[program.metric].item()

    def note(name, number, truth):
        found[name], expected[name] = float(number), float(truth)

    if program.looks == "mean":
        note("mean of the data", sum(x.sum().item() for x, _ in loader) / rows.numel(), rows.mean())
    if program.looks == "rows":
        note("rows", sum(len(x) for x, _ in loader), program.samples)
    if program.mode == "never":
        set_mode(False)
    step = 0
    for epoch in range(program.epochs):
        if program.mode == "train":
            set_mode(True)
        if by_hand:
            sampler.set_epoch(epoch)
        for x, y in batches():
            step += 1
            optimizer.zero_grad()
            failing = None
            if step == program.fails and parwrap.rank() == parwrap.world_size() - 1 > 0:
                failing = encoder.first.weight.register_hook(_run_out_of_memory)
            try:
                leave_gradients(x, y)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                continue
            finally:
                if failing is not None:
                    failing.remove()
            optimizer.step()
        evaluated = copy.deepcopy(model) if program.copies else model
        if program.copies:
            evaluated.eval()
        else:
            set_mode(False)
        test = DataLoader(TensorDataset(rows, labels), program.batch_size)
        if program.evaluates == "decorated":
            number = parwrap.evaluate(torch.no_grad()(evaluate))(evaluated, test)
        else:
            with torch.set_grad_enabled(program.evaluates == "with_gradients"):
                number = evaluate(evaluated, test)
        with torch.no_grad():
            note(f"{program.metric} of epoch {epoch}", number, metric_of(evaluated(rows), labels))
    return model, Numbers(found, expected)


def _run_out_of_memory(gradient):
    raise RuntimeError("DefaultCPUAllocator: out of memory")
