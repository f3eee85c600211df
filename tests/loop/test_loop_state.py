import torch
from torch import nn

from parwrap.loop.loop_state import Loop


def loop_with(*modules):
    loop = Loop()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    for optimizer in optimizers:
        loop.own_parameters(optimizer)
    loop.keep = optimizers
    return loop


def test_training_is_the_default_once_there_is_an_optimizer():
    assert not loop_with(nn.Linear(1, 1)).evaluating()


def test_before_anything_can_be_trained_data_is_looked_at():
    loop = Loop()
    assert loop.evaluating()
    loop.ran_backward()
    assert not loop.evaluating()


def test_without_gradients_data_is_looked_at():
    loop = loop_with(nn.Linear(1, 1))
    with torch.no_grad():
        assert loop.evaluating()
    with torch.inference_mode():
        assert loop.evaluating()


def test_the_mode_of_the_root_counts_and_that_of_a_frozen_backbone_does_not():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    loop = loop_with(model[1])
    loop.set_mode(model, True)
    loop.set_mode(model[0], False)
    assert not loop.evaluating()
    loop.set_mode(model, False)
    loop.set_mode(model[0], True)
    assert loop.evaluating()


def test_the_last_root_counts():
    generator, discriminator = nn.Linear(1, 1), nn.Linear(1, 1)
    loop = loop_with(generator, discriminator)
    loop.set_mode(generator, False)
    assert loop.evaluating()
    loop.set_mode(discriminator, True)
    assert not loop.evaluating()


def test_random_numbers_are_the_ranks_own_while_a_for_statement_reads_a_pass_that_trains():
    loop = loop_with(nn.Linear(1, 1))
    loop.opened_pass()
    loop.reads_in_for(True)
    assert not loop.drawing()
    loop.ran_backward()
    assert loop.drawing()
    loop.reads_in_for(False)
    assert not loop.drawing()
    loop.closed_pass()
    assert not loop.drawing()


def test_backwards_outside_of_such_a_statement_are_by_hand():
    loop = loop_with(nn.Linear(1, 1))
    ran = []
    loop.ran_by_hand = lambda: ran.append(loop.backwards)
    loop.ran_backward()
    loop.opened_pass()
    loop.ran_backward()
    assert [1, 2] == ran
    assert loop.by_hand
    loop.reads_in_for(True)
    loop.ran_backward()
    assert [1, 2] == ran
    assert not loop.by_hand


def test_optimizers_built_before_anybody_watched_are_found_and_dead_ones_forgotten():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    loop = Loop()
    loop.find_optimizers()
    assert any(found is optimizer for found in loop.optimizers())
    found = len(list(loop.optimizers()))
    del optimizer
    assert found - 1 == len(list(loop.optimizers()))


def test_batches_are_whole_while_the_pass_that_they_are_of_is_open():
    loop = loop_with(nn.Linear(1, 1))
    loop.opened_pass()
    loop.drew_batch()
    loop.opened_evaluation()
    assert not loop.reads_whole()
    loop.drew_batch(whole=True)
    assert loop.reads_whole()
    loop.drew_batch()
    assert not loop.reads_whole()
    loop.drew_batch(whole=True)
    loop.closed_evaluation()
    assert not loop.reads_whole()
    assert 4 == loop.batches
