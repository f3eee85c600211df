"""What each rank gets to see of a DALI pipeline, with the real package, on real ranks, on the CPU."""

import math
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import parwrap

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed: pip install -c constraints.txt nvidia-dali-cuda120")

from nvidia.dali import fn, ops, pipeline_def
from nvidia.dali import pipeline as pipelines
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.plugin import base_iterator
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

from dali_pipelines import CPU, DROP, FILL, PARTIAL, Setup, everyones, iterator, numbers, warnings_as_texts, written


def check_shared_out(count, batch_size):
    """Every sample is read in each epoch, by as many batches on each rank as torch's DistributedSampler would give."""
    files, size = written(count), parwrap.world_size()
    with parwrap.distributed():
        setup = Setup()
        for shuffling in ({"random_shuffle": True}, {"random_shuffle": True, "stick_to_shard": True}, {"shuffle_after_epoch": True}):
            for policy in LastBatchPolicy:
                batches = iterator(numbers(files, batch_size, **shuffling), policy)
                sampler = DistributedSampler(range(count), size, parwrap.rank())
                sizes = [len(batch) for batch in DataLoader(range(count), batch_size, sampler=sampler, drop_last=policy == DROP)]
                for _ in range(3):
                    seen = setup.train(batches)
                    if policy == FILL:
                        sizes = [batch_size] * len(sizes)
                    samples = everyones(seen)

                    assert sizes == [len(batch) for batch in seen]
                    assert len(batches) == len(seen)
                    if policy == PARTIAL:
                        assert math.ceil(count / size) * size - count == len(samples) - len(set(samples))
                    if policy != DROP:
                        assert set(range(count)) == set(samples)
                    else:
                        assert len(samples) - len(set(samples)) < size


@pytest.mark.ranks(2)
def test_a_reader_that_shuffles_is_shared_out():
    check_shared_out(count=9, batch_size=2)  # 4 and 5 samples, of which only one rank would have a third batch


@pytest.mark.ranks(3)
def test_a_reader_that_shuffles_is_shared_out_among_three():
    check_shared_out(count=11, batch_size=2)


class OldStyle(Pipeline):
    def __init__(self, folder):
        super().__init__(batch_size=3, **CPU)
        self.read = ops.readers.File(file_root=folder, file_filters=["*.npy"], random_shuffle=True)

    def define_graph(self):
        raw, label = self.read(name="numbers")
        return raw, label


@pytest.mark.ranks(2)
def test_other_ways_to_write_a_pipeline():
    files = written(8)
    for number, file in enumerate(files):
        Path(file).parent.joinpath(f"class{number}").mkdir()
        Path(file).rename(Path(file).parent / f"class{number}" / "a.npy")
    folder = str(Path(files[0]).parent)
    with parwrap.distributed():
        setup = Setup()
        classes = DALIClassificationIterator(OldStyle(folder), reader_name="numbers", auto_reset=True)
        assert set(range(8)) == set(everyones(setup.train(classes, "label")))

        files = written(7)
        # as of a script that has found no launcher
        single = iterator(numbers(files, num_shards=1, shard_id=0, random_shuffle=True))
        assert set(range(7)) == set(everyones(setup.train(single)))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DALI would rather have reader_name=
            for policy in (PARTIAL, FILL):
                by_size = iterator(numbers(files, random_shuffle=True), policy, size=7)
                for _ in range(2):
                    seen = setup.train(by_size)

                    assert [2, 2] == [len(batch) for batch in seen]
                    assert set(range(7)) == set(everyones(seen))

        with numbers(files) as pipeline:
            inside = fn.readers.numpy(files=files, name="numbers", random_shuffle=True)
            pipeline.set_outputs(inside + 0)
        assert set(range(7)) == set(everyones(setup.train(iterator(pipeline))))


@pytest.mark.ranks(2)
def test_the_users_own_shards_are_left_alone():
    files = written(10)
    with parwrap.distributed(), warnings_as_texts() as texts:
        setup = Setup()
        own = iterator(numbers(files, num_shards=5, shard_id=3 - parwrap.rank(), random_shuffle=True, pad_last_batch=False))
        both = [numbers(files, num_shards=2, shard_id=number, random_shuffle=True, pad_last_batch=True) for number in range(2)]
        assert [{"num": 5, "id": 3 - parwrap.rank()}] == [
            {"num": meta["number_of_shards"], "id": meta["shard_id"]} for meta in own._pipes[0].reader_meta().values()
        ]
        assert 1 == len(setup.train(own))
        both = iterator(both)
        with torch.no_grad():
            for _ in range(2):
                assert list(range(10)) == sorted(n for batch in both for part in batch for n in part["x"].flatten().tolist())

    assert [] == texts


@pytest.mark.ranks(2)
def test_augmentation_differs_by_rank_and_a_seed_gives_the_same_run_again():
    files = written(8)

    @pipeline_def(batch_size=2, **CPU)
    def augmented(given=None):
        numbers = fn.readers.numpy(files=files, name="numbers", random_shuffle=True)
        return fn.random.uniform(range=(0.0, 1.0)) + 0 * numbers

    def run(**options):
        with parwrap.distributed(seed=3):
            setup, batches = Setup(), iterator(augmented(**options))
            return [setup.train(batches) for _ in range(2)]

    for options in ({}, {"seed": 5}):
        first = run(**options)

        assert first == run(**options)
        assert 2 == len({str(each) for each in parwrap.gather(first)})


def installed():
    """What is patched of DALI, by identity: what stands for a function is equal to it."""
    owners = (ops._OperatorInstance, pipelines.Pipeline, base_iterator._DaliBaseIterator)
    return [{name: id(value) for name, value in vars(owner).items()} for owner in owners], list(sys.meta_path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails):
    before = installed()
    files = written(4)
    with pytest.raises(KeyError) if fails else nullcontext(), parwrap.amp(), parwrap.distributed(), parwrap.accumulate(2):
        batches = iterator(numbers(files, random_shuffle=True, seed=7))
        Setup().train(batches)

        assert before != installed()
        assert 7 == batches._pipes[0].seed
        assert "reader_meta" not in vars(batches._pipes[0])
        if fails:
            raise KeyError

    assert before == installed()


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

    assert 0 == run.returncode, run.stderr
    assert ["steps 3 3 total 153.0"] * 2 == run.stdout.splitlines()
    assert "batch 4 per rank, 8 global, learning rate unchanged, 18 samples / 2 ranks" in run.stderr
    assert "parwrap: a DALI" not in run.stderr
