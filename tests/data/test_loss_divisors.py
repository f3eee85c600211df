"""Classification losses that divide by weights of classes or by targets that count, against one process with whole batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import parwrap

CLASSES = 3
WEIGHT = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def samples(count=27, tokens=0, ignored=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (count, tokens) if tokens else (count,), generator=generator)
    if ignored is not None:
        y[torch.rand(y.shape, generator=generator) < 0.4] = ignored
    return TensorDataset(x, y)


def trained(criterion, dataset, tokens=0, wrap=lambda model: model):
    """The weights after two epochs."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, CLASSES * max(tokens, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=8):
            optimizer.zero_grad()
            logits = model(x)
            criterion(logits.view(len(x), CLASSES, tokens) if tokens else logits, y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def composite(logits, target):
    """Two classification losses of different weights, and one that is a mean over samples."""
    first, second = functional.cross_entropy(logits, target, weight=WEIGHT), functional.cross_entropy(logits, target, WEIGHT.flip(0))
    return first + 0.3 * second + 0.1 * logits.square().mean()


def by_log(logits, target):
    return nn.NLLLoss(weight=WEIGHT)(functional.log_softmax(logits, 1), target)


CRITERIA = {
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "log": by_log,
    "smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "composite": composite,
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "weighted and ignored": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
    "plain": nn.CrossEntropyLoss(),
}


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_parts_count_by_what_they_are_divided_by(size):
    for name, criterion in CRITERIA.items():
        expected = trained(criterion, samples())
        with parwrap.distributed(batch="global"):
            assert expected == pytest.approx(trained(criterion, samples()), abs=1e-6), name


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_tokens_that_are_padding_do_not_count(size):
    for tokens in (1, 3):
        for weight in (None, WEIGHT) if tokens > 1 else (WEIGHT,):
            criterion, dataset = nn.CrossEntropyLoss(weight), samples(tokens=tokens, ignored=-100)
            expected = trained(criterion, dataset, tokens)
            with parwrap.distributed(batch="global"):
                assert expected == pytest.approx(trained(criterion, dataset, tokens), abs=1e-6)


@pytest.mark.ranks(2)
def test_samples_that_are_ignored_by_the_default_are_said():
    dataset = samples(ignored=-100)
    with parwrap.distributed(batch="global"), pytest.warns(UserWarning, match=r"test_loss_divisors.py:\d+ some targets .*mean_over_ranks"):
        trained(nn.CrossEntropyLoss(), dataset)


@pytest.mark.ranks(2)
def test_windows_of_batches_count_alike():
    criterion = CRITERIA["composite"]
    expected = parwrap.accumulate(2)(trained)(criterion, samples(32))
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(parwrap.accumulate(2)(trained)(criterion, samples(32)), abs=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_other_strategies_do_so_too(strategy):
    expected = trained(CRITERIA["weighted"], samples())
    with parwrap.distributed(batch="global", strategy=strategy):
        assert expected == pytest.approx(trained(CRITERIA["weighted"], samples()), abs=1e-6)


@pytest.mark.ranks(2)
def test_a_function_inside_that_splits_its_batches_does_so_too():
    expected = trained(CRITERIA["weighted"], samples())
    with parwrap.distributed():
        assert expected == pytest.approx(parwrap.distributed(batch="global")(trained)(CRITERIA["weighted"], samples()), abs=1e-6)


@pytest.mark.ranks(2)
def test_batches_of_each_ranks_own_are_averaged_as_by_ddp():
    def alone(dataset):
        return trained(CRITERIA["weighted"], dataset)

    with parwrap.distributed():
        model = alone(samples())
        assert 1 == len({tuple(each) for each in parwrap.gather(model)})
        assert functional.cross_entropy.__module__ == "torch.nn.functional"


@pytest.mark.ranks(2)
def test_a_compiled_model_counts_alike():
    expected = trained(CRITERIA["weighted"], samples())
    with parwrap.distributed(batch="global"):
        model = trained(CRITERIA["weighted"], samples(), wrap=lambda model: torch.compile(model, backend="eager"))

    assert expected == pytest.approx(model, abs=1e-6)


@pytest.mark.ranks(2)
def test_a_compiled_loss_counts_alike():
    def criterion(logits, target):
        return functional.cross_entropy(logits, target, weight=WEIGHT)

    expected = trained(criterion, samples())
    with parwrap.distributed(batch="global"):
        model = trained(torch.compile(criterion, backend="eager"), samples())

    assert expected == pytest.approx(model, abs=1e-6)


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.ranks(2)), pytest.param(3, marks=[pytest.mark.ranks(3), pytest.mark.slow])]
)
@pytest.mark.filterwarnings("error:parwrap")
def test_a_loss_that_is_compiled_whole_counts_alike(size):
    for name in ("composite", "log", "plain"):
        expected = trained(CRITERIA[name], samples())
        with parwrap.distributed(batch="global"):
            compiled = torch.compile(CRITERIA[name], backend="aot_eager", fullgraph=True)
            assert expected == pytest.approx(trained(compiled, samples()), abs=1e-6), name


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:parwrap")
def test_so_do_tokens_of_a_loss_that_is_compiled():
    criterion, dataset = nn.CrossEntropyLoss(), samples(tokens=3, ignored=-100)
    expected = trained(criterion, dataset, tokens=3)
    with parwrap.distributed(batch="global"):
        actual = trained(torch.compile(criterion, backend="aot_eager"), dataset, tokens=3)

    assert expected == pytest.approx(actual, abs=1e-6)


