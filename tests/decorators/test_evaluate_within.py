"""Divided evaluations inside others, in training, in classes and scripts, and where they cannot be exact."""

import io
import runpy
from contextlib import nullcontext, redirect_stdout

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import parwrap
from evaluations import by_own_counter, close, model, samples
from parwrap.decorators.distributed import script_scope
from parwrap.ranks.group import alone

pytestmark = pytest.mark.usefixtures("nothing_is_warned_of")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_in_the_midst_of_training_in_train_mode_with_gradients_and_noise(batch):
    """Whatever ranks draw in an evaluation, what they draw together afterwards is the same."""

    @parwrap.evaluate(reduce="mean")
    def noisy(net, loader):
        total = count = 0
        for x, _ in loader:
            torch.rand(3), np.random.rand()
            total, count = total + net(x).square().sum().item(), count + len(x)
        return total / count

    @parwrap.distributed(batch=batch)
    def train():
        net, loader, losses = model(), samples(17), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(2):
            for x, y in samples(16, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                if epoch:
                    losses.append(noisy(net, loader))
            losses.append(noisy(net, loader))
            with alone():
                whole = noisy(net, loader)

            assert abs(whole - losses[-1]) < 1e-12
        return losses, torch.randperm(5).tolist(), np.random.rand()

    results = parwrap.gather(train())

    assert results[0] == results[1]
    assert len(set(results[0][0])) == len(results[0][0]) - 1  # the last two are of the same weights


@pytest.mark.ranks(2)
def test_methods_in_any_order_of_decorators_with_the_others():
    class Trainer:
        def __init__(self):
            self.net, self.loader = model(), samples(9)

        def evaluate(self):
            return by_own_counter(self.net, self.loader)

    expected = Trainer().evaluate()
    stacks = [
        [parwrap.evaluate(reduce="mean"), parwrap.distributed],
        [parwrap.distributed, parwrap.evaluate(reduce="mean")],
        [parwrap.sync_bn, parwrap.evaluate(reduce="mean"), parwrap.distributed(batch="global")],
    ]
    for stack in stacks:
        method = Trainer.evaluate
        for decorator in stack:
            method = decorator(method)

        close(expected, method(Trainer()))


@pytest.mark.ranks(2)
def test_an_evaluation_that_calls_others_returns_what_they_do():
    accuracy = parwrap.evaluate(reduce="mean")(by_own_counter)

    @parwrap.evaluate(reduce="sum")
    def both(net):
        return {"val": accuracy(net, samples(9)), "test": accuracy(net, samples(30))}

    expected = {"val": by_own_counter(model(), samples(9)), "test": by_own_counter(model(), samples(30))}
    with parwrap.distributed():
        close(expected, both(model()))


@pytest.mark.ranks(2)
def test_without_distributed_in_a_process_group_of_the_scripts_own():
    close(by_own_counter(model(), samples(9)), parwrap.evaluate(reduce="mean")(by_own_counter)(model(), samples(9)))


@pytest.mark.ranks(2)
def test_on_one_rank_alone_it_is_as_in_one_process():
    mean = parwrap.evaluate(reduce="mean")(by_own_counter)
    with parwrap.distributed():
        result = parwrap.rank_zero_only(mean)(model(), samples(9))

    assert (by_own_counter(model(), samples(9)) if parwrap.is_rank_zero() else None) == result


@pytest.mark.parametrize("scope", [parwrap.distributed, lambda function: function])
def test_in_one_process_it_changes_nothing(scope):
    result = {"count": 3, "model": object()}

    assert result is scope(parwrap.evaluate(reduce="mean")(lambda: result))()
    assert [result] == scope(parwrap.evaluate(reduce=list)(lambda: result))()
    assert {"count": 3} == scope(parwrap.evaluate(reduce={"count": max})(lambda: {"count": 3}))()


@pytest.mark.ranks(2)
def test_everything_is_put_back():
    before = {kind: dict(vars(kind)) for kind in (DataLoader, torch.autograd)}

    @parwrap.distributed
    @parwrap.evaluate(reduce="mean")
    def evaluate(loader, fails):
        assert 9 == len(loader.dataset)
        assert 3 == len(loader)
        if fails:
            raise KeyError("on purpose")
        return by_own_counter(model(), loader)

    for expected in (nullcontext(), pytest.raises(KeyError, match="on purpose")):
        with expected:
            evaluate(samples(9), fails=not isinstance(expected, nullcontext))
        for kind, names in before.items():
            assert [] == [name for name, value in vars(kind).items() if names.get(name) is not value]


SCRIPT = """
import torch, parwrap
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(101, 4, dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Linear(4, 2, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

@parwrap.evaluate(reduce="sum")
def evaluate(model, loader):
    model.eval()
    correct = loss = 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = model(inputs)
            loss += nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
            correct += (outputs.argmax(1) == targets).sum().item()
    return loss / len(loader.dataset), correct / len(data)

for epoch in range(3):
    model.train()
    for inputs, targets in DataLoader(data, batch_size=12, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(*(f"{value:.9f}" for value in evaluate(model, DataLoader(data, batch_size=10))))
"""


@pytest.mark.ranks(2)
def test_a_script_prints_on_two_ranks_what_it_does_alone(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def printed(scope):
        with redirect_stdout(io.StringIO()) as text, scope:
            runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
        return text.getvalue()

    expected, actual = printed(alone()), printed(script_scope(batch="global"))

    if parwrap.is_rank_zero():
        assert expected == actual
    assert 3 == len(expected.splitlines())
