"""A run directory that each rank names by itself, by the time or a random number: each rank reads back what it wrote there."""

import json
import os
import tempfile
import time
import uuid

import pytest
import torch

import parwrap


def train(names):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in names:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for name in names:
            torch.save({"step": step, "weight": model.weight}, f"{name}.pt")
            with open(f"{name}.json", "w") as file:
                json.dump(step, file)
    for name in names:
        checkpoint = torch.load(f"{name}.pt")

        assert 2 == checkpoint["step"] == json.load(open(f"{name}.json"))
        assert torch.equal(model.weight, checkpoint["weight"])


@pytest.mark.ranks(3)
def test_what_a_rank_wrote_under_a_name_of_its_own_it_reads_back(tmp_path):
    os.chdir(tmp_path)
    names = [f"runs/{uuid.uuid4()}/best", f"runs/{time.time_ns()}-{os.getpid()}/best", f"{tempfile.mkdtemp()}/best", f"best-{uuid.uuid4()}"]
    parwrap.distributed(timeout=30)(train)(names)
    parwrap.barrier()

    assert 2 == len(os.listdir("runs")), "those of rank 0"
    assert 2 == len([name for name in os.listdir() if name.startswith("best-")])


@pytest.mark.ranks(2)
def test_a_file_replaced_by_a_temporary_one_is_found_at_once(tmp_path):
    os.chdir(tmp_path)
    longest = 0.0
    with parwrap.distributed():
        for number in range(5):
            with tempfile.NamedTemporaryFile("w", delete=False, dir=".") as file:
                file.write(str(number))
            os.replace(file.name, "state.txt")
            begin = time.monotonic()
            os.path.getmtime("state.txt")
            longest = max(longest, time.monotonic() - begin)

            assert str(number) == open("state.txt").read()
            parwrap.barrier()

    assert longest < 0.4
