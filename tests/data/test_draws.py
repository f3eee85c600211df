"""Rule 4: who draws the same random numbers, and who draws others."""

from __future__ import annotations

import multiprocessing
import random
import secrets
import tempfile
import threading
import uuid
import warnings
from random import Random

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

import parwrap
from parwrap.loop.random_streams import seed_all
from training import Training, everyones, samples


def draws():
    """A number of each library."""
    return torch.rand(1).item(), np.random.rand(), random.random()


def same(values):
    """For each of ``values``, whether all ranks have the same."""
    return [1 == len(set(each)) for each in zip(*parwrap.gather(values), strict=True)]


def in_order():
    return DataLoader(range(8), batch_size=2)


@pytest.mark.ranks(2)
def test_outside_training_passes_all_ranks_draw_the_same():
    with parwrap.distributed():
        training = Training()
        before, split = draws(), random_split(range(10), [5, 5])[0].indices
        generator = np.random.default_rng().integers(2**60)
        training.train(in_order())
        after = draws()
        with torch.no_grad():
            evaluating = [draws() for _ in in_order()]

        assert [True] * 3 == same(before) == same(after) == same(evaluating[0])
        assert [True] * 6 == same([*split, generator])


@pytest.mark.ranks(2)
def test_in_a_training_pass_torch_and_numpy_are_the_ranks_own_and_pythons_random_is_everyones():
    with parwrap.distributed():
        training = Training()
        drawn = [draws() for _ in in_order() if not training.step()]

        assert [[False, False, True]] * 2 == [same(each) for each in drawn]
        assert len(drawn) == len(set(drawn))


@pytest.mark.ranks(2)
def test_a_decision_from_torch_or_numpy_is_drawn_in_same_draws():
    with parwrap.distributed():
        training, drawn = Training(), []
        for _ in in_order():
            training.step()
            with parwrap.same_draws():
                drawn.append(draws())
                with parwrap.same_draws():
                    drawn.append(draws())
                drawn.append(draws())
            own = draws()

        assert [[True] * 3] * 6 == [same(each) for each in drawn]
        assert [False, False, True] == same(own)


@pytest.mark.ranks(2)
def test_same_draws_goes_on_where_the_shared_stream_was():
    with parwrap.distributed(seed=5):
        training = Training()
        expected = torch.Generator()
        expected.set_state(torch.get_rng_state())
        torch.empty((), dtype=torch.int64).random_(generator=expected)  # the workers' seed
        for _ in in_order():
            torch.rand(3)
            with parwrap.same_draws():
                drawn = torch.rand(1)
            break
        training.step()

    assert torch.rand(1, generator=expected) == drawn


def test_same_draws_outside_of_a_scope_changes_nothing():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with parwrap.same_draws():
        assert expected == torch.rand(1)


@pytest.mark.ranks(2)
def test_own_streams_are_seeded_with_the_shared_seed_plus_the_rank():
    with parwrap.distributed(seed=5):
        training = Training()
        for _ in in_order():
            training.step()
            drawn = draws()
            break
    generator = torch.Generator().manual_seed(5 + parwrap.rank())

    assert torch.rand(1, generator=generator).item() == drawn[0]
    assert np.random.RandomState(5 + parwrap.rank()).rand() == drawn[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["torch", "numpy", "python"])
def test_a_script_that_seeds_again_in_a_pass_reseeds_both_sets(library):
    position = ("torch", "numpy", "python").index(library)
    with parwrap.distributed():
        training, inside, outside = Training(), [], []
        for _ in range(2):
            for _ in in_order():
                training.step()
                (torch.manual_seed(7), np.random.seed(7), random.seed(7))
                inside.append(draws()[position])
                break
            outside.append(draws()[position])
            training.train(in_order())

        assert 1 == len(set(inside)) == len(set(outside))
        assert [library == "python", True] == same([inside[0], outside[0]])


@pytest.mark.ranks(2)
def test_a_fork_of_torchs_stream_is_put_back_in_a_pass():
    with parwrap.distributed():
        training, drawn, previews = Training(), [], []
        for _ in in_order():
            training.step()
            with torch.random.fork_rng():
                torch.manual_seed(7)
                previews.append(torch.rand(1).item())
            drawn.append(torch.rand(1).item())

        assert [False, False] == same(drawn)
    assert 2 == len(set(drawn))
    assert 1 == len(set(previews))


