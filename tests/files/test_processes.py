"""What processes do to files is said once for each line of the script, on rank 0, and not of those that only read."""

import multiprocessing
import os
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import parwrap


def said(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if "rank_zero_only" in line]


@pytest.mark.ranks(2)
def test_a_command_that_may_write_is_named_once_a_line(tmp_path, capfd):
    os.chdir(tmp_path)
    with parwrap.distributed():
        for _ in range(3):
            subprocess.run(["touch", "a"], check=True)
        os.system("echo line > b")

    lines = said(capfd)
    assert (2 if parwrap.rank() == 0 else 0) == len(lines)
    for line, command in zip(lines, ("`touch a`", "`echo line > b`"), strict=False):
        assert f"{__file__}:" in line
        assert f"runs {command} on each of 2 ranks" in line


@parwrap.rank_zero_only
def guarded():
    subprocess.run(["touch", "a"], check=True)


@pytest.mark.ranks(2)
def test_commands_that_only_read_or_are_guarded_are_not(tmp_path, capfd):
    os.chdir(tmp_path)
    with parwrap.distributed():
        subprocess.check_output(["hostname"])
        subprocess.run("git rev-parse HEAD 2> /dev/null", shell=True, check=False)
        os.popen("uname -a | head -1").read()
        guarded()

    assert [] == said(capfd)


def write(number):
    with open(f"part{number}.txt", "w") as file:
        file.write("x")


class Caching(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        write(index)
        return torch.zeros(1)


@pytest.mark.ranks(2)
def test_a_pool_that_writes_is_named_and_one_that_computes_is_not(tmp_path, capfd):
    os.chdir(tmp_path)
    fork = multiprocessing.get_context("fork")
    with parwrap.distributed():
        list(DataLoader(Caching(), num_workers=1, multiprocessing_context="fork"))
        with fork.Pool(2) as pool:
            pool.map(abs, range(4))
        assert [] == said(capfd)
        with fork.Pool(2) as pool:
            pool.map(write, range(4))

    lines = said(capfd)
    assert (1 if parwrap.rank() == 0 else 0) == len(lines)
    assert all("part" in line and f"{__file__}:" in line for line in lines)
