"""``gather_with_grad``: losses over pairs of samples have the value and the gradient of one process with the whole batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.ranks.group import alone

SAMPLES, BATCH = 44, 12  # the last batch has 8


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)), nn.Linear(4, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)

    def loss(self, images, texts, gather):
        images, texts = self(images, texts)
        images, texts = gather(images), gather(texts)
        logits = self.logit_scale.exp() * images @ texts.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 6, generator=generator)
    return TensorDataset(images, images[:, :4] + 0.1 * torch.randn(samples, 4, generator=generator))


def sup_con(model, images, labels, gather):
    features = F.normalize(model(images), dim=1)
    features, labels = gather(features), gather(labels)
    logits = features @ features.T / 0.5
    itself = torch.eye(len(logits), dtype=torch.bool)
    log_p = logits - logits.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    same = (labels[:, None] == labels[None]) & ~itself
    return -((log_p * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def trained(model, gather, epochs=2, samples=SAMPLES, batch=BATCH):
    """The losses of all steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(epochs):
        for images, texts in DataLoader(data(samples), batch_size=batch, shuffle=True):
            loss = model.loss(images, texts, gather)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def clip():
    torch.manual_seed(3)
    return Clip().double() if torch.get_default_dtype() is torch.float64 else Clip()


def assert_alike(expected, actual):
    for (name, p), q in zip(expected.named_parameters(), actual.parameters(), strict=True):
        torch.testing.assert_close(q, p, msg=lambda text, name=name: f"{name}: {text}", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)])
@pytest.mark.parametrize("batch", [BATCH, 43])  # a last batch of one sample: some ranks have none of it
def test_training_is_that_of_one_process_also_with_uneven_last_batches(size, batch):
    expected, actual = clip(), clip()
    with alone():
        losses = trained(expected, lambda x: x, batch=batch)
    shared = parwrap.distributed(batch="global")(trained)(actual, parwrap.gather_with_grad, batch=batch)

    assert losses == pytest.approx(shared, rel=1e-4)
    assert_alike(expected, actual)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("part", ["whole", "own rows"])