@pytest.mark.ranks(2)
def test_a_loss_is_compiled_anew_inside_and_is_torchs_own_after():
    def weights(criterion):
        return trained(criterion, samples(24))

    compiled = torch.compile(CRITERIA["weighted"], backend="aot_eager")
    expected = weights(CRITERIA["weighted"])
    for _ in range(2):
        assert expected == pytest.approx(weights(compiled), abs=1e-12)
        with parwrap.distributed(batch="global"):
            assert expected == pytest.approx(weights(compiled), abs=1e-6)


@pytest.mark.ranks(2)
def test_a_compiled_transform_is_left_alone():
    def loss(weight, x, y):
        return functional.cross_entropy(x @ weight, y, weight=WEIGHT)

    weight, (x, y) = torch.ones(4, CLASSES, dtype=torch.float64), samples(4).tensors
    expected = torch.func.grad(loss)(weight, x, y)
    with parwrap.distributed(batch="global"):
        actual = torch.compile(torch.func.grad(loss), backend="aot_eager")(weight, x, y)

    assert torch.equal(expected, actual)


@pytest.mark.ranks(2)
def test_ranks_that_part_ways_end():
    """One rank leaves its loop early."""
    criterion = CRITERIA["weighted"]
    with parwrap.distributed(batch="global"):
        model = nn.Linear(4, CLASSES).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for index, (x, y) in enumerate(DataLoader(samples(64), batch_size=8)):
            if parwrap.rank() == 1 and index == 3:
                break
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        parwrap.barrier()
        assert 1 == len({tuple(each) for each in parwrap.gather(model.weight.flatten().tolist())})


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_ranks_agree_whether_a_loss_counts_by_its_targets_where_one_has_as_many_as_samples():
    """Four samples with one target for each, then four with three: in the first batch rank 0 sees nothing of that."""
    generator = torch.Generator().manual_seed(0)
    counts = [1, 1, 1, 1, 3, 3, 3, 3]
    data = [
        (torch.randn(count, 4, generator=generator, dtype=torch.float64), torch.randint(CLASSES, (count,), generator=generator))
        for count in counts
    ]

    def ragged():
        torch.manual_seed(0)
        model = nn.Linear(4, CLASSES).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for xs, ys in DataLoader(data, batch_size=8, collate_fn=lambda samples: tuple(zip(*samples, strict=True))):
            functional.cross_entropy(model(torch.cat(xs)), torch.cat(ys)).backward()
            optimizer.step()
        return model.weight.flatten().tolist()

    expected = ragged()
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(ragged(), abs=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_batches_that_are_kept_and_of_one_size_count_so_too():
    def cached():
        torch.manual_seed(0)
        model = nn.Linear(4, CLASSES).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = []
        for epoch in range(3):
            for x, y in list(batches) if epoch else DataLoader(samples(24), batch_size=8):
                if not epoch:
                    batches.append((x, y))
                optimizer.zero_grad()
                CRITERIA["weighted"](model(x), y).backward()
                optimizer.step()
        return model.weight.flatten().tolist()

    expected = cached()
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(cached(), abs=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
@pytest.mark.parametrize("scopes", [("global",), ("per_rank", "global"), ("global", "per_rank", "global"), ("global", "global")])
def test_losses_count_once_however_scopes_are_nested(scopes):
    def nested(*batches):
        if not batches:
            return trained(CRITERIA["weighted"], samples())
        with parwrap.distributed(batch=batches[0]):
            return nested(*batches[1:])

    expected = nested()

    assert expected == pytest.approx(nested(*scopes), abs=1e-6)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_batch_by_next_counts_so_too(size):
    def first_of_each_pass(batch_size):
        torch.manual_seed(0)
        model = nn.Linear(4, CLASSES).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(samples(24), batch_size, shuffle=True)
        for _ in range(3):
            x, y = next(iter(loader))
            optimizer.zero_grad()
            CRITERIA["weighted"](model(x), y).backward()
            optimizer.step()
        return model.weight.flatten().tolist()

    for batch_size in (6, 7):
        expected = first_of_each_pass(batch_size)
        with parwrap.distributed(batch="global"):
            assert expected == pytest.approx(first_of_each_pass(batch_size), abs=1e-6)


def whole(model, x, y, samples):
    return [functional.cross_entropy(model(x), y)]


def halves(model, x, y, samples):
    """As by a loop that accumulates over pieces of its batch."""
    middle = len(x) // 2
    return [functional.cross_entropy(model(x[part]), y[part]) * len(x[part]) / len(x) for part in (slice(middle), slice(middle, None))]


def single(model, x, y, samples):
    return [sum(functional.cross_entropy(model(each[None]), target[None]) for each, target in zip(x, y, strict=True)) / len(x)]


def chosen(model, x, y, samples):
    """By a mask, of the batch or of the output."""
    return [functional.cross_entropy(model(x)[y > 0], y[y > 0])]


def after_those_that_are_left_out(model, x, y, samples):
    """As by a run that is resumed, which looks like one that draws ahead."""
    return [] if samples < 30 else [functional.cross_entropy(model(x), y)]


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("losses", [halves, single, chosen, after_those_that_are_left_out])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_pieces_of_a_batch_count_by_its_samples_and_those_a_mask_has_chosen_by_their_number(size, losses):
    def weights(losses):
        torch.manual_seed(0)
        model = nn.Linear(4, CLASSES).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        drawn = 0
        for _ in range(2):
            for x, y in DataLoader(samples(52), batch_size=15):
                drawn += 15
                optimizer.zero_grad()
                of_batch = losses(model, x, y, drawn)
                for loss in of_batch:
                    loss.backward()
                if of_batch:
                    optimizer.step()
        return model.weight.flatten().tolist()

    expected = weights(whole if losses in (halves, single) else losses)
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(weights(losses), abs=1e-6)


@pytest.mark.ranks(2)
def test_copies_of_pieces_that_may_have_been_chosen_are_said():
    model = nn.Linear(4, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train():
        for x, y in DataLoader(samples(30), batch_size=15):
            for piece in (slice(3), slice(3, None)):
                functional.cross_entropy(model(x[piece]), y[piece].clone()).backward()
            optimizer.step()

    with parwrap.distributed(batch="global"), pytest.warns(UserWarning, match=r"test_loss_divisors.py:\d+ has fewer .*batch_size"):
        train()
