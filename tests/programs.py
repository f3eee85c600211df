"""Random small training programs, and how to run one: plain, or on ranks from a fork server.

``programs()`` draws what a program does, ``train`` does it in plain torch, and ``run`` does it on ranks inside ``parwrap.distributed``.
"""

import faulthandler
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from parwrap.testing.rank_launcher import _default_start_method_kept

__all__ = ["Program", "Result", "programs", "run", "train"]

FEATURES, CLASSES = 5, 3
LIMIT = 40.0
"""Seconds that a program may take; all of them are done in two."""


@dataclass(frozen=True)
class Program:
    """What a training program does.

    Attributes:
        widths: of the hidden layers.
        norm, dropout: whether there is BatchNorm or dropout behind each of them.
        owners: the optimizer that each layer belongs to.
        kinds: of the optimizers.
        samples, batch_size, shuffle, drop_last: of the loader.
        handmade: batches are cut by hand, with no loader.
        branch: layers that a step skips: none, by chance, or by what is in the batch.
        epochs: how many.
        leave: where a good loss ends the training early: nowhere, in an epoch, or altogether.
        good: that loss.
        accumulate: backwards for each step.
        losses: how many losses there are, each with a backward of its own.
        clip: whether gradients are clipped.
        frozen: the epoch in which the first layer is frozen; it is trained again in the next.
        evaluate: after each epoch: not at all, with the model in eval mode, or only without gradients.
        scheduler: none, one by epochs or one by the loss.
        save: nothing, after each epoch, or to be loaded again at the end.
        late: whether the last layer gets its optimizer after the first epoch only.
    """

    widths: tuple[int, ...]
    norm: bool
    dropout: bool
    owners: tuple[int, ...]
    kinds: tuple[str, ...]
    samples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    handmade: bool
    branch: str
    epochs: int
    leave: str
    good: float
    accumulate: int
    losses: int
    clip: bool
    frozen: int | None
    evaluate: str
    scheduler: str
    save: str
    late: bool

    @property
    def same_by_theory(self):
        """Whether ranks that split each batch must come to the weights of a single process."""
        return not (self.norm or self.dropout or self.handmade or self.branch != "none" or self.leave != "nowhere")


