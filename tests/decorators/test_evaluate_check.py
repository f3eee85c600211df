"""Evaluations compare their first result with that of the whole. References are the plain function in one process, and scikit-learn."""

import io
import math
import warnings
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from evaluations import by_own_counter, close, model, samples


def scored(count=101, seed=0):
    """A loader of scores and labels, where the first half is another mixture than the second."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < torch.linspace(0.2, 0.8, count)).long()
    scores = torch.rand(count, generator=generator, dtype=torch.float64) * 0.8 + 0.2 * labels
    return DataLoader(TensorDataset(scores, labels), batch_size=10)


def seen(loader):
    pairs = [pair for pair in loader]  # noqa: C416
    return torch.cat([x for x, _ in pairs]).numpy(), torch.cat([y for _, y in pairs]).numpy()


def auc(loader):
    scores, labels = seen(loader)
    return float(metrics.roc_auc_score(labels, scores))


def accuracy_of_each_class(loader):
    scores, labels = seen(loader)
    right = (scores > 0.5) == labels
    return {f"class {each}": float(right[labels == each].mean()) for each in (0, 1)}


def rmse(loader):
    scores, labels = seen(loader)
    return float(np.sqrt(((scores - labels) ** 2).mean()))


def r2(loader):
    scores, labels = seen(loader)
    return {"r2": float(metrics.r2_score(labels, scores)), "mse": float(metrics.mean_squared_error(labels, scores))}


def perplexity(loader):
    scores, labels = seen(loader)
    return math.exp(float(metrics.log_loss(labels, scores)))


def macro_f1(loader):
    scores, labels = seen(loader)
    return float(metrics.f1_score(labels, scores > 0.5, average="macro"))


def median(loader):
    return torch.from_numpy(seen(loader)[0]).median()


def largest(loader):
    return seen(loader)[0].max()


@torch.no_grad()
def deviation(loader):
    return torch.from_numpy(seen(loader)[0]).std().item()


def confusion_as_fractions(loader):
    scores, labels = seen(loader)
    return metrics.confusion_matrix(labels, scores > 0.5, normalize="true")


NO_MEANS = [auc, accuracy_of_each_class, rmse, r2, perplexity, macro_f1, median, largest, deviation, confusion_as_fractions]


@pytest.mark.ranks(2)
def test_what_is_no_mean_is_computed_of_the_whole_with_one_warning_that_names_the_remedy():
    for function in NO_MEANS:
        expected, later = function(scored()), function(scored(67, seed=1))
        shared = parwrap.evaluate(reduce="mean")(function)
        with parwrap.distributed():
            name = rf"{function.__name__} \(.*test_evaluate_check.py:\d+\)"
            message = rf'{name} cannot be split across ranks: .*for all of the data.*reduce="gather"'
            with pytest.warns(UserWarning, match=message):
                close(expected, shared(scored()))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                close(later, shared(scored(67, seed=1)))


@pytest.mark.ranks(2)
def test_a_type_that_depends_on_all_the_data_is_that_of_the_whole():
    """Equal numbers of another type are another result."""

    def count(loader):
        count = sum(len(x) for x, _ in loader)
        return torch.tensor(count) if count > 60 else count

    with parwrap.distributed(), pytest.warns(UserWarning, match=r"is 101 when merged by .*, but tensor\(101\) for all of the data"):
        close(torch.tensor(101), parwrap.evaluate(reduce="sum")(count)(scored()))


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_metrics_of_gathered_predictions_are_those_of_scikit_learn():
    gathered = parwrap.evaluate(reduce="gather")(seen)
    scores, labels = seen(scored())
    with parwrap.distributed():
        for _ in range(2):
            close((scores, labels), gathered(scored()))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_mean_is_checked_once_and_anew_for_other_data():
    passes = []

    class Counted(DataLoader):
        def __iter__(self):
            passes.append(0)
            return super().__iter__()

    shared = parwrap.evaluate(reduce="mean")(by_own_counter)
    loaders = [Counted(samples(count).dataset, batch_size=4) for count in (23, 23, 9, 23)]
    with parwrap.distributed():
        for loader, expected in zip(loaders, (2, 3, 5, 6), strict=True):
            close(by_own_counter(model(), DataLoader(loader.dataset, batch_size=4)), shared(model(), loader))
            assert expected == len(passes)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_sums_in_single_precision_are_no_difference():
    def loss(net, loader):
        total = torch.zeros(())
        with torch.no_grad():
            for x, y in loader:
                total += F.cross_entropy(net(x.float()), y, reduction="sum")
        return (total / len(loader.dataset)).item()

    net, loader = model().float(), samples(997)
    with parwrap.distributed():
        assert abs(loss(net, loader) - parwrap.evaluate(reduce="sum")(loss)(net, loader)) < 1e-5


@pytest.mark.ranks(2)
def test_what_agrees_by_accident_is_found_out_later():
    """All parts of an untrained model are alike, and so would be any way to put them together."""
    scale = torch.zeros((), dtype=torch.float64)

    def largest(loader):
        return (torch.cat([x for x, _ in loader]) * scale).max().item()

    shared = parwrap.evaluate(reduce="mean")(largest)
    with parwrap.distributed():
        assert 0.0 == shared(scored())
        scale += 1
        with pytest.warns(UserWarning, match="largest .*cannot be split across ranks"):
            close(largest(scored()), shared(scored()))


@pytest.mark.ranks(2)
def test_an_explicit_reduce_is_checked_too():
    def total(loader):
        return float(sum(x.sum() for x, _ in loader))

    for reduce in ("mean", "sum", lambda results: max(results)):
        function = auc if reduce != "mean" else total
        with parwrap.distributed(), pytest.warns(UserWarning, match="cannot be split across ranks: the result.* when merged by reduce"):
            close(function(scored()), parwrap.evaluate(reduce=reduce)(function)(scored()))


@pytest.mark.ranks(2)
def test_long_results_are_shown_where_they_differ():
    def results(loader):
        return {"scores": [float(each) for each in seen(loader)[0]], "version": [1]}

    said = r"the result is \.\.\..*'version': \[1, 1\]} when merged by reduce='gather', but \.\.\..*'version': \[1\]} for all of the data"
    with parwrap.distributed(), pytest.warns(UserWarning, match=said):
        parwrap.evaluate(reduce="gather")(results)(scored())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reduce", "other"), [("mean", "sum"), ("sum", "mean")])
def test_of_a_mean_and_a_sum_the_other_is_named_if_it_is_right(reduce, other):
    def ratio(loader):
        scores, labels = seen(loader)
        return float((scores > labels).sum()) / (len(labels) if other == "mean" else 1)

    with parwrap.distributed(), pytest.warns(UserWarning, match=f'for all of the data. It is right with reduce="{other}": '):
        close(ratio(scored()), parwrap.evaluate(reduce=reduce)(ratio)(scored()))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_without_the_check_it_is_shared_out_as_it_is():
    scores, labels = seen(scored())
    parts = [metrics.roc_auc_score(labels[part], scores[part]) for part in (slice(60), slice(60, None))]
    with parwrap.distributed():
        assert abs((60 * parts[0] + 41 * parts[1]) / 101 - parwrap.evaluate(reduce="mean", check=False)(auc)(scored())) < 1e-12


class Trainer:
    def __init__(self):
        self.net, self.loader, self.history, self.best = model(), samples(23), [], 0.0

    def keeps_a_history(self):
        self.history.append(by_own_counter(self.net, self.loader)["loss"])
        return self.history[-1]

    def keeps_the_best(self):
        self.best = max(self.best, by_own_counter(self.net, self.loader)["accuracy"])
        return self.best


class Counter:
    __slots__ = ("samples",)

    def __init__(self):
        self.samples = 0


class Counting:
    def __init__(self):
        self.counter = Counter()

    def counts(self, loader):
        self.counter.samples += (count := sum(len(x) for x, _ in loader))
        return count

    def records_by_helpers(self, loader):
        self.record(count := sum(len(x) for x, _ in loader))
        return count

    def record(self, count):
        write_down(count)


recorded = []


def write_down(count):
    recorded.append(count)


class Metric:
    def __init__(self):
        self.right = torch.zeros(())
        self.count = 0

    def update(self, right, count):
        self.right += right
        self.count += count


@pytest.mark.ranks(2)
def test_what_a_function_leaves_behind_is_that_of_the_whole_and_there_once(tmp_path):
    metric, path = Metric(), tmp_path / "predictions.txt"

    def updates_a_metric(net, loader):
        for x, y in loader:
            metric.update((net(x).argmax(1) == y).sum(), len(y))

    def writes(net, loader):
        result = by_own_counter(net, loader)
        with open(path, "a") as file:
            file.write(f"{result['loss']:.6f}\n")
        return result

    plain = Trainer()
    expected = [plain.keeps_a_history(), plain.keeps_a_history(), plain.keeps_the_best()]
    loss = f"{by_own_counter(model(), samples(23))['loss']:.6f}\n"
    trainer = Trainer()
    with parwrap.distributed():
        keeps = parwrap.evaluate(reduce="mean")(Trainer.keeps_a_history)
        with pytest.warns(
            UserWarning,
            match=(r"keeps_a_history .*cannot be split across ranks: it changes self\.history, which would contain only a rank"),
        ):
            first = keeps(trainer)
        second = keeps(trainer)
        with pytest.warns(UserWarning, match=r"it changes self\.best"):
            third = parwrap.evaluate(reduce="mean")(Trainer.keeps_the_best)(trainer)
        close(expected, [first, second, third])
        close((plain.history, plain.best), (trainer.history, trainer.best))
        with pytest.warns(UserWarning, match="it changes metric.right"):
            parwrap.evaluate(reduce="mean")(updates_a_metric)(model(), samples(23))
        assert (23, by_own_counter(model(), samples(23))["accuracy"]) == (metric.count, 100 * metric.right.item() / 23)
        shared = parwrap.evaluate(reduce="mean")(writes)
        with pytest.warns(UserWarning, match=r"it writes .*predictions.txt, which would contain"):
            shared(model(), samples(23))
        shared(model(), samples(23))
        assert 2 * loss == path.read_text()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [dict, list])
def test_a_change_in_a_large_container_is_seen(kind):
    found = [0.0] * 3000 if kind is list else dict.fromkeys(range(3000), 0.0)

    def notes(loader):
        for at, batch in enumerate(loader, 2000):
            found[at] = batch.sum().item()
        return len(batch)

    loader = DataLoader(torch.ones(12), batch_size=2)
    with parwrap.distributed(), pytest.warns(UserWarning, match=r"it changes found\[200\d\], which"):
        parwrap.evaluate(reduce="sum")(notes)(loader)

    assert [2.0] * 6 == [found[at] for at in range(2000, 2006)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("function", "place"), [(Counting.counts, r"self\.counter\.samples"), (Counting.records_by_helpers, "recorded")])
def test_what_helpers_and_objects_in_self_leave_behind_is_that_of_the_whole(function, place):
    recorded.clear()
    counting = Counting()
    with parwrap.distributed():
        shared = parwrap.evaluate(reduce="sum")(function)
        with pytest.warns(UserWarning, match=f"it changes {place}, which"):
            shared(counting, samples(23))
        shared(counting, samples(23))

    plain = Counting()
    left = [*recorded, counting.counter.samples]
    recorded.clear()
    function(plain, samples(23)), function(plain, samples(23))
    assert [*recorded, plain.counter.samples] == left


@pytest.mark.ranks(2)
def test_buffers_and_random_streams_are_afterwards_what_they_are_in_one_process():
    def evaluate(net, loader):
        total = count = 0
        for x, _ in loader:
            total, count = total + net(x.float()).sum().item(), count + len(x)
        return total / count

    def after(function, size):
        torch.manual_seed(1)
        net, loader = nn.BatchNorm1d(4), samples(24, shuffle=True, batch_size=4)
        function(net, loader), function(net, loader)
        return net.running_mean, torch.rand(2), torch.randperm(3)

    expected = after(evaluate, 1)
    with parwrap.distributed(seed=1), pytest.warns(UserWarning, match=r"it changes net\."):
        close(expected, after(parwrap.evaluate(reduce="mean")(evaluate), 2))

    def mean(net, loader):
        return evaluate(net.eval(), loader)

    expected = after(mean, 1)
    with parwrap.distributed(seed=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        close(expected, after(parwrap.evaluate(reduce="mean")(mean), 2))


@pytest.mark.ranks(2)
def test_the_first_call_prints_once_and_what_the_whole_does():
    def talks(net, loader):
        result = by_own_counter(net, loader)
        print(f"loss {result['loss']:.6f}")
        return result

    expected = f"loss {by_own_counter(model(), samples(23))['loss']:.6f}\n"
    with redirect_stdout(io.StringIO()) as text, parwrap.distributed():
        if parwrap.is_rank_zero():
            with pytest.warns(
                UserWarning,
                match=r"talks .* prints something different for a rank's part .* Print the result outside of the function instead.",
            ):
                parwrap.evaluate(reduce="mean")(talks)(model(), samples(23))
            assert expected == text.getvalue()
        else:
            parwrap.evaluate(reduce="mean")(talks)(model(), samples(23))


@pytest.mark.ranks(2)
def test_noise_that_is_drawn_inside_is_named_with_the_way_out():
    def noisy(loader):
        seen = torch.cat([x for x, _ in loader])
        return (seen + torch.rand(len(seen))).mean().item()

    message = r"random numbers, as with dropout.*without this check, pass check=False"
    with parwrap.distributed(), pytest.warns(UserWarning, match=message):
        results = parwrap.gather(parwrap.evaluate(reduce="mean")(noisy)(scored()))

    assert results[0] == results[1]


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("checked", [True, False])
def test_an_exception_of_one_rank_that_the_script_catches_is_raised_on_all(checked):
    fails = [True]

    def evaluate(net, loader):
        for at, _ in enumerate(loader):
            if fails[0] and parwrap.rank() == 1 and at == 1:
                raise MemoryError("on purpose")
        return by_own_counter(net, loader)

    shared, causes = parwrap.evaluate(reduce="mean", check=checked)(evaluate), []
    with parwrap.distributed():
        for epoch in range(3):
            fails[0] = epoch == 1
            try:
                result = shared(model(), samples(23))
            except MemoryError as error:
                causes.append((epoch, str(error.__cause__)))
                continue
            close(by_own_counter(model(), samples(23)), result)

    assert [1] == [epoch for epoch, _ in causes]
    if parwrap.rank() == 0:
        assert causes[0][1].startswith("rank 1 failed with MemoryError: on purpose in ")


@pytest.mark.ranks(2)
def test_a_function_that_fails_on_parts_only_is_computed_of_the_whole():
    def evaluate(loader):
        scores, _ = seen(loader)
        assert len(scores) == 101
        return float((scores > 0.5).mean())

    with parwrap.distributed(), pytest.warns(UserWarning, match="on parts of the data rank 0 failed with AssertionError"):
        close(evaluate(scored()), parwrap.evaluate(reduce="mean")(evaluate)(scored()))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_the_whole_is_evaluated_with_the_weights_and_buffers_that_eval_gives_all_ranks():
    def mean(net, loader):
        net.eval()
        with torch.no_grad():
            return by_own_counter(net, loader)

    shared = parwrap.evaluate(reduce="mean")(mean)

    @parwrap.distributed(seed=0)
    def train():
        net = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64))
        optimizer, results = torch.optim.SGD(net.parameters(), lr=0.1), []
        for _ in range(2):
            net.train()
            for x, y in samples(16, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
            results.append(shared(net, samples(23)))
            close(mean(net, samples(23)), results[-1])
        return results

    results = parwrap.gather(train())
    assert results[0] == results[1]


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_function_that_puts_its_numbers_together_itself_is_left_to_that():
    def accuracy(net, loader):
        right, count = 0, 0
        for x, y in loader:
            right, count = right + (net(x).argmax(1) == y).sum().item(), count + len(y)
        right, count = parwrap.reduce_sum((right, count))
        return right / count

    with parwrap.distributed():
        expected = by_own_counter(model(), samples(23))["accuracy"] / 100
        assert expected == pytest.approx(parwrap.evaluate(reduce="mean")(accuracy)(model(), samples(23)), abs=1e-12)
