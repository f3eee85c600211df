import io
import logging
import os
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from tqdm import tqdm

import parwrap


def heard(speak):
    """What each rank writes to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), parwrap.distributed():
        speak()
    return parwrap.gather((out.getvalue(), err.getvalue()))


@pytest.mark.ranks(2)
def test_rank_zero_prints_and_force_lets_everybody():
    def speak():
        print("hello")
        print("it is", parwrap.rank(), force=True)
        print("beside", parwrap.rank(), force=True, file=sys.stderr)
        sys.stdout.write("written\n")

    assert [("hello\nit is 0\nwritten\n", "beside 0\n"), ("it is 1\n", "beside 1\n")] == heard(speak)


@pytest.mark.ranks(2)
def test_bars_warnings_and_loggers_are_rank_zeros():
    def speak():
        list(tqdm(range(3)))
        warnings.warn("careful", stacklevel=1)
        handler = logging.StreamHandler()
        logging.getLogger("train").addHandler(handler)
        logging.getLogger("train").warning("epoch")

    (_, first), other = heard(speak)

    assert all(word in first for word in ("3/3", "careful", "epoch"))
    assert ("", "") == other


@pytest.mark.ranks(2)
def test_errors_are_heard_from_every_rank_with_its_number():
    def speak():
        if parwrap.rank() == 1:
            logging.getLogger("train").error("lost %s", "it")

    assert [("", ""), ("", "[rank 1] ERROR:train:lost it\n")] == heard(speak)


@pytest.mark.ranks(2)
def test_print_to_a_file_of_the_users_own_is_left_alone():
    own = io.StringIO()
    with parwrap.distributed():
        print("mine", file=own)

    assert ["mine\n"] * 2 == parwrap.gather(own.getvalue())


def test_one_rank_takes_force_too(capsys):
    with parwrap.distributed():
        print("hello", force=True)

    assert "hello\n" == capsys.readouterr().out


@pytest.mark.ranks(3)
def test_everybody_loads_what_rank_zero_saves_however_late_it_is(tmp_path):
    path = tmp_path / "best.pt"
    loaded = []
    with parwrap.distributed():
        for epoch in range(3):
            if parwrap.rank() == 0:
                time.sleep(0.1)
            torch.save({"epoch": epoch, "rank": parwrap.rank()}, path)
            loaded.append(torch.load(path))
            parwrap.barrier()

    assert [{"epoch": epoch, "rank": 0} for epoch in range(3)] == loaded
    assert ["best.pt"] == os.listdir(tmp_path)


@pytest.mark.ranks(2)
def test_a_rank_that_saves_more_often_than_rank_zero_does_not_wait_for_ever(tmp_path):
    """As when each rank judges by its own loss whether it is the best."""
    with parwrap.distributed(timeout=20):
        torch.save("first", tmp_path / "best.pt")
        if parwrap.rank() == 1:
            torch.save("never written", tmp_path / "best.pt")

        assert "first" == torch.load(tmp_path / "best.pt")


@pytest.mark.ranks(2)
def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "best.pt"
    with parwrap.distributed():
        torch.save("good", path)
        if parwrap.rank() == 0:
            with pytest.raises(Exception, match="pickle"):
                torch.save(lambda: None, path)
        parwrap.barrier()

        assert "good" == torch.load(path)
    assert ["best.pt"] == os.listdir(tmp_path)


@pytest.mark.ranks(2)
def test_a_buffer_is_written_on_every_rank():
    with parwrap.distributed():
        buffer = io.BytesIO()
        torch.save(parwrap.rank(), buffer)
        buffer.seek(0)

        assert parwrap.rank() == torch.load(buffer)


@pytest.mark.ranks(2)
def test_a_name_imported_before_is_intercepted_too(tmp_path):
    module = sys.modules[__name__]
    module.save = torch.save
    train = parwrap.distributed(lambda: module.save(f"by rank {parwrap.rank()}", tmp_path / "x.pt"))
    train()
    parwrap.barrier()

    assert "by rank 0" == torch.load(tmp_path / "x.pt")
    assert module.save is torch.save


@pytest.mark.ranks(2)
def test_saving_on_rank_zero_alone_waits_for_nobody(tmp_path):
    @parwrap.rank_zero_only
    def save():
        torch.save("alone", tmp_path / "x.pt")

    with parwrap.distributed():
        save()
        parwrap.barrier()

        assert "alone" == torch.load(tmp_path / "x.pt")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.ranks(2)
def test_weights_load_to_the_gpu_that_a_rank_sees(tmp_path):
    with parwrap.distributed():
        torch.save(torch.ones(1, device="cuda"), tmp_path / "x.pt")

        assert torch.load(tmp_path / "x.pt").is_cuda