@st.composite
def programs(draw):
    """A random :class:`Program`."""
    widths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple))
    kinds = draw(st.lists(st.sampled_from(["sgd", "momentum", "adam"]), min_size=1, max_size=3).map(tuple))
    owner = st.integers(0, len(kinds) - 1)
    return Program(
        widths=widths,
        norm=draw(st.booleans()),
        dropout=draw(st.booleans()),
        owners=draw(st.tuples(*[owner] * (len(widths) + 1))),
        kinds=kinds,
        samples=draw(st.integers(7, 60)),
        batch_size=draw(st.integers(3, 12)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        handmade=draw(st.booleans()),
        branch=draw(st.sampled_from(["none", "chance", "data"])),
        epochs=draw(st.integers(1, 4)),
        leave=draw(st.sampled_from(["nowhere", "epoch", "training"])),
        good=draw(st.floats(0.5, 1.3)),
        accumulate=draw(st.integers(1, 3)),
        losses=draw(st.integers(1, 2)),
        clip=draw(st.booleans()),
        frozen=draw(st.none() | st.integers(0, 2)),
        evaluate=draw(st.sampled_from(["never", "eval", "no_grad"])),
        scheduler=draw(st.sampled_from(["none", "epochs", "loss"])),
        save=draw(st.sampled_from(["never", "each", "load"])),
        late=draw(st.booleans()),
    )


def train(program):
    """Run ``program`` as any user would have written it; returns the model."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [FEATURES, *program.widths]
            self.hidden = nn.ModuleList(nn.Linear(size, after) for size, after in itertools.pairwise(sizes))
            self.skips = nn.ModuleList(nn.Linear(size, after) for size, after in itertools.pairwise(sizes))
            self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in program.widths)
            self.last = nn.Linear(sizes[-1], CLASSES)

        def forward(self, x):
            for layer, skip, norm in zip(self.hidden, self.skips, self.norms, strict=True):
                skipped = self.training and (
                    (program.branch == "chance" and random.random() < 0.4) or (program.branch == "data" and x.detach().sum() < 0)
                )
                x = skip(x) if skipped else torch.relu(layer(x))
                if program.norm and len(x) > 1:
                    x = norm(x)
                if program.dropout:
                    x = F.dropout(x, 0.2, self.training)
            return self.last(x)

    def optimizer(kind, parameters):
        options = {"sgd": {"lr": 0.1}, "momentum": {"lr": 0.05, "momentum": 0.9}, "adam": {"lr": 0.01}}[kind]
        return (torch.optim.Adam if kind == "adam" else torch.optim.SGD)(parameters, **options)

    torch.manual_seed(3)
    random.seed(3)
    x = torch.randn(program.samples, FEATURES)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    data = TensorDataset(x, y)
    loader = DataLoader(data, program.batch_size, shuffle=program.shuffle, drop_last=program.drop_last)
    model = Net()
    blocks = [*zip(model.hidden, model.skips, model.norms, strict=True), [model.last]]
    layers = [[p for module in block for p in module.parameters()] for block in blocks]
    waiting = layers.pop() if program.late and len(layers) > 1 else None
    owned = [
        [p for layer, owner in zip(layers, program.owners, strict=False) if owner == number for p in layer]
        for number in range(len(program.kinds))
    ]
    optimizers = [optimizer(kind, parameters) for kind, parameters in zip(program.kinds, owned, strict=True) if parameters]
    schedulers = {
        "none": lambda o: None,
        "epochs": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.8),
        "loss": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    }
    schedulers = [schedulers[program.scheduler](each) for each in optimizers]

    def batches():
        if not program.handmade:
            yield from loader
            return
        for begin in range(0, program.samples, program.batch_size):
            yield x[begin : begin + program.batch_size], y[begin : begin + program.batch_size]

    def epoch():
        """Whether the loss has become good."""
        for step, (inputs, targets) in enumerate(batches()):
            loss = F.cross_entropy(model(inputs), targets) / program.accumulate
            loss.backward()
            if program.losses == 2:
                (0.1 * model(inputs).square().mean()).backward()
            if (step + 1) % program.accumulate == 0:
                if program.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for each in optimizers:
                    each.step()
                for each in optimizers:
                    each.zero_grad()
            if program.leave != "nowhere" and loss.item() * program.accumulate < program.good:
                return True
        return False

    for number in range(program.epochs):
        if number == 1 and waiting:
            optimizers[0].add_param_group({"params": waiting})
        for p in model.hidden[0].parameters():
            p.requires_grad_(number != program.frozen)
        model.train()
        good = epoch()
        if program.evaluate != "never":
            model.train(program.evaluate != "eval")
            with torch.no_grad():
                F.cross_entropy(model(x), y)
        for each in schedulers:
            if each is not None:
                each.step(*([F.cross_entropy(model.eval()(x), y).item()] if program.scheduler == "loss" else []))
        if program.save != "never":
            torch.save(model.state_dict(), "model.pt")
        if good and program.leave == "training":
            break
    if program.save == "load":
        model.load_state_dict(torch.load("model.pt"))
    return model


@dataclass(frozen=True)
class Result:
    """How a program ended on one rank.

    Attributes:
        state: of the model, as lists of numbers.
        parameters: the names in ``state`` that are parameters.
        error: the class of the exception, its base classes and its text, if there was one.
        stacks: where the rank was when it ran out of time.
        numbers: what else the program has found out.
    """

    state: dict = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    error: tuple[tuple[str, ...], str] | None = None
    stacks: str = ""
    numbers: Any = None


def run(program, size, batch="per_rank", function=train):
    """The :class:`Result` of ``program`` on each of ``size`` ranks; on 0 of them it is run plain, without parwrap.

    Args:
        program: what is handed to ``function``.
        size: the number of ranks.
        batch: as for ``parwrap.distributed``; ``None`` leaves parwrap out, with a process group for a program that is parallel by hand.
        function: runs the program; returns the model, or the model and numbers.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="program-") as folder, ExitStack() as undo:
        ranks = []
        for rank in range(max(size, 1)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(function, program, rank, size, batch, folder, theirs))
            with _default_start_method_kept():
                process.start()
            theirs.close()
            ranks.append((process, ours))
            undo.callback(process.join)
            undo.callback(process.kill)
        results = []
        for rank, (process, connection) in enumerate(ranks):
            if connection.poll(LIMIT):
                results.append(connection.recv())
            else:
                os.kill(process.pid, signal.SIGQUIT)
                process.join(0.5)
                results.append(Result(stacks=Path(folder, f"stacks-{rank}").read_text()))
        for _, connection in ranks:
            connection.close()
        return results


def _rank(function, program, rank, size, batch, folder, connection):
    stacks = Path(folder, f"stacks-{rank}").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGQUIT, stacks)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if size:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(number) for name, number in numbers.items()}, PARWRAP_INIT_METHOD=f"file://{folder}/meeting")
    os.chdir(folder)
    import torch

    import parwrap

    torch.set_num_threads(1)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            if size and batch is None:
                torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
            returned = parwrap.distributed(batch=batch)(function)(program) if size and batch else function(program)
        model, numbers = returned if isinstance(returned, tuple) else (returned, None)
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        connection.send(Result(state, tuple(name for name, _ in model.named_parameters()), numbers=numbers))
    except Exception as error:
        connection.send(Result(error=(tuple(each.__name__ for each in type(error).__mro__), str(error))))
    connection.poll(None)  # nobody is to be cut off by a process that ends