@pytest.mark.ranks(2)
def test_a_fork_of_torchs_stream_outside_is_put_back_too():
    with parwrap.distributed(seed=3):
        training, drawn = Training(), []
        for _ in range(3):
            training.train(in_order())
            with torch.random.fork_rng():
                torch.manual_seed(7)
                torch.rand(1)
            drawn.append(torch.rand(1).item())

        assert [True] * 3 == same(drawn)
    assert 3 == len(set(drawn))


@pytest.mark.ranks(2)
def test_a_generator_without_a_seed_draws_as_torch_does_and_one_with_a_seed_is_the_scripts():
    with parwrap.distributed():
        training = Training()
        generators = [np.random.default_rng()]
        generators += [np.random.default_rng() for _ in in_order() if not training.step()]

        assert [True, False, False] == same([each.integers(2**60) for each in generators])
        assert np.random.default_rng(3).integers(2**60) == np.random.default_rng(seed=3).integers(2**60)


class Derived(random.Random):
    pass


def reseeded(seed, draw):
    def drawn():
        seed()
        return draw()

    return drawn


UNSEEDED = {
    "RandomState": lambda: np.random.RandomState().randint(2**31),
    "RandomState(None)": lambda: RandomState(None).randint(2**31),
    "SeedSequence": lambda: int(np.random.SeedSequence().generate_state(1)[0]),
    **{kind: lambda kind=kind: getattr(np.random, kind)().random_raw() for kind in ("PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM")},
    "default_rng": lambda: np.random.default_rng().integers(2**60),
    "Random": lambda: Random().getrandbits(60),
    "class derived from Random": lambda: Derived().getrandbits(60),
    "seed of a RandomState": lambda: reseeded((generator := RandomState(3)).seed, lambda: generator.randint(2**31))(),
    "seed of a Random": lambda: reseeded((generator := Random(3)).seed, lambda: generator.getrandbits(60))(),
    "random.seed(None)": reseeded(lambda: random.seed(None), lambda: random.getrandbits(60)),
    "np.random.seed": reseeded(lambda: np.random.seed(), lambda: np.random.randint(2**31)),
    "torch.seed": reseeded(lambda: torch.seed(), lambda: torch.randint(2**60, (1,)).item()),
    "random.seed": reseeded(lambda: random.seed(), lambda: random.getrandbits(60)),
}


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.ranks(3)
def test_ranks_that_draw_from_python_for_each_token_of_their_part_draw_alike_after_the_backward(strategy):
    with parwrap.distributed(seed=0, strategy=strategy):
        training, drawn = Training(), []
        for _ in range(2):
            order = random.sample(range(12), 12)
            for x in DataLoader(range(12), 1, sampler=order):
                for _ in range(int(x)):
                    random.random()
                training.step()
                drawn.append(random.random())
            drawn.append(sum(order[:6]))
            drawn.append(random.random())
        assert [True] * 12 == same(drawn)


@pytest.mark.ranks(2)
def test_so_do_ranks_that_begin_to_draw_late_in_a_pass():
    with parwrap.distributed(seed=0):
        training, drawn = Training(), []
        for _ in range(2):
            for step, x in enumerate(DataLoader(range(60), 1, sampler=random.sample(range(60), 60))):
                for _ in range(int(x) if step > 20 else 0):
                    random.random()
                training.step()
            drawn.append(random.random())
        assert [True] * 2 == same(drawn)


@pytest.mark.ranks(3)
def test_so_do_ranks_that_ask_for_one_batch_of_a_new_iterator():
    with parwrap.distributed(seed=0):
        training, drawn, loader = Training(), [], DataLoader(range(12), 1, shuffle=True)
        for _ in range(4):
            for _ in range(int(next(iter(loader)))):
                random.random()
            training.step()
            drawn.append(random.random())
        assert [True] * 4 == same(drawn)


