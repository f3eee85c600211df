"""Which passes of a DALI pipeline are shared out, and what becomes of a wrong guess."""

import numpy as np
import pytest
import torch
from torch import nn

import parwrap
from parwrap.errors import RankMismatchError

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed: pip install -c constraints.txt nvidia-dali-cuda120")

from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from dali_pipelines import CPU, Setup, everyones, flat, iterator, numbers, warnings_as_texts, written


def read(iterator):
    return [batch["x"].flatten().tolist() for (batch,) in iterator]


@pytest.mark.ranks(2)
def test_evaluation_is_that_of_a_single_process():
    files = written(9)
    alone = [iterator(numbers(files), policy) for policy in LastBatchPolicy]
    with parwrap.distributed(), warnings_as_texts() as texts:
        setup = Setup()
        setup.model.eval()
        for policy, before in zip(LastBatchPolicy, alone, strict=True):
            batches = iterator(numbers(files), policy)
            for _ in range(3):
                assert read(before) == read(batches)
                assert len(before) == len(batches)

        @pipeline_def(batch_size=4, **CPU)
        def augmented():
            return fn.random.uniform(range=(0.0, 1.0)) + fn.readers.numpy(files=files, name="numbers")

        assert 1 == len({str(each) for each in parwrap.gather(read(iterator(augmented())))})

    assert [] == texts


@pytest.mark.ranks(2)
def test_what_does_not_shuffle_is_dealt_out_when_it_is_trained_on():
    files = written(10)

    @pipeline_def(batch_size=2, **CPU)
    def from_python():
        return fn.external_source(source=iter([np.array([[i], [i + 1]], dtype=np.float32) for i in range(0, 10, 2)]), name="own")

    with parwrap.distributed(), warnings_as_texts() as texts:
        setup, batches = Setup(), iterator(numbers(files))
        for _ in range(2):
            seen = setup.train(batches)

            assert [[0, 1], [4, 5], [8, 9]] == parwrap.broadcast(seen)
            assert [*range(10)] == sorted({*everyones(seen)})
            assert 3 == len(seen) == len(batches)
        with torch.no_grad():
            assert [*range(10)] == flat(read(batches))
        source = DALIGenericIterator(from_python(), ["x"])
        assert [*range(10)] == sorted({*everyones(setup.train(source))})

    assert (
        "the reader 'numbers' is read completely by every rank. Now that the loop trains on it, its batches are divided among the "
        "ranks" in texts[0]
    )
    assert "an external source is read completely by every rank" in texts[1]
    assert 2 == len(texts)


@pytest.mark.ranks(2)
def test_what_differs_between_ranks_already_is_not_dealt_out():
    first = 10 * parwrap.rank()

    @pipeline_def(batch_size=1, **CPU)
    def from_python():
        return fn.external_source(source=iter([np.array([[first + i]], dtype=np.float32) for i in range(4)]))

    with parwrap.distributed(), warnings_as_texts() as texts:
        assert [first + i for i in range(4)] == flat(Setup().train(DALIGenericIterator(from_python(), ["x"])))

    assert (
        "gives different batches on different ranks, so parwrap does not divide them: each rank trains on everything that it reads"
        in texts[0]
    )


@pytest.mark.ranks(2)
def test_wrong_guesses_are_said_and_put_right():
    files = written(8)
    with parwrap.distributed(), warnings_as_texts() as texts:
        setup = Setup()
        looked_at = iterator(numbers(files, random_shuffle=True))
        assert 4 == len(flat(read(looked_at)))
        setup.model.eval()
        trained = iterator(numbers(files))
        assert [*range(8)] == flat(setup.train(trained))
        assert 4 == len(flat(setup.train(trained)))
        setup.model.train()
        also = iterator(numbers(files))
        assert 4 == len(flat(read(also)))
        assert [*range(8)] == flat(read(also))

    assert "'numbers' was read to its end without training, and each rank saw only its share, because it shuffles" in texts[0]
    assert "'numbers' was read in eval() mode or before any optimizer was built, but the loop then trained on" in texts[1]
    assert "saw only its share. From the next pass on, every rank reads all of it" in texts[2]
    assert 3 == len(texts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "problem", ["different numbers of samples on different ranks: {'numbers': 8} on rank 0", "the same files in a different order"]
)
def test_files_that_differ_between_ranks(problem):
    files = written(8)[:: 1 - 2 * parwrap.rank()] if "order" in problem else written(8 + parwrap.rank())
    with pytest.raises(RankMismatchError, match=problem), parwrap.distributed():
        Setup().train(iterator(numbers(files, random_shuffle=True)))


@pytest.mark.ranks(2)
def test_a_global_batch_is_that_of_all_ranks_together():
    files = written(12)
    with parwrap.distributed(batch="global"):
        seen = Setup().train(iterator(numbers(files, batch_size=6, random_shuffle=True)))

        assert [3, 3] == [len(batch) for batch in seen]
        assert [*range(12)] == everyones(seen)


def test_windows_end_with_a_pass():
    weight = nn.Parameter(torch.zeros(1))
    batches = iterator(numbers(written(6)))
    with parwrap.accumulate(2):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for ((batch),) in batches:
            optimizer.zero_grad()
            (weight * batch["x"]).mean().backward()
            optimizer.step()

        assert -(0.5 + 2.5) / 2 - 4.5 == weight.item()
