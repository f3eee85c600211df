"""What is drawn rarely is the same on every rank, and what is drawn for every step differs, in loops without a loader."""

import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.group.group import alone
from parwrap.intercept.table import intercepting
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams
from parwrap.loop.step_draws import StepDraws

on_two_and_three_ranks = pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])


def seeded():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def by_rank(function):
    """What ``function`` returns on each rank."""
    seeded()
    return parwrap.gather(parwrap.distributed(function)())


def steps(number, draw=None, width=2):
    """Take steps by hand, with what ``draw`` gives before each."""
    model = nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    drawn = []
    for _ in range(number):
        drawn.append(draw() if draw else 0)
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    return drawn


def accuracy_on_noise():
    seeded()
    x, y = torch.randn(80, 20), torch.randint(0, 2, (80,))
    accuracies = []
    for _ in range(3):
        a, b, ya, yb = train_test_split(x, y)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(a), ya).backward()
            optimizer.step()
        accuracies.append((model(b).argmax(1) == yb).float().mean().item())
    return accuracies


@on_two_and_three_ranks
def test_folds_on_noise_have_the_accuracy_of_a_single_process(size):
    with alone():
        expected = accuracy_on_noise()

    assert [expected] * size == parwrap.gather(parwrap.distributed(accuracy_on_noise)())


DRAWS = {
    "torch.randint": lambda: torch.randint(10**6, ()).item(),
    "torch.randperm": lambda: torch.randperm(50)[:4].tolist(),
    "Tensor.uniform_": lambda: torch.empty(1).uniform_().item(),
    "torch.distributions": lambda: torch.distributions.Categorical(torch.ones(10**6)).sample().item(),
    "functional dropout": lambda: F.dropout(torch.ones(40)).tolist(),
    "numpy": lambda: np.random.choice(10**6),
    "numpy.shuffle": lambda: shuffled(np.random.shuffle),
    "python": lambda: random.random(),
    "random.shuffle": lambda: shuffled(random.shuffle),
}


def shuffled(shuffle):
    rows = list(range(40))
    shuffle(rows)
    return rows


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DRAWS)
def test_a_line_that_draws_before_each_step_differs_by_rank_after_three_steps(name):
    one, other = by_rank(lambda: steps(6, DRAWS[name]))

    assert one[:3] == other[:3]
    assert all(mine != theirs for mine, theirs in zip(one[3:], other[3:], strict=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DRAWS)
def test_the_same_draw_once_for_each_model_is_the_same_on_all_ranks(name):
    def folds():
        drawn = []
        for _ in range(4):
            drawn.append(DRAWS[name]())
            steps(4, lambda: torch.rand(1) + np.random.rand() + random.random())
        return drawn

    one, other = by_rank(folds)

    assert one == other
    assert one[2] != one[3]


@pytest.mark.ranks(2)
def test_dropout_in_a_forward_differs_by_rank():
    def train():
        model, drawn = nn.Sequential(nn.Linear(2, 40), nn.Dropout()), []
        for _ in range(3):
            out = model(torch.ones(1, 2))
            drawn.append((out == 0).tolist())
            out.sum().backward()
        return drawn, torch.randperm(30).tolist()

    (one, split), (other, same) = by_rank(train)

    assert one[0] == other[0]
    assert one[1] != other[1]
    assert split == same


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_in_its_backward_what_it_drew_before(reentrant):
    def train():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout())
        differences = []
        for _ in range(5):
            x = torch.ones(1, 4, requires_grad=True)
            out = checkpoint(model, x, use_reentrant=reentrant)
            model.zero_grad()
            out.sum().backward()
            kept = (out != 0).float().detach() * 2
            differences.append((model[0].weight.grad - parwrap.reduce_mean(kept.T.expand(4, 4))).abs().max().item())
        return differences

    assert [[0.0] * 5] * 2 == by_rank(train)


@pytest.mark.ranks(2)
def test_an_iterator_that_a_fold_leaves_open_does_not_make_the_next_split_differ():
    loader = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2)
    kept = []

    def folds():
        drawn = []
        for _ in range(3):
            drawn.append((torch.randperm(20).tolist(), np.random.rand(), random.random()))
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kept.append(iter(loader))
            for _, (x,) in zip(range(2), kept[-1], strict=False):
                model(x).sum().backward()
                optimizer.step()
            kept.append(iter(loader))
            for _ in range(2):
                model(next(kept[-1])[0]).sum().backward()
                optimizer.step()
        return drawn

    one, other = by_rank(folds)

    assert one == other


@pytest.mark.ranks(2)
def test_what_only_some_ranks_draw_does_not_make_the_next_split_differ():
    def train():
        steps(8, lambda: [torch.rand(1), np.random.rand(), random.random()] if random.random() < 0.5 else 0)
        return torch.randperm(20).tolist(), np.random.rand(), random.random()

    one, other = by_rank(train)

    assert one == other