@pytest.mark.parametrize("kind", UNSEEDED)
@pytest.mark.ranks(2)
def test_what_seeds_itself_draws_alike_outside_training_passes_and_each_ranks_own_inside(kind):
    draw = UNSEEDED[kind]
    with parwrap.distributed():
        training = Training()
        if parwrap.rank() == 1:
            np.random.RandomState(), Random()  # what one rank makes at another line counts for nothing
        outside = [draw() for _ in range(3)]
        inside = [draw() for _ in DataLoader(range(4), 2, shuffle=True) if not training.step()]
        later = draw()
        shared = torch.rand(1).item(), np.random.rand(), random.random()
        assert [True] * 7 == same([*outside, later, *shared])
        assert [kind.startswith("random.") or kind.endswith("Random")] == same(inside[:1])  # Python's own stream is shared there too
        assert 4 == len({*outside, later})


@pytest.mark.ranks(2)
def test_what_seeds_itself_moves_no_stream_and_secrets_stay_each_ranks():
    with parwrap.distributed(seed=3):
        np.random.RandomState(), np.random.PCG64(), Random()
        drawn = draws()
        secret = secrets.randbits(60), uuid.uuid4().hex, random.SystemRandom().getrandbits(60), tempfile.mktemp()
        assert [False] * 4 == same(secret)
    seed_all(3)

    assert drawn == draws()


@pytest.mark.ranks(2)
def test_processes_of_a_pool_seed_their_generators_from_the_system():
    with parwrap.distributed(), multiprocessing.get_context("fork").Pool(2) as pool:
        numbers = pool.map(drawn_in_a_pool, range(4), chunksize=1)

    assert 4 == len(set(numbers))


def drawn_in_a_pool(number):
    return np.random.RandomState().randint(2**31), Random().getrandbits(60)


