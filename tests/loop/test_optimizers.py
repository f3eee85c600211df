"""Which optimizers exist, what they own, and whether their models are in train mode."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD

from parwrap.intercept.torch_calls import intercepting
from parwrap.loop.modules import Modules
from parwrap.loop.one_pass import Pass
from parwrap.loop.optimizers import Optimizers, parameters_of
from parwrap.loop.passes import Passes
from parwrap.loop.random_streams import RandomStreams
from parwrap.places import Place
from parwrap.ranks.group import alone


@pytest.fixture
def passes():
    streams = RandomStreams(rank=1)
    yield Passes(streams)
    streams.close()


@pytest.fixture
def optimizers(passes):
    modules = Modules(passes)
    noted = Optimizers(passes, modules)
    with intercepting([noted, modules]):
        yield noted
    modules.close()


def linear():
    return nn.Linear(1, 1)


def stepped(optimizer):
    for p in parameters_of(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()


def in_pass(passes):
    passes.begin(opened := Pass(True, True, Place("train.py", 1)))
    return opened


def test_optimizers_are_noted_when_they_are_built_and_their_parameters_count_until_the_next_training(optimizers):
    assert not optimizers.were_built
    model, other_model = linear(), linear()
    one, other = SGD(model.parameters(), lr=1.0), torch.optim.Adam(model.parameters())

    assert ([one, other], True) == (optimizers.all(), optimizers.were_built)
    assert dict.fromkeys(map(id, model.parameters()), 1) == optimizers.owners()
    stepped(one)
    del one, other
    gc.collect()
    assert [] == optimizers.all()
    assert dict.fromkeys(map(id, model.parameters()), 1) == optimizers.owners()
    new = SGD(other_model.parameters(), lr=1.0)
    assert [new] == optimizers.all()
    assert dict.fromkeys(map(id, other_model.parameters()), 2) == optimizers.owners()


def test_an_optimizer_of_an_earlier_training_is_at_work_again_when_it_steps(optimizers):
    one, other = SGD(linear().parameters(), lr=1.0), SGD(linear().parameters(), lr=1.0)
    stepped(one)
    new = SGD(linear().parameters(), lr=1.0)
    assert [new] == optimizers.all()
    before = optimizers.generation
    stepped(other)

    assert [other, new] == optimizers.all()
    assert before < optimizers.generation
    assert all(optimizers.has_had(p) for each in (one, other, new) for p in parameters_of(each))


def test_a_copy_is_known_and_is_at_work_once_it_is_used(optimizers):
    stepped(one := SGD(linear().parameters(), lr=1.0))
    before = optimizers.generation
    copied = copy.deepcopy(one)

    assert [one] == optimizers.all()
    assert before < optimizers.generation
    assert all(map(optimizers.has_had, parameters_of(copied)))
    copied.zero_grad()
    assert [one, copied] == optimizers.all()


def test_the_first_optimizer_may_come_from_a_file(passes):
    pickled = pickle.dumps(SGD(linear().parameters(), lr=1.0))
    with intercepting([optimizers := Optimizers(passes, Modules(passes))]):
        optimizer = pickle.loads(pickled)
        new = SGD(linear().parameters(), lr=1.0)
        new.load_state_dict(optimizer.state_dict())

    assert ([optimizer, new], True) == (optimizers.all(), optimizers.were_built)


def test_a_copy_that_is_made_with_its_model_in_a_training_pass_belongs_to_the_batch(optimizers, passes):
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    in_pass(passes)
    copied = copy.deepcopy((model, optimizer))

    assert (True, False) == (optimizers.is_of_batch(copied[1]), optimizers.is_of_batch(optimizer))


def test_the_active_optimizer_ran_zero_grad_or_step_last(optimizers):
    one, other = SGD(linear().parameters(), lr=1.0), SGD(linear().parameters(), lr=1.0)
    active = [optimizers.active]
    for run in (lambda: stepped(one), other.zero_grad, one.zero_grad, lambda: stepped(other)):
        run()
        active.append(optimizers.active)
    with alone():
        one.zero_grad()

    assert ([-1, 0, 1, 0, 1], 1) == (active, optimizers.active)


def test_an_optimizer_of_lazy_modules_changes_its_version_when_they_get_their_shapes(optimizers):
    model = nn.LazyLinear(1)
    optimizer = SGD(model.parameters(), lr=1.0)
    before = optimizers.version(optimizer)
    model(torch.ones(1, 2))

    assert before < optimizers.version(optimizer)


def test_what_one_rank_builds_or_steps_alone_is_not_at_work(optimizers):
    optimizer = SGD(linear().parameters(), lr=1.0)
    before = optimizers.generation
    with alone():
        stepped(own := SGD(linear().parameters(), lr=1.0))

    assert ([optimizer], before, 0) == (optimizers.all(), optimizers.generation, optimizers.steps)
    assert not any(optimizers.has_had(p) for p in parameters_of(own))


def test_what_all_ranks_build_in_turn_is_at_work(optimizers):
    with alone(in_turn=True):
        optimizer = SGD(linear().parameters(), lr=1.0)

    assert ([optimizer], True) == (optimizers.all(), optimizers.were_built)


def test_a_group_that_is_added_changes_the_generation(optimizers):
    optimizer = SGD(linear().parameters(), lr=1.0)
    before = optimizers.generation
    optimizer.add_param_group({"params": linear().parameters()})

    assert before < optimizers.generation
    assert [optimizer] == optimizers.all()


def replace(optimizer):
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(1))


def resize(optimizer):
    optimizer.param_groups[0]["params"][0].data = torch.ones(7, 7)
    optimizer.zero_grad()


@pytest.mark.parametrize("change", [replace, resize])
def test_a_tensor_that_a_script_replaces_changes_the_version_of_its_optimizer_alone(optimizers, change):
    one, other = (SGD(linear().parameters(), lr=1.0) for _ in range(2))
    before = optimizers.generation, optimizers.version(one), optimizers.version(other)
    assert before == (optimizers.generation, optimizers.version(one), optimizers.version(other))
    change(one)

    assert before[0] < optimizers.generation
    assert before[1] < optimizers.version(one)
    assert before[2] == optimizers.version(other)


def test_an_unknown_optimizer_is_noted_at_its_first_step(passes):
    optimizer, optimizers = SGD(linear().parameters(), lr=1.0), Optimizers(passes, Modules(passes))
    with intercepting([optimizers]):
        assert [] == optimizers.all()
        stepped(optimizer)

    assert [optimizer] == optimizers.all()
    assert (1, True) == (optimizers.steps, optimizers.were_built)


def test_an_optimizer_is_of_a_batch_if_all_that_it_trains_was_made_in_the_pass(optimizers, passes):
    older = linear()
    in_pass(passes)
    newer = linear()
    of_batch, mixed = SGD(newer.parameters(), lr=1.0), SGD([*older.parameters(), *newer.parameters()], lr=1.0)
    of_tensor = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    assert [mixed] == optimizers.all()
    assert (True, False) == (optimizers.of_batch(newer.weight), optimizers.of_batch(older.weight))
    stepped(of_batch), stepped(of_tensor)
    assert 0 == optimizers.steps


@pytest.mark.parametrize(
    ("in_eval", "frozen", "expected"),
    [([], [], False), ([0], [], False), ([0, 1], [], True), ([0], [1], True), ([1], [0], True), ([0, 1], [0, 1], False)],
)
def test_evaluation_is_when_all_trainable_parameters_are_in_eval_mode(optimizers, in_eval, frozen, expected):
    parts = nn.ModuleList([linear(), linear()])
    optimizer = SGD(parts.parameters(), lr=1.0)
    for index in frozen:
        parts[index].requires_grad_(False)
    for index in in_eval:
        parts[index].eval()

    assert ([optimizer], expected) == (optimizers.all(), optimizers.evaluate())


def test_a_mode_is_what_modules_say(optimizers):
    model = nn.Sequential(linear(), linear())
    built = SGD(model.parameters(), lr=1.0)
    modes = [optimizers.evaluate()]
    for change in (model.eval, model[0].train, model[0].eval, lambda: model.train(True), lambda: model.train(False)):
        change()
        modes.append(optimizers.evaluate())
    for module in model.modules():  # as trainers put back the modes after a validation
        module.training = True
    modes.append(optimizers.evaluate())

    assert ([built], [False, True, False, True, False, True, False]) == (optimizers.all(), modes)


def test_an_eval_mode_is_fresh_after_a_call_of_eval_on_a_module_of_the_optimizers(optimizers, passes):
    model, teacher = linear(), linear()
    built = SGD(model.parameters(), lr=1.0)
    model.eval()
    before = passes.evals
    stale = optimizers.evaluate(since=before)
    teacher.eval()
    of_another = optimizers.evaluate(since=before)
    model.eval()

    assert ([built], False, False, True) == (optimizers.all(), stale, of_another, optimizers.evaluate(since=before))


@pytest.mark.parametrize(("in_turn", "expected"), [(False, False), (True, True)])
def test_what_one_rank_does_alone_changes_no_mode_and_what_all_do_in_turn_does(optimizers, in_turn, expected):
    model = linear()
    built = SGD(model.parameters(), lr=1.0)
    with alone(in_turn=in_turn):
        model.eval()

    assert ([built], expected) == (optimizers.all(), optimizers.evaluate(since=0))


def test_the_optimizers_that_stepped_in_the_last_pass_decide(optimizers, passes):
    one, other = linear(), linear()
    of_one, of_other = SGD(one.parameters(), lr=1.0), SGD(other.parameters(), lr=1.0)
    one.eval()
    modes = [optimizers.evaluate()]  # both are at work
    stepped(of_one)
    modes.append(optimizers.evaluate())
    one.train(), other.eval()
    modes.append(optimizers.evaluate())
    passes.begun += 1
    stepped(of_other)
    modes.append(optimizers.evaluate())
    stepped(of_one)
    modes.append(optimizers.evaluate())
    newer = SGD(other.parameters(), lr=1.0)
    modes.append(optimizers.evaluate())
    del newer

    assert [False, True, False, True, False, True] == modes


def test_a_copy_of_a_model_has_the_mode_of_its_modules(optimizers):
    model = linear()
    model.eval()
    copied = copy.deepcopy(model)
    built = SGD(copied.parameters(), lr=1.0)

    assert ([built], True) == (optimizers.all(), optimizers.evaluate())