def test_the_gradient_is_that_of_the_whole_batch_in_parts_of_any_size(size, part):
    expected, actual = clip(), clip()
    images, texts = data(12).tensors
    rows = [5, 1, 6] if size == 3 else [4, 8]
    expected.loss(images, texts, lambda x: x).backward()

    @parwrap.distributed
    def backward():
        first = sum(rows[: parwrap.rank()])
        own = slice(first, first + rows[parwrap.rank()])
        if part == "whole":
            loss = actual.loss(images[own], texts[own], parwrap.gather_with_grad)
        else:  # each rank computes its rows of the similarities, and the mean over ranks is that of the whole
            x, y = actual(images[own], texts[own])
            all_x, all_y = parwrap.gather_with_grad(x), parwrap.gather_with_grad(y)
            labels, scale = torch.arange(12)[own], actual.logit_scale.exp()
            mine = F.cross_entropy(scale * x @ all_y.T, labels, reduction="sum") + F.cross_entropy(
                scale * y @ all_x.T, labels, reduction="sum"
            )
            loss = mine / 2 / 12 * parwrap.world_size()
        loss.backward()
        return loss.item()

    backward()
    for p, q in zip(expected.parameters(), actual.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_labels_are_gathered_too():
    torch.manual_seed(0)
    images, labels = torch.randn(10, 6), torch.randint(3, (10,))
    expected, actual = nn.Linear(6, 4), nn.Linear(6, 4)
    actual.load_state_dict(expected.state_dict())
    reference = sup_con(expected, images, labels, lambda x: x)
    reference.backward()

    @parwrap.distributed
    def backward():
        own = slice(0, 7) if parwrap.rank() == 0 else slice(7, 10)
        loss = sup_con(actual, images[own], labels[own], parwrap.gather_with_grad)
        loss.backward()
        return loss.item()

    assert reference.item() == pytest.approx(backward(), rel=1e-5)
    torch.testing.assert_close(actual.weight.grad, expected.weight.grad)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_rows_of_every_dtype_come_in_the_order_of_ranks(dtype):
    with parwrap.distributed():
        mine = torch.full((parwrap.rank(), 2, 3), parwrap.rank()).to(dtype)
        gathered = parwrap.gather_with_grad(mine)
        nothing = parwrap.gather_with_grad(torch.ones(0, 2))
        vector = parwrap.gather_with_grad(mine.flatten())

    assert torch.equal(torch.tensor([1, 2, 2])[:, None, None].expand(3, 2, 3).to(dtype), gathered)
    assert (0, 2) == tuple(nothing.shape)
    assert torch.equal(torch.tensor([1] * 6 + [2] * 12).to(dtype), vector)


def test_on_one_rank_and_outside_it_is_the_identity():
    x = torch.ones(2, 3, requires_grad=True)
    with parwrap.distributed():
        inside = parwrap.gather_with_grad(x)

    assert parwrap.gather_with_grad(x) is x
    assert inside is x


@pytest.mark.ranks(2)
def test_an_evaluation_has_whole_batches_already():
    @parwrap.distributed
    def train():
        model = clip()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for images, texts in DataLoader(data(), batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            model.loss(images, texts, parwrap.gather_with_grad).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return [
                [model.loss(images, texts, gather).item() for images, texts in DataLoader(data(), batch_size=BATCH)]
                for gather in (lambda x: x, parwrap.gather_with_grad)
            ]

    expected, actual = train()

    assert expected == actual


@pytest.mark.ranks(2)
def test_ranks_that_step_by_themselves_compare_their_own_samples():
    x = torch.ones(2, 3)
    with parwrap.distributed(strategy="none"):
        assert parwrap.gather_with_grad(x) is x


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [{"size": (2, 3)}, {"size": (2, 4)}],
            r"each row is \[3\] float32 on rank 0 and \[4\] float32 on rank 1\. Only the first dimension may",
        ),
        ([{"size": (2, 3)}, {"size": (2, 3), "dtype": torch.float64}], r"each row is \[3\] float32 on rank 0 and \[3\] float64 on rank 1"),
        ([{"size": (2, 3)}, {"size": (2, 3), "requires_grad": True}], "requires_grad is False on rank 0 and True on rank 1"),
    ],
)
def test_rows_that_differ_are_an_error_on_every_rank(options, words):
    with parwrap.distributed(), pytest.raises(RankMismatchError, match=r"parwrap\.gather_with_grad\(\) got .*" + words):
        parwrap.gather_with_grad(torch.ones(**options[parwrap.rank()]))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1.0], "takes a tensor, not list: call it once for each tensor"),
        (torch.tensor(1.0), "has no dimension: pass one row for each sample"),
        (torch.ones(2, 2).to_sparse(), "has the layout torch.sparse_coo: pass x.to_dense()"),
    ],
)
def test_what_has_no_rows_is_refused_also_on_one_rank(x, words):
    with pytest.raises(UsageError, match=words):
        parwrap.gather_with_grad(x)


@pytest.mark.ranks(2, fresh=True)
def test_a_checkpoint_around_it_is_refused():
    from torch.utils.checkpoint import checkpoint

    model = nn.Linear(3, 2)
    with parwrap.distributed():
        loss = checkpoint(lambda x: parwrap.gather_with_grad(model(x)).pow(2).sum(), torch.ones(2, 3), use_reentrant=False)
        with pytest.raises(UsageError, match="call it outside of the checkpointed part"):
            loss.backward()


@pytest.mark.ranks(2, fresh=True)
def test_a_process_group_of_the_users_own_serves_too():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("parwrap.ranks.group._current", None)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        plain = copy.deepcopy(model.module)
        x = torch.randn(5, 3)
        plain(x).std(0).sum().backward()
        own = x[:2] if torch.distributed.get_rank() == 0 else x[2:]
        parwrap.gather_with_grad(model(own)).std(0).sum().backward()

    torch.testing.assert_close(model.module.weight.grad, plain.weight.grad)
