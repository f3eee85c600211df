import io
import os
import sys
import time

import pytest
import torch

import parwrap


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


def train(steps, after):
    """A loop of so many steps on this rank, and what is done ``after`` it."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(step))).sum().backward()
        optimizer.step()
    return model.state_dict(), after(model)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.ranks(3)
def test_a_rank_that_leaves_the_loop_first_loads_what_rank_zero_saves_after_it(there, tmp_path):
    if there and parwrap.rank() == 0:
        torch.save("from an earlier run", tmp_path / "last.pt")
    parwrap.barrier()

    def save_and_load(model):
        torch.save(model.state_dict(), tmp_path / "last.pt")
        return torch.load(tmp_path / "last.pt")

    trained, loaded = parwrap.distributed(timeout=20)(train)((5, 2, 4)[parwrap.rank()], save_and_load)
    everybodys = parwrap.gather((trained, loaded))

    assert [name for each in everybodys for state in each for name in state] == ["weight", "bias"] * 6
    for each in everybodys:
        for state in each:
            torch.testing.assert_close(state, everybodys[0][0], rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_a_rank_that_loads_what_rank_zero_never_saves_gets_its_own(tmp_path):
    loaded = []

    def save_and_load(model):
        if parwrap.rank() == 1:
            torch.save(model.state_dict(), tmp_path / "last.pt")
            loaded.append(torch.load(tmp_path / "last.pt")["weight"].shape)

    parwrap.distributed(timeout=20)(train)(5 - parwrap.rank(), save_and_load)

    assert parwrap.rank() == len(loaded)
    assert [] == os.listdir(tmp_path)


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
@pytest.mark.ranks(2)
def test_a_folder_that_is_not_there_is_told_of_as_by_torch(tmp_path):
    with pytest.raises(RuntimeError, match=r"directory .* does not exist") as plain:
        torch.save({}, tmp_path / "not there" / "model.pt")
    with parwrap.distributed():
        if parwrap.rank() == 0:
            with pytest.raises(RuntimeError) as raised:
                torch.save({}, tmp_path / "not there" / "model.pt")

            assert (str(plain.value), None) == (str(raised.value), raised.value.__context__)


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


@pytest.mark.ranks(2)
def test_the_bytes_and_rights_are_those_of_a_plain_save(tmp_path):
    path, plain = tmp_path / "best model.pt", tmp_path / "plain" / "best model.pt"
    with parwrap.distributed():
        torch.save(torch.ones(3), path)
        parwrap.barrier()
    if parwrap.rank() == 0:
        plain.parent.mkdir()
        torch.save(torch.ones(3), plain)

        assert plain.read_bytes() == path.read_bytes()
        assert plain.stat().st_mode == path.stat().st_mode


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.ranks(2)
def test_a_rank_that_is_behind_loads_what_rank_zero_has_replaced_or_removed_since(slow, tmp_path):
    path, loaded = tmp_path / "x.pt", []
    with parwrap.distributed():
        for number in range(3):
            torch.save((number, parwrap.rank()), path)
            if parwrap.rank() == slow:
                time.sleep(0.1)
            loaded.append(torch.load(path))
        os.remove(path)

    assert [(number, 0) for number in range(3)] == loaded
    assert not os.listdir(tmp_path)


@pytest.mark.ranks(2)
def test_files_that_are_held_for_others_are_let_go_when_the_ranks_have_met(tmp_path):
    before = os.listdir("/proc/self/fd")
    with parwrap.distributed():
        for number in range(100):
            torch.save(number, tmp_path / "x.pt")
            if number < 80:
                parwrap.barrier()
        held = len(os.listdir("/proc/self/fd")) - len(before)

    assert held <= 40
    assert before == os.listdir("/proc/self/fd")
