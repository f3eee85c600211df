"""What each rank reads of a DALI pipeline: the real package, on the CPU, against DALI alone and torch's ``DistributedSampler``."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.errors import RankMismatchError, UsageError

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed: pip install nvidia-dali-cuda120")

from nvidia.dali import fn, ops, pipeline_def
from nvidia.dali import pipeline as pipelines
from nvidia.dali.plugin import base_iterator
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from dali_pipelines import CPU, DROP, FILL, PARTIAL, Setup, everyones, flat, iterator, numbers, read, written


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", LastBatchPolicy, ids=lambda policy: policy.name)
@pytest.mark.parametrize("shuffling", ["random_shuffle", "shuffle_after_epoch"])
def test_a_reader_that_shuffles_gets_a_shard_on_each_rank(shuffling, policy):
    """Every sample is read in each epoch, by as many batches on each rank as torch's sampler gives."""
    count, files = 9, written(9)  # shards of 4 and 5 samples: only one rank would have a third batch
    sampler = DistributedSampler(range(count), 2, parwrap.rank())
    sizes = [len(batch) for batch in DataLoader(range(count), 2, sampler=sampler, drop_last=policy == DROP)]
    with parwrap.distributed():
        setup, batches = Setup(), iterator(numbers(files, **{shuffling: True}), policy)
        for _ in range(3):
            seen = setup.train(batches)
            samples = everyones(seen)

            assert ([2] * len(sizes) if policy == FILL else sizes) == [len(batch) for batch in seen]
            assert len(batches) == len(seen)
            if policy == PARTIAL:
                assert math.ceil(count / 2) * 2 - count == len(samples) - len(set(samples))
            if policy != DROP:
                assert set(range(count)) == set(samples)


@pytest.mark.ranks(2)
def test_a_size_without_a_reader_name_is_that_of_all_ranks():
    files = written(7)
    with warnings.catch_warnings(), parwrap.distributed():
        warnings.simplefilter("ignore")  # DALI would rather have reader_name=
        seen = Setup().train(iterator(numbers(files, random_shuffle=True), size=7))

        assert ([2, 2], set(range(7))) == ([len(batch) for batch in seen], set(everyones(seen)))


@pytest.mark.ranks(2)
def test_shards_of_the_script_stay_and_those_of_one_process_are_replaced():
    files = written(10)
    with parwrap.distributed():
        setup = Setup()
        own = iterator(numbers(files, num_shards=5, shard_id=3 - parwrap.rank(), random_shuffle=True))
        assert {3 - parwrap.rank()} == {meta["shard_id"] for meta in own._pipes[0].reader_meta().values()}
        assert 1 == len(setup.train(own))

        single = iterator(numbers(files, num_shards=1, shard_id=0, random_shuffle=True))
        assert set(range(10)) == set(everyones(setup.train(single)))


@pytest.mark.ranks(2, fresh=True)  # DALI warns by logging
def test_evaluation_is_that_of_one_process():
    files = written(9)
    alone = [iterator(numbers(files), policy) for policy in LastBatchPolicy]
    with parwrap.distributed():
        setup = Setup()
        setup.model.eval()
        for policy, before in zip(LastBatchPolicy, alone, strict=True):
            batches = iterator(numbers(files), policy)

            for _ in range(2):
                assert read(before) == read(batches)
                assert len(before) == len(batches)


@pytest.mark.ranks(2)
def test_a_reader_in_order_is_dealt_where_it_trains():
    files = written(10)
    with parwrap.distributed():
        setup, batches = Setup(), iterator(numbers(files))
        for _ in range(2):
            seen = setup.train(batches)

            assert [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]][parwrap.rank()] == seen
            assert 3 == len(seen) == len(batches)
        with torch.no_grad():
            assert [*range(10)] == flat(read(batches))


@pytest.mark.ranks(2)
def test_an_external_source_is_the_scripts_own():
    first = 10 * parwrap.rank()

    @pipeline_def(batch_size=1, **CPU)
    def from_python():
        return fn.external_source(source=iter([np.array([[first + i]], dtype=np.float32) for i in range(4)]))

    with parwrap.distributed():
        assert [first + i for i in range(4)] == flat(Setup().train(DALIGenericIterator(from_python(), ["x"])))


