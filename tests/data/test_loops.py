"""Rule 2: which passes train, as a table of loops that people write. ``test_training_passes.py`` runs loops on ranks."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD

from parwrap.data.loops import Loops, why_whole
from parwrap.intercept.torch_calls import intercepting
from parwrap.loop.modules import Modules
from parwrap.loop.one_pass import Pass
from parwrap.loop.optimizers import Optimizers, parameters_of
from parwrap.loop.passes import Passes
from parwrap.loop.random_streams import RandomStreams
from parwrap.places import Line, Place
from parwrap.ranks.group import alone


@pytest.mark.parametrize("trained_since_built", [False, True])
@pytest.mark.parametrize("eval_is_fresh", [False, True])
@pytest.mark.parametrize("suits", [False, True])
def test_a_loop_does_what_it_did_the_last_time_if_gradients_are_on(trained_since_built, eval_is_fresh, suits):
    rest = {"optimizer_built": True, "trained_since_built": trained_since_built, "eval_is_fresh": eval_is_fresh, "suits": suits}

    assert not why_whole(gradients_on=True, last_time=True, **rest)
    assert why_whole(gradients_on=True, last_time=False, **rest)
    for last_time in (None, False, True):
        assert why_whole(gradients_on=False, last_time=last_time, **rest)


def test_a_loop_that_never_began_so_trains_if_it_is_the_first_of_its_optimizer():
    names = "optimizer_built", "trained_since_built", "eval_is_fresh", "suits"
    trains = [
        values
        for values in product([False, True], repeat=4)
        if not why_whole(gradients_on=True, last_time=None, **dict(zip(names, values, strict=True)))
    ]

    assert [(True, False, False, True)] == trains


class Data:
    """A dataset."""


class Script:
    """Runs a program of words, and notes for each pass whether it trains: ``S`` for a share, ``W`` if every rank reads everything.

    ``opt`` builds an optimizer of the model; ``eval`` and ``train`` set its mode, ``flag`` by ``module.training = True``. ``A5+`` is a
    pass over dataset A at line 5 with a step on each batch, ``A5-`` one without steps, ``A5~`` one with backwards alone, ``A5<+`` one that
    is left after its first batch, ``A5<`` the same without a step, ``A5>`` one after which a step follows, ``A5^`` one in which an
    optimizer is built for each batch and steps. ``*``: the loader shuffles; ``'``: another dataset of that kind; ``0``: gradients are off.
    ``(`` opens a pass that stays open, ``drawA`` draws another batch from it, ``)`` ends the last one. ``evals`` and ``trains`` set modes
    in the body of the next pass.
    """

    def __init__(self):
        self.streams = RandomStreams(rank=1)
        self.passes = Passes(self.streams)
        self.modules = Modules(self.passes)
        self.optimizers = Optimizers(self.passes, self.modules)
        self.loops = Loops(self.passes, self.optimizers)
        self.model, self.optimizer = nn.Linear(1, 1), None
        self.data, self.open, self.body, self.reads = {}, [], None, ""

    def run(self, program):
        with intercepting([self.optimizers, self.modules]):
            for word in program.split():
                self.do(word)
        return self.reads

    def close(self):
        self.modules.close()
        self.streams.close()

    def do(self, word):
        simple = {
            "opt": lambda: setattr(self, "optimizer", SGD(self.model.parameters(), lr=0.1)),
            "model": lambda: setattr(self, "model", nn.Linear(1, 1)),
            "eval": self.model.eval,
            "train": self.model.train,
            "flag": lambda: setattr(self.model, "training", True),
            "evals": lambda: setattr(self, "body", self.model.eval),
            "trains": lambda: setattr(self, "body", self.model.train),
            "step": self.step,
            ")": lambda: self.end(self.open.pop()[1], exhausted=True),
        }
        if word in simple:
            simple[word]()
        elif word.startswith("draw"):
            self.passes.drew(dict(self.open)[word[-1]], 1)
        else:
            self.read(word)

    def step(self):
        for p in parameters_of(self.optimizer):
            p.grad = torch.ones_like(p)
        self.optimizer.step()

    def read(self, word):
        context = torch.no_grad() if word.startswith("0") else nullcontext()
        with context:
            word = word.lstrip("0")
            stays_open, word = word.endswith("("), word.rstrip("(")
            name, line = word[0], int("".join(each for each in word if each.isdigit()))
            key = self.data.setdefault(name, Data()) if "'" not in word else self.data.setdefault(object(), Data())
            stack = (Line("train.py", 1, line, in_script=True),)
            start = self.loops.start(stack, key, "*" in word)
            opened = Pass(not start.why_whole, not start.why_whole, Place("train.py", line), start.why_whole)
            self.loops.begin(start, opened)
            self.passes.begin(opened)
            self.reads += "S" if opened.trains else "W"
            for _ in range(1 if "<" in word or stays_open else 3):
                self.passes.drew(opened, 1)
                if self.body:
                    self.body()
                if "+" in word or "~" in word or ">" in word:
                    self.passes.ran_backward()
                if "+" in word:
                    self.step()
                if "^" in word:
                    self.passes.ran_backward()
                    latent = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
                    latent.param_groups[0]["params"][0].grad = torch.ones(1)
                    latent.step()
            self.body = None
            if stays_open:
                self.open.append((name, opened))
            else:
                self.end(opened, exhausted="<" not in word)
            if ">" in word:
                self.step()

    def end(self, opened, exhausted):
        opened.exhausted = exhausted
        self.passes.end(opened)
        self.loops.end(opened)


@pytest.fixture
def script():
    script = Script()
    yield script
    script.close()


@pytest.mark.filterwarnings("ignore:parwrap")
@pytest.mark.parametrize(
    ("program", "reads"),
    [
        # what sets modes
        ("opt train A5+ eval B9- train A5+ eval B9-", "SWSW"),  # train_epoch and evaluate
        ("opt train A5+ eval B5- train A5+ eval B5-", "SWSW"),  # for phase in [train, val]: one line
        ("opt train A5*+ eval B5*- train A5*+ eval B5*-", "SWSW"),  # the same, over a validation set that is shuffled
        ("opt train A5+ 0A5- train A5+ 0A5-", "SWSW"),  # the same line and dataset, without gradients
        ("opt train A5+ eval A5- train A5+ eval A5-", "SWSW"),  # training accuracy, at the same line, with gradients
        ("opt trains A5*+ evals B9- trains A5*+ evals B9-", "SWSW"),  # modes in the body
        ("opt trains A5*+ evals B5- trains A5*+ evals B5-", "SWSW"),  # at one line, as in run_epoch(loader, training)
        ("opt trains A5+ evals B5- trains A5+ evals B5-", "SSSW"),  # the same where both read in order: said, then whole
        ("opt train A5+ eval 0B9- A5+ eval 0B9- A5+", "SWSWS"),  # train() once, eval() in every validation
        ("opt train eval 0B9- flag A5+ eval 0B9- flag A5+", "WSWS"),  # a trainer that puts flags back, after a sanity check
        ("opt eval 0B9- trains A5*+ eval 0B9- trains A5*+", "WSWS"),  # a validation first
        ("opt eval 0B9- trains A5+ eval 0B9- trains A5+", "WWWS"),  # the same over a loader that reads in order: nothing tells
        ("eval opt trains A5*+ trains A5*+", "SS"),  # a pretrained model is in eval mode
        ("eval opt trains A5+ trains A5+ A5+", "WSS"),
        ("opt eval A5*+ eval A5*+ eval A5*+", "SWS"),  # fine-tuning in eval mode
        ("opt train A5*+ eval opt trains A7*+ eval 0B9- trains A7*+", "SWWS"),  # a second model that is loaded in eval mode
        ("opt train A5+ eval A7+ A7+ A7- A7+", "SWSSW"),  # in eval mode at first
        ("opt train A5+ train B9- train B9-", "SWW"),  # MC dropout
        ("opt train A5+ B9<- B9<-", "SWW"),  # a quick look at the test set, left by break
        # what steps
        ("opt train A5+ eval B9~ train A5+ eval B9~", "SWSW"),  # FGSM, saliency
        ("opt train A5+ A9~ A9~ A5+", "SWWS"),  # Fisher information of the training data
        ("opt train A5+ eval B9^ eval B9^", "SWW"),  # a latent for each batch of a test set
        ("opt train A5> A5> A5>", "SSS"),  # one step for all batches of a pass
        ("A5- opt train A5+ A5+", "WWS"),  # statistics of the data, with the loop of the training
        ("A3- opt train A5+ A5+", "WSS"),
        ("opt A3- A5+ A5+ A3-", "SSSW"),  # the same after the optimizer: read in shares, which is said, then whole
        ("A5- train opt A5+ A5+", "WWS"),
        # which loops are one
        ("opt train A5+ B9+ A5+ B9+ A5+ B9+", "SWSSSS"),  # two tasks
        ("opt train A'5*+ A'5*+ A'5*+", "SSS"),  # a new dataset for each epoch
        ("opt train A'5*+ eval B'9- model opt train A'5*+ eval B'9-", "SWSW"),  # folds
        ("opt train A5*+ B5- A5*+ B5-", "SWSW"),  # run_epoch(loader, training) without modes: only one shuffles
        ("opt train A5<+ A5<+ A5<+", "SSS"),  # next(iter(loader))
        ("opt train A5< A5< step A5<+ A5<+", "SWSS"),  # several batches for each step
        ("opt train A5( B5( step ) ) A5( B5( step ) )", "SSSS"),  # zip(labeled, unlabeled)
        ("opt train A5( step eval B9- train step ) A5( step eval B9- train step )", "SWSW"),  # an evaluation within the pass
        ("opt train A5( step B9( drawA step drawB drawA step drawB ) ) A5( step B9( drawA step drawB ) )", "SWSW"),
        ("opt train A5( B9( step drawA drawB step ) drawA B9( step ) ) A5( B9( step ) )", "SSSSS"),  # a loader that begins again in the zip
        ("opt train A3<+ A5+ A5+", "SWS"),  # a loader warmed up at another line: one pass whole
        # loops that change
        ("opt train A5+ A5- A5+ A5+", "SSWS"),  # without a step once: said, whole, and in shares again
        ("opt train A5+ A5- A5+ A5- A5+ A5+", "SSWSWW"),  # twice: it stays whole
        ("opt train A5+ opt A9+ A9+ A5+", "SSSS"),  # a new optimizer begins another training
        ("0A5- 0A5- opt 0A5- A5+", "WWWS"),  # nothing follows from passes without gradients
    ],
)
def test_what_each_pass_reads(script, program, reads):
    assert reads == script.run(program)


def test_a_pass_of_one_rank_alone_changes_no_loop(script):
    script.run("opt train A5+")
    with alone():
        script.model.eval()
        script.step()

    assert "SS" == script.run("A5+")


def test_another_dataset_with_the_id_of_one_that_is_gone_inherits_nothing(script):
    script.run("opt train A5+ A5+")
    assert 1 == len(script.loops._loops)
    script.data.clear()
    gc.collect()

    assert 0 == len(script.loops._loops)


def test_a_loop_that_runs_without_a_step_is_named_once(script):
    with pytest.warns(UserWarning, match=r"train.py:5 read 3 samples on each rank, and no optimizer stepped in the pass") as said:
        script.run("opt train A5+ A5- A5+ A5-")

    assert 1 == len(said)


def test_a_loop_that_is_known_looks_at_no_module_when_it_begins(script, monkeypatch):
    script.run("opt train A5+")
    monkeypatch.setattr(Modules, "evaluates", lambda *args: pytest.fail("looked at the modules"))

    assert "SSS" == script.run("A5+ A5+")


def test_a_pass_without_gradients_looks_at_no_module_when_it_begins(script, monkeypatch):
    script.run("opt train")
    monkeypatch.setattr(Modules, "evaluates", lambda *args: pytest.fail("looked at the modules"))

    assert "W" == script.run("0A5-")
