"""Which passes count as training, and the correction of a wrong guess."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from trained_on import Setup, everyones


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_training_pass_is_shared_out_and_an_evaluating_one_is_not(shuffle):
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(10), batch_size=2, shuffle=shuffle)
        assert list(range(10)) == everyones(setup.train(loader))
        setup.model.eval()
        assert list(range(10)) == sorted(torch.cat(list(loader)).tolist())
        setup.model.train()
        with torch.no_grad():
            assert list(range(10)) == sorted(torch.cat(list(loader)).tolist())
        assert list(range(10)) == everyones(setup.train(loader))


@pytest.mark.ranks(2)
def test_the_only_loader_is_for_training_though_it_does_not_shuffle():
    with parwrap.distributed():
        assert 3 == len(DataLoader(range(10), batch_size=2))


@pytest.mark.ranks(2)
def test_a_loader_trained_on_in_eval_mode_is_shared_out_from_its_next_pass_on():
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(8), batch_size=2)
        setup.model.eval()
        with pytest.warns(UserWarning, match="but the loop then trained on"):
            assert list(range(8)) == setup.train(loader)
        assert list(range(8)) == everyones(setup.train(loader))


@pytest.mark.ranks(2)
def test_a_loader_only_looked_at_in_train_mode_is_seen_whole():
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(8), batch_size=2)
        with pytest.warns(UserWarning, match="share first and then the rest.* len.. was 2 .* of all the data is 4"):
            seen = [torch.cat(list(loader)).tolist(), torch.cat(list(loader)).tolist()]
        assert [list(range(8))] * 2 == [sorted(each) for each in seen]
        assert list(range(8)) == everyones(setup.train(loader))


@pytest.mark.ranks(2)
def test_before_anything_can_be_trained_a_loader_is_seen_whole():
    """As by a script that computes the mean of its data first."""
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True)

        assert 3.5 == torch.cat([batch for (batch,) in loader]).mean().item()
        assert list(range(8)) == everyones(Setup().train(DataLoader(range(8))))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_inside_a_training_pass_is_the_same_on_every_rank(workers):
    with parwrap.distributed(seed=0):
        setup, held_out = Setup(), DataLoader(range(50), batch_size=5, shuffle=True, num_workers=workers)
        estimates = []
        for batch in DataLoader(range(12), batch_size=2):
            setup.step(batch)
            setup.model.eval()
            with torch.no_grad():
                estimates.append(next(iter(held_out)).tolist())
            setup.model.train()

    assert estimates[0] != estimates[1]
    assert [estimates] * 2 == parwrap.gather(estimates)


@pytest.mark.ranks(2)
def test_a_loop_that_forgets_to_go_back_to_train_mode_is_shared_out_all_the_same():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, loader = Setup(), DataLoader(range(8), batch_size=2)
        trained = []
        for _ in range(4):
            trained.append(len(setup.train(loader)))
            setup.model.eval()
            with torch.no_grad():
                assert list(range(8)) == sorted(torch.cat(list(loader)).tolist())

    assert [4, 4, 4, 4] == trained


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_the_length_after_a_pass_that_only_looked_is_that_of_the_whole():
    """As for an average over the batches of a loader that is trained on too."""
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(8), batch_size=2, shuffle=True)
        for _ in range(2):
            setup.train(loader)
            assert 2 == len(loader)
            with torch.no_grad():
                read = sum(1 for _ in loader)
            assert (4, 4) == (read, len(loader))
        Setup()

        assert 2 == len(loader)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_gradients_of_inputs_in_eval_mode_do_not_train():
    """As for adversarial examples of a test set, epoch after epoch."""
    with parwrap.distributed():
        setup, train, test = Setup(), DataLoader(range(8), batch_size=2, shuffle=True), DataLoader(torch.arange(6.0), batch_size=2)
        for _ in range(3):
            setup.train(train)
            setup.model.eval()
            seen = 0
            for x in test:
                x.requires_grad_()
                setup.model(x[:, None]).sum().backward()
                seen += len(x)
            setup.model.train()
            assert 6 == seen