@pytest.mark.ranks(2)
def test_what_seeds_itself_in_a_worker_of_a_loader_differs_from_worker_to_worker():
    class Drawn(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor(np.random.RandomState().randint(2**31))

    with parwrap.distributed():
        with torch.no_grad():
            evaluated = torch.cat(list(DataLoader(Drawn(), 1, num_workers=2))).tolist()

        assert [True] * 4 == same(evaluated)
        assert 4 == len(set(evaluated))


@pytest.mark.ranks(2)
def test_generators_are_the_librarys_again():
    from numpy.random import bit_generator

    before = bit_generator.randbits, random.Random.seed, random.seed, torch.seed, torch.random.seed, np.random.seed
    with parwrap.distributed():
        assert bit_generator.randbits is not before[0]
        assert before[0] is secrets.randbits

    assert before == (bit_generator.randbits, random.Random.seed, random.seed, torch.seed, torch.random.seed, np.random.seed)


@pytest.mark.ranks(2)
def test_a_generator_without_a_seed_leaves_torchs_draws_those_of_one_process():
    with parwrap.distributed():
        torch.manual_seed(3)
        numbers = [np.random.default_rng().integers(2**60) for _ in range(2)]
        drawn = torch.rand(1)

    assert torch.equal(torch.rand(1, generator=torch.Generator().manual_seed(3)), drawn)
    assert (2, [True, True]) == (len(set(numbers)), same(numbers))


@pytest.mark.ranks(2)
def test_draws_per_rank_are_each_ranks_from_the_first_backward_on():
    with parwrap.distributed(draws="per_rank"):
        training = Training()
        before = draws()
        training.step()
        after = draws()

        assert [True] * 3 == same(before)
        assert [False] * 3 == same(after)
        with parwrap.same_draws():
            decided = draws()
        assert [True] * 3 == same(decided)


@pytest.mark.ranks(2)
def test_draws_per_rank_of_an_inner_function_begin_with_its_own_first_backward_and_end_with_it():
    @parwrap.distributed(draws="per_rank")
    def inner():
        before, training = draws(), Training()
        training.step()
        return before, draws()

    with parwrap.distributed():
        for _ in range(2):
            before, inside = inner()

            assert [True] * 3 == same(before)
            assert [False] * 3 == same(inside)
            assert [True] * 3 == same(draws())
    with parwrap.distributed(draws="per_rank"):
        Training().step()
        with parwrap.distributed(draws="by_pass"):
            Training().step()
            inside = draws()

        assert [True] * 3 == same(inside)
        assert [False] * 3 == same(draws())


@pytest.mark.ranks(2)
def test_a_loop_without_a_loader_does_the_same_work_on_every_rank_which_is_said_once(capsys):
    with parwrap.distributed():
        training = Training()
        x = torch.randn(16, 1)
        for _ in range(5):
            training.step(x[torch.randint(16, (4,))])
    said = [line for line in capsys.readouterr().err.splitlines() if "all ranks compute the same losses" in line]

    assert (1 if parwrap.is_rank_zero() else 0) == len(said)
    assert all('draws="per_rank" (--draws per-rank) gives each rank random batches of its own' in line for line in said)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scope", ["with", "function"])
def test_after_the_scope_the_streams_are_the_shared_ones(scope):
    def run():
        training = Training()
        for _ in in_order():
            training.step()
            break

    if scope == "function":
        parwrap.distributed(run)()
    else:
        with parwrap.distributed():
            run()

    assert [True] * 3 == same(draws())


@pytest.mark.ranks(2)
def test_a_run_repeats_after_the_same_seed():
    def noise():
        training = Training()
        drawn = [draws() for _ in DataLoader(range(8), batch_size=2, shuffle=True) if not training.step()]
        return drawn, draws(), [p.tolist() for p in training.model.parameters()]

    first, second = (parwrap.distributed(seed=1)(noise)() for _ in range(2))

    assert first == second


@pytest.mark.ranks(2)
def test_a_first_batch_for_every_step_draws_as_in_a_training_pass_from_its_second_step_on():
    """Not in the first: it may be a look at the data, and a model may be built after it."""
    with parwrap.distributed():
        training, loader, drawn = Training(), DataLoader(range(8), batch_size=2, shuffle=True), []
        for _ in range(3):
            training.step(next(iter(loader)))
            drawn.append(draws())

        assert [[True] * 3, [False, False, True], [False, False, True]] == [same(each) for each in drawn]
        with torch.no_grad():
            next(iter(in_order()))
        assert [True] * 3 == same(draws())


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_model_built_after_a_look_at_a_batch_is_the_same_on_all_ranks():
    with parwrap.distributed():
        for _ in range(2):
            loader = in_order()
            next(iter(loader))
            training = Training()

            assert [True] * 2 == same(training.model[0].weight.flatten().tolist())
            training.train(loader)


# samples


class Noise(Dataset):
    """Draws from each library for each sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return noise()


class NoiseStream(IterableDataset):
    def __iter__(self):
        return (noise() for _ in range(8))


def noise():
    return torch.tensor([torch.randint(2**60, ()).item(), int(np.random.rand() * 2**60), random.getrandbits(60)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=["0", "1", "persistent"])
@pytest.mark.parametrize("generator", [False, True])
def test_augmentation_is_each_ranks_whatever_it_draws_from(options, generator):
    with parwrap.distributed(seed=0):
        training = Training()
        own = {"generator": torch.Generator().manual_seed(1)} if generator else {}
        loader = DataLoader(Noise(), batch_size=2, **options, **own)
        seen = everyones(training.train(loader) + training.train(loader))

        assert 3 * 16 == len(seen) == len(set(seen))
        del loader


@pytest.mark.ranks(2)
def test_augmentation_repeats_after_the_same_seed():
    def read():
        training = Training()
        loader = DataLoader(Noise(), batch_size=2, num_workers=1, shuffle=True)
        return [training.train(loader) for _ in range(2)]

    first, second = (parwrap.distributed(seed=7)(read)() for _ in range(2))

    assert first == second


class ByCoin(torch.utils.data.Sampler):
    """Draws for every batch."""

    def __iter__(self):
        for _ in range(4):
            yield torch.randint(8, (2,)).tolist()

    def __len__(self):
        return 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{"batch_size": 2, "shuffle": True}, {"batch_sampler": ByCoin()}], ids=["shuffled", "batches by coin"])
def test_a_replicated_loader_is_read_in_the_order_of_one_process_in_training(options, workers):
    def orders():
        torch.manual_seed(3)
        training, loader = Training(), parwrap.replicate(DataLoader(range(8), num_workers=workers, **options))
        return [training.train(loader) for _ in range(2)]

    expected = orders()
    with parwrap.distributed():
        replicated = orders()

    assert expected[0] == replicated[0]
    assert 1 == len({str(each) for each in parwrap.gather(replicated)})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_validation_samples_are_the_same_on_all_ranks(workers):
    with parwrap.distributed(seed=0):
        training, loader = Training(), DataLoader(Noise(), batch_size=2, num_workers=workers, shuffle=True)
        validated = []
        for _ in in_order():
            training.step()
            with torch.no_grad():
                validated += [sample for batch in loader for sample in samples(batch)]

        assert [True] * 3 * 16 == same(validated)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_all_ranks_draw_alike_while_they_read_a_stream(workers):
    with parwrap.distributed(seed=0):
        training, loader = Training(), DataLoader(NoiseStream(), batch_size=2, num_workers=workers)
        epochs = [everyones(training.train(loader)) for _ in range(2)]

    assert [24, 24] == [len(set(each)) for each in epochs]
    assert not set(epochs[0]) & set(epochs[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_replicated_loader_augments_by_rank_in_training(workers):
    with parwrap.distributed(seed=0):
        training, loader = Training(), parwrap.replicate(DataLoader(Noise(), batch_size=2, num_workers=workers))
        seen = everyones(training.train(loader))
        del loader

    assert 3 * 16 == len(set(seen))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_validation_samples_are_those_of_one_process(workers, shuffle):
    def validated():
        Training()
        with torch.no_grad():
            return [samples(batch) for batch in DataLoader(Noise(), batch_size=2, num_workers=workers, shuffle=shuffle)]

    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    expected = validated()
    with parwrap.distributed(seed=7):
        assert expected == validated()


@pytest.mark.ranks(2)
def test_a_sampler_may_have_a_generator_of_numpy():
    class Permuted(torch.utils.data.Sampler):
        generator = np.random.default_rng(0)

        def __len__(self):
            return 16

        def __iter__(self):
            return iter(self.generator.permutation(16).tolist())

    with parwrap.distributed():
        training = Training()
        assert list(range(16)) == everyones(training.train(DataLoader(range(16), batch_size=2, sampler=Permuted())))


@pytest.mark.ranks(2)
def test_samplers_that_draw_from_numpy_or_python_draw_alike():
    class Tasks(torch.utils.data.Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            for _ in range(4):
                yield [np.random.randint(4), 4 + random.randrange(4)]

    with parwrap.distributed(seed=0):
        training = Training()
        seen = parwrap.gather(training.train(DataLoader(range(8), batch_sampler=Tasks())))
        drawn = parwrap.gather(torch.rand(1).item())
    np.random.seed(0), random.seed(0)
    Training()
    expected = [[np.random.randint(4), 4 + random.randrange(4)] for _ in range(4)]

    assert [expected[0] + expected[2], expected[1] + expected[3]] == seen
    assert 1 == len(set(drawn))


@pytest.mark.ranks(2)
def test_dropout_differs_between_ranks_and_initial_weights_do_not():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = nn.Sequential(nn.Linear(1, 32), nn.Dropout(), nn.Linear(32, 1))
        weights = model[0].weight.flatten().tolist()
        zeros = []
        model[1].register_forward_hook(lambda module, args, output: zeros.append(output.eq(0).tolist()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        assert [True] * 32 == same(weights)
        assert 4 == len({str(each) for every in parwrap.gather(zeros) for each in every})


@pytest.mark.ranks(2)
def test_a_pass_that_another_thread_trains_on_leaves_the_same_draws():
    with parwrap.distributed():
        training, inside = Training(), []

        def train():
            for _ in in_order():
                training.step()
                inside.append(draws())

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        after = draws()
        with torch.no_grad():
            evaluating = [draws() for _ in in_order()]
        training.train(in_order())

        assert [False, False, True] == same(inside[-1])
        assert [True] * 3 == same(after) == same(evaluating[0]) == same(draws())
