"""Buffers that training changes, against hand-written ``DistributedDataParallel(broadcast_buffers=True)``."""

import copy
import gc
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import buffered
import parwrap
from parwrap.strategies.common import training_buffers
from parwrap.strategies.common.training_buffers import TrainingBuffers
from parwrap.strategies.ddp.gradient_averager import GradientAverager


def equal_to_ddps(state, kind, **options):
    """Whether weights are those of this rank under DDP, and buffers those of its rank 0."""
    expected = parwrap.broadcast(buffered.by_hand(kind, **options))
    return [name for name, value in expected.items() if not torch.equal(value, state[name])]


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("kind", buffered.MODELS)
def test_a_model_trains_bit_for_bit_as_under_ddp(kind):
    state = buffered.plain(kind)

    with parwrap.distributed():
        assert [] == [name for name in equal_to_ddps(state, kind) if not name.startswith("norm.")]


@pytest.mark.ranks(3, timeout=120)
def test_three_ranks_too():
    state = buffered.plain("VQ-VAE")

    with parwrap.distributed():
        assert [] == equal_to_ddps(state, "VQ-VAE")


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("kind", ["VQ-VAE", "normalizer"])
def test_a_compiled_model_too(kind):
    def compiled(model):
        return torch.compile(model, backend="aot_eager")

    state = buffered.plain(kind, wrap=compiled)
    torch._dynamo.reset()

    with parwrap.distributed():
        expected = parwrap.broadcast(buffered.by_hand(kind))
        assert max((expected[name] - value).abs().max().item() for name, value in state.items()) < 1e-5


@pytest.mark.ranks(2, timeout=120)
def test_sharded_optimizer_states_change_nothing():
    state = buffered.plain("VQ-VAE", strategy="zero1")

    with parwrap.distributed():
        assert [] == equal_to_ddps(state, "VQ-VAE")


def taken(model, steps=9, train=lambda loss: loss.backward(), samples=lambda step: 4):
    """How often the ranks have sent buffers in so many steps of ``model``."""
    counted = []
    take = TrainingBuffers.take
    with pytest.MonkeyPatch.context() as patched, parwrap.distributed():
        patched.setattr(TrainingBuffers, "take", lambda self, *args, **kwargs: counted.append(1) or take(self, *args, **kwargs))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            train(model(torch.randn(samples(step), 4)))
            optimizer.step()
        return len(counted)