@pytest.mark.ranks(2)
def test_augmentation_differs_by_rank_and_a_seed_gives_the_same_run_again():
    files = written(8)

    @pipeline_def(batch_size=2, **CPU)
    def augmented(given=None):
        return fn.random.uniform(range=(0.0, 1.0)) + 0 * fn.readers.numpy(files=files, name="numbers", random_shuffle=True)

    def run(**options):
        with parwrap.distributed(seed=3):
            setup, batches = Setup(), iterator(augmented(**options))
            return [setup.train(batches) for _ in range(2)]

    for options in ({}, {"seed": 5}):
        first = run(**options)

        assert first == run(**options)
        assert 2 == len({str(each) for each in parwrap.gather(first)})


@pytest.mark.ranks(2)
def test_a_global_batch_is_that_of_all_ranks():
    files = written(8)
    with parwrap.distributed(batch="global"):
        seen = Setup().train(iterator(numbers(files, batch_size=4, random_shuffle=True)))

        assert ([2, 2], [*range(8)]) == ([len(batch) for batch in seen], everyones(seen))
        with pytest.raises(UsageError, match=r"batches of 3, which batch=\"global\" cannot divide evenly among 2 ranks. .* of 2\."):
            iterator(numbers(files, batch_size=3, random_shuffle=True))


@pytest.mark.ranks(2)
def test_ranks_that_find_different_files():
    files = written(8 + parwrap.rank())
    with pytest.raises(RankMismatchError, match=r"Make the dataset and its split before the loop"), parwrap.distributed():
        Setup().train(iterator(numbers(files, random_shuffle=True)))


@pytest.mark.ranks(2)
def test_a_share_that_nothing_trains_on_is_named():
    files = written(8)
    with parwrap.distributed():
        setup = Setup()
        with pytest.warns(UserWarning, match=r"no backward followed: .* remove num_shards=, random_shuffle= and shuffle_after_epoch="):
            assert 4 == len(flat(read(iterator(numbers(files, random_shuffle=True)))))
        with pytest.warns(UserWarning, match=r"no backward followed: .* wrap the loop in torch\.no_grad\(\)"):
            assert 4 == len(flat(read(iterator(numbers(files)))))
        setup.train(iterator(numbers(files)))


def patched():
    """What is patched of DALI, by identity: what stands for a function is equal to it."""
    owners = (ops._OperatorInstance, pipelines.Pipeline, base_iterator._DaliBaseIterator)
    return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]


@pytest.mark.ranks(2)
def test_everything_is_put_back():
    before, files = patched(), written(4)
    with parwrap.distributed():
        batches = iterator(numbers(files, random_shuffle=True, seed=7))
        Setup().train(batches)

        assert before != patched()
        assert 7 == batches._pipes[0].seed
        assert "reader_meta" not in vars(batches._pipes[0])

    assert before == patched()


SCRIPT = """
import sys
import torch
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

@pipeline_def(batch_size=4, num_threads=1, device_id=None)
def numbers(training):
    return fn.readers.numpy(file_root=sys.argv[1], random_shuffle=training, name="Reader")

def batches(training):
    return DALIGenericIterator(
        numbers(training), ["x"], reader_name="Reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True)

train_loader, val_loader = batches(True), batches(False)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(2):
    model.train()
    steps = 0
    for data in train_loader:
        x = data[0]["x"]
        loss = (model(x) - 2 * x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        total = sum(data[0]["x"].sum().item() for data in val_loader)
    print("steps", steps, len(train_loader), "total", total)
"""


def test_a_plain_script(tmp_path):
    folder = Path(written(18)[0]).parent
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", "train.py", str(folder)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert run.returncode == 0, run.stderr
    assert ["steps 3 3 total 153.0"] * 2 == run.stdout.splitlines()
    assert "read 9 of 18 samples on each of 2 ranks" in run.stderr