@pytest.mark.ranks(2)
def test_actions_of_a_policy_differ_by_rank_and_so_do_those_of_rollouts_before_several_steps():
    def train():
        policy = nn.Linear(2, 3)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
        rollouts = []
        for _ in range(3):
            with torch.no_grad():
                rollouts.append([torch.distributions.Categorical(logits=policy(torch.ones(2))).sample().item() for _ in range(30)])
            for _ in range(4):
                optimizer.zero_grad()
                policy(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return rollouts

    one, other = by_rank(train)

    assert one[0] == other[0]
    assert all(mine != theirs for mine, theirs in zip(one[1:], other[1:], strict=True))


@pytest.mark.ranks(2)
def test_a_permutation_for_each_epoch_and_the_split_of_a_step_of_many_closures_are_the_same():
    def train():
        model, drawn = nn.Linear(2, 1), []
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for _ in range(5):
            drawn.append(torch.randperm(20).tolist())

            def closure():
                optimizer.zero_grad()
                loss = (model(torch.ones(1, 2)) - 1).square().sum() + model.weight.square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            drawn.append(torch.randperm(20).tolist())
            for _ in range(2):
                sgd.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                sgd.step()
        return drawn

    one, other = by_rank(train)

    assert one == other


@pytest.mark.ranks(2)
def test_a_loop_by_hand_draws_what_a_single_process_draws_if_nothing_is_drawn_for_its_steps():
    def train():
        seeded()
        drawn = []
        for fold in range(3):
            drawn.append(torch.randperm(20).tolist())
            np.random.seed(fold)
            steps(3)
            drawn.append(np.random.rand())
        return drawn

    with alone():
        expected = train()

    assert [expected] * 2 == by_rank(train)


def deep(levels, function):
    """What ``function`` returns so many calls further down."""
    return deep(levels - 1, function) if levels else function()


def time_of_draws():
    begun = time.thread_time()
    for _ in range(200):
        random.random()
    return time.thread_time() - begun


@pytest.fixture
def step_draws():
    """As after a backward by hand; gives the loop too."""
    loop = Loop()
    loop.ran_backward()
    draws = StepDraws(loop, RandomStreams(rank=1))
    with intercepting([draws]):
        yield draws, loop


def test_a_draw_that_is_no_data_costs_no_more_where_the_stack_is_deep(step_draws):
    deep(500, time_of_draws)
    ratios = [deep(500, time_of_draws) / time_of_draws() for _ in range(21)]

    assert statistics.median(ratios) < 3


def test_what_is_kept_of_draws_does_not_grow_where_no_optimizer_takes_a_step(step_draws):
    draws, loop = step_draws
    sizes = []
    for _ in range(1000):
        random.random()
        loop.ran_backward()
        sizes.append(sum(len(each) for each in vars(draws).values() if isinstance(each, (list, set, dict))))

    assert sizes[10] == sizes[-1]


@pytest.mark.parametrize("draw", [lambda: torch.randint(9, (3,)), lambda: torch.empty(3).uniform_()])
def test_a_thread_that_draws_ahead_draws_from_the_ranks_generators_however_many_steps_pass_between(step_draws, draw):
    draws, loop = step_draws
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    own, drawn = [], set()
    with ThreadPoolExecutor(1) as pool:
        for steps_between in (1, 1, 1, 1, 2, 0, 3, 1, 1):
            before = torch.get_rng_state()
            drawn.add(tuple(pool.submit(draw).result().tolist()))
            own.append(torch.equal(before, torch.get_rng_state()))
            for _ in range(steps_between):
                loop.ran_backward()
                draws.begin_step(optimizer)
                draws.end_step(optimizer)

    assert [False] * 2 + [True] * 7 == own
    assert 5 < len(drawn)


@pytest.mark.ranks(2)
def test_a_thread_that_draws_ahead_draws_different_batches_and_leaves_the_next_split_the_same():
    def train():
        queue, drawn = Queue(2), []

        def draw_ahead():
            for _ in range(40):
                time.sleep(0.002 * random.random() * parwrap.rank())
                queue.put(torch.randint(10**6, ()).item())

        thread = threading.Thread(target=draw_ahead)
        thread.start()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(40):
            drawn.append(queue.get())
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        thread.join()
        return drawn[12:], torch.randperm(30).tolist()

    (one, split), (other, same) = by_rank(train)

    assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))
    assert split == same


@pytest.mark.ranks(2)
def test_a_forward_that_draws_by_several_libraries_draws_anew_in_each_step():
    class DropsLayers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drawn = nn.Linear(2, 1), []

        def forward(self, x):
            self.drawn.append((random.random(), np.random.rand(), torch.rand(1).item(), random.random()))
            return self.layer(x)

    def train():
        model = DropsLayers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return model.drawn[1:], torch.randperm(30).tolist()

    (one, split), (other, same) = by_rank(train)

    assert 4 * 7 * 2 == len({number for each in one + other for number in each})
    assert split == same