class Summed(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().sum()


@pytest.mark.ranks(2)
def test_nothing_is_sent_for_batch_norm_alone():
    assert 0 == taken(Summed(nn.Linear(4, 3), nn.BatchNorm1d(3)))


@pytest.mark.ranks(2)
def test_constants_are_looked_at_once():
    torch.manual_seed(0)
    model = Summed(nn.Linear(4, 3))
    model.register_buffer("positions", torch.arange(5))

    assert 1 == taken(model)


@pytest.mark.ranks(2)
def test_a_buffer_that_begins_to_change_later_is_followed_from_then_on():
    torch.manual_seed(0)
    model = buffered.Normalized()
    model.normalizer.eval()
    with parwrap.distributed():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            if step == 7:
                model.normalizer.train()
            optimizer.zero_grad()
            model(torch.randn(4, 4) + parwrap.rank()).backward()
            optimizer.step()

            assert 1 == len({tuple(each) for each in parwrap.gather(model.normalizer.mean.tolist())})


@pytest.mark.ranks(2)
def test_a_buffer_that_grows_is_rank_zeros():
    class Grows(nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.register_buffer("kept", torch.zeros(0))

        def forward(self, x):
            self.kept = torch.cat([self.kept, x[:1, 0].detach()])
            return super().forward(x).sum() + self.kept.sum()

    torch.manual_seed(0)
    with parwrap.distributed():
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(3, 4) + parwrap.rank()).backward()
            optimizer.step()

            assert 1 == len({tuple(each) for each in parwrap.gather(model.kept.tolist())})


@pytest.mark.ranks(2)
def test_two_backwards_of_one_forward_see_the_same_buffers():
    """A change in between would be an error of autograd's, or a wrong gradient."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                self.scale.lerp_(x.abs().mean(0), 0.5)
            return super().forward(x) * self.scale

    torch.manual_seed(0)
    with parwrap.distributed():
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(torch.randn(3, 4) + parwrap.rank())
            scales = parwrap.gather(model.scale)
            out.sum().backward(retain_graph=True)
            once = model.bias.grad.clone()
            out.sum().backward()

            assert torch.allclose(3 * sum(scales) / 2, once)
            assert torch.allclose(2 * once, model.bias.grad)
            optimizer.step()
            assert 1 == len({tuple(each) for each in parwrap.gather(model.scale.tolist())})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"strategy": "local_sgd", "every": 2, "warmup": 3}], ids=str)
@pytest.mark.parametrize("steps", [True, False])
def test_a_graph_that_is_kept_to_the_step_or_the_end_leaves_rank_zeros_buffers(options, steps):
    torch.manual_seed(0)
    with parwrap.distributed(**options):
        model = buffered.Normalized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 4) + parwrap.rank()).backward(retain_graph=True)
            if steps or step < 2:
                optimizer.step()
                assert 1 == len({tuple(each) for each in parwrap.gather(model.normalizer.mean.tolist())})
    with parwrap.distributed():
        assert 1 == len({tuple(each) for each in parwrap.gather(model.normalizer.mean.tolist())})


@pytest.mark.ranks(3, timeout=60)
def test_ranks_that_have_left_take_part():
    """Rank 0 stops first: the buffers are those of the lowest that goes on."""
    torch.manual_seed(0)
    with parwrap.distributed():
        model = buffered.Normalized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2 + 2 * parwrap.rank()):
            optimizer.zero_grad()
            model(torch.randn(4, 4) + parwrap.rank()).backward()
            optimizer.step()
    with parwrap.distributed():
        assert 1 == len({tuple(each) for each in parwrap.gather(model.normalizer.mean.tolist())})


def train_parts(steps=2):
    """An encoder and a head of one optimizer, in training."""
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    for _ in range(steps):
        head(encoder(torch.randn(4, 2) + parwrap.rank())).sum().backward()
        optimizer.step()
    return encoder, head, optimizer


def same_on_all(buffer):
    return 1 == len({tuple(each) for each in parwrap.gather(buffer.flatten().tolist())})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", ["encoder", "head"])
def test_two_modules_of_one_optimizer_are_evaluated_with_the_same_buffers(first):
    with parwrap.distributed():
        encoder, head, optimizer = train_parts()
        assert not same_on_all(encoder[1].running_mean)
        for module in (encoder, head) if first == "encoder" else (head, encoder):
            module.eval()

        assert same_on_all(encoder[1].running_mean)
        assert optimizer


@pytest.mark.ranks(2)
def test_two_modules_in_eval_mode_read_a_loader_whole():
    samples = TensorDataset(torch.arange(8.0))
    with parwrap.distributed():
        encoder, head, optimizer = train_parts()
        encoder.eval()
        in_order = [float(x) for x in range(8)]
        assert in_order != [x.item() for (x,) in DataLoader(samples)]  # this rank's share comes first
        head.eval()
        assert in_order == [x.item() for (x,) in DataLoader(samples)]
        assert optimizer


@pytest.mark.ranks(2)
def test_one_of_two_modules_in_eval_mode_waits_for_nobody():
    with parwrap.distributed():
        encoder, _, optimizer = train_parts()
        if parwrap.rank() == 0:
            encoder.eval()
        assert optimizer


def copied(model):
    return copy.deepcopy(model)


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


AVERAGES = {"deepcopy": copied, "averaged": averaged}


def train_with_average(kind, in_eval):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    average = AVERAGES[kind](model)
    if in_eval:
        average.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 2) + parwrap.rank()).sum().backward()
        optimizer.step()
        if kind == "averaged":
            average.update_parameters(model)
        else:
            with torch.no_grad():
                for mine, other in zip(average.buffers(), model.buffers(), strict=True):
                    mine.copy_(other)
    return model, average, optimizer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("how", ["eval", "pass", "evaluate", "root"])
def test_an_average_of_a_model_is_evaluated_with_rank_zeros_buffers(kind, how):
    loader = DataLoader(TensorDataset(torch.randn(6, 2, generator=torch.Generator().manual_seed(0))), batch_size=2)

    @parwrap.evaluate
    def mean(model, loader):
        return torch.cat([model(x) for (x,) in loader]).mean().item()

    with parwrap.distributed(), torch.random.fork_rng():
        model, average, optimizer = train_with_average(kind, in_eval=how != "eval")
        expected = parwrap.broadcast([buffer.clone() for buffer in average.buffers()])
        if how == "eval":
            average.eval()
        elif how == "root":
            model.eval()
        elif how == "evaluate":
            with torch.no_grad():
                assert 1 == len(set(parwrap.gather(mean(average, loader))))
        else:
            with torch.no_grad():
                for _ in loader:
                    pass

        assert all(same_on_all(buffer) for buffer in average.buffers())
        assert all(torch.equal(*pair) for pair in zip(expected, average.buffers(), strict=True))
        assert optimizer


class Masked(nn.Linear):
    """A constant that its forward reads, as a causal mask or frequencies, next to BatchNorm if there is a ``norm``."""

    def __init__(self, norm):
        super().__init__(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).masked_fill(torch.eye(4) > 0, float("nan")))

    def forward(self, x):
        return self.norm(super().forward(x)).masked_fill(self.mask[0].isnan(), 0).square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm", [False, True])
def test_constants_are_sent_no_more_after_an_evaluation(norm, monkeypatch):
    taken = []
    take = TrainingBuffers.take
    monkeypatch.setattr(TrainingBuffers, "take", lambda self, *args, **kwargs: taken.append(self) or take(self, *args, **kwargs))
    torch.manual_seed(0)
    with parwrap.distributed():
        model = Masked(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4, 4) + parwrap.rank()).backward()
                optimizer.step()
            model.eval()
            assert not norm or same_on_all(model.norm.running_mean)
            model.train()
        at_once = [each.at_once for each in gc.get_objects() if type(each) is GradientAverager and each.buffers is taken[0]]

    assert 1 == len(taken)
    assert [False] == at_once


@pytest.mark.ranks(2)
def test_a_version_without_other_values_does_not_make_each_step_wait(monkeypatch):
    """As a load of the same state."""
    torch.manual_seed(0)
    with parwrap.distributed():
        model = Masked(norm=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            if step == 3:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.zero_grad()
            model(torch.randn(4, 4)).backward()
            optimizer.step()
        mine = {id(p) for p in model.parameters()}
        at_once = [each.at_once for each in gc.get_objects() if type(each) is GradientAverager and mine <= each.ids]

    assert [False] == at_once


@pytest.mark.ranks(2)
def test_a_buffer_that_changes_no_more_is_sent_no_more(monkeypatch):
    """A codebook that is frozen at last: what was taken is no change by the script."""
    taken = []
    take = TrainingBuffers.take
    monkeypatch.setattr(TrainingBuffers, "take", lambda self, *args, **kwargs: taken.append(self) or take(self, *args, **kwargs))
    torch.manual_seed(0)
    with parwrap.distributed():
        model = buffered.Normalized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(40):
            if step == 6:
                model.normalizer.eval()
            optimizer.zero_grad()
            model(torch.randn(4, 4) + parwrap.rank()).backward()
            optimizer.step()

    assert 6 == len(taken)


class Tracked(nn.Linear):
    """Two running statistics; one of them can be lost, or become one that is not sent."""

    def __init__(self):
        super().__init__(4, 1)
        self.tracked = nn.Module()
        self.tracked.register_buffer("cov", torch.eye(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            if getattr(self.tracked, "cov", None) is not None and self.tracked.cov.layout == torch.strided:
                self.tracked.cov.lerp_(x.T @ x, 0.1)
        return super().forward(x - self.mean).sum()


def delete(model):
    del model.tracked.cov


def make_none(model):
    model.tracked.cov = None


def make_sparse(model):
    model.tracked.cov = torch.eye(4).to_sparse()


def replace_module(model):
    model.tracked = nn.Identity()


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
@pytest.mark.parametrize("lose", [delete, make_none, make_sparse, replace_module])
def test_a_rank_that_has_lost_a_buffer_goes_on_with_the_others(lose, on):
    torch.manual_seed(0)
    with parwrap.distributed():
        model = Tracked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(12):
            if step == 5 and parwrap.rank() in on:
                lose(model)
            optimizer.zero_grad()
            model(torch.randn(4, 4) + parwrap.rank()).backward()
            optimizer.step()

            assert same_on_all(model.mean)


@pytest.mark.ranks(2, timeout=60)
def test_a_buffer_that_is_a_transpose_is_rank_zeros():
    class Transposed(nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.register_buffer("kept", torch.zeros(4, 3))

        def forward(self, x):
            self.kept = x.detach().T
            return super().forward(x).sum() + self.kept.sum()

    torch.manual_seed(0)
    with parwrap.distributed():
        model = Transposed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 4) + parwrap.rank()).backward()
            optimizer.step()

            assert same_on_all(model.kept)


def searches(train):
    """How often all objects are searched for modules while ``train`` runs."""
    searched = []
    search = gc.get_objects
    with pytest.MonkeyPatch.context() as patched, parwrap.distributed():
        patched.setattr(training_buffers.gc, "get_objects", lambda: searched.append(sys._getframe(1).f_code.co_filename) or search())
        train()
    return searched.count(training_buffers.__file__)


def drops_layers():
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(24):
        x = torch.ones(2, 4)
        for number, layer in enumerate(model):
            x = layer(x) if not number or step >> number & 1 else x
        optimizer.zero_grad()
        x.sum().backward()
        optimizer.step()


def two_in_turn():
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def updates_leaf_tensors():
    weight = torch.ones(4, requires_grad=True)
    for _ in range(12):
        (weight * parwrap.rank()).sum().backward()
        weight = (weight - 0.1 * weight.grad).detach().requires_grad_()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("train", "number"), [(drops_layers, 1), (two_in_turn, 1), (updates_leaf_tensors, 1)])
def test_modules_are_searched_for_once_however_many_sets_of_parameters_are_averaged(train, number):
    torch.manual_seed(0)

    assert number == searches(train)


@pytest.mark.ranks(2)
def test_modules_are_searched_for_again_for_another_optimizer_over_the_same_parameters():
    class Around(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.normalizer = model, buffered.Normalizer()

        def forward(self, x):
            return self.model(self.normalizer(x)).sum()

    def train(model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 4) + parwrap.rank()).sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    with parwrap.distributed():
        inner = nn.Linear(4, 1)
        train(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        model = Around(inner)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

        assert 1 == len({tuple(each) for each in parwrap.gather(model.normalizer.mean.tolist())})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("has_parameters", [False, True])
@pytest.mark.parametrize("backwards", [0, 2])
def test_buffers_that_are_trained_without_a_backward_are_the_same_once_they_are_evaluated(has_parameters, backwards):
    """As where a codebook is initialized by passes over the data, or ``update_bn`` is written by hand, with gradients on."""
    torch.manual_seed(0)
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = buffered.Normalized() if has_parameters else buffered.Normalizer()
        normalizer = model.normalizer if has_parameters else model
        head = nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        for _ in range(backwards):
            head(torch.randn(4, 4)).sum().backward()
            optimizer.step()
        parts = nn.ModuleList([model, head])
        parts.eval()
        parts.train()
        for (x,) in buffered.loader(shuffle=True):
            model(x)
        before = parwrap.gather(normalizer.mean.tolist())
        parts.eval() if has_parameters else model.eval()

        assert [before[0]] * 2 == parwrap.gather(normalizer.mean.tolist())
        assert before[0] != before[1]
