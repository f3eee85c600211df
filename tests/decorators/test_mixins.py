"""Classes whose training methods run as decorated functions do."""

import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError


def first_of(seed):
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


class Drawing:
    def train(self, x=1):
        return torch.rand(1).item()

    def draw(self):
        return torch.rand(1).item()


class Seeded(parwrap.DistributedMixin, Drawing, seed=5):
    pass


class Overriding(Seeded, seed=6, parwrap_methods=("pretrain",)):
    def train(self, x=1):
        """Draws too."""
        return super().train(x)

    def pretrain(self):
        return self.train()


def test_training_methods_run_in_the_scope_with_the_options_of_the_instances_class():
    assert first_of(5) == Seeded().train()
    assert first_of(5) != Seeded().draw()
    assert [first_of(6)] * 2 == [Overriding().train(), Overriding().pretrain()]
    assert "Draws too." == Overriding.train.__doc__


def test_options_and_names_go_on_to_subclasses():
    class Naming(Overriding, batch="global"):
        parwrap_methods = ("draw",)

    class Diamond(Naming, Seeded):
        pass

    assert [first_of(6)] * 3 == [Naming().draw(), Naming().pretrain(), Diamond().draw()]


def test_a_class_that_comes_in_between_is_not_passed_over():
    class Between(Drawing):
        def train(self, x=1):
            return "between", super().train(x)

    class Below(Seeded, Between):
        pass

    assert ("between", first_of(5)) == Below().train()


def test_class_methods_and_static_methods():
    class Base:
        @classmethod
        def fit(cls):
            return cls.__name__, torch.rand(1).item()

        @staticmethod
        def train(x):
            return x, torch.rand(1).item()

    class Fitting(parwrap.DistributedMixin, Base, seed=5):
        pass

    class Again(Fitting, seed=6):
        @classmethod
        def fit(cls):
            return super().fit()

    assert [("Fitting", first_of(5)), ("Again", first_of(6))] == [Fitting.fit(), Again.fit()]
    assert [(1, first_of(5))] * 2 == [Fitting.train(1), Fitting().train(1)]


def test_instances_in_threads_open_their_scopes_once_each(monkeypatch):
    class Trainer(parwrap.AccumulateMixin, steps=2):
        def fit(self, starts, ends):
            starts.set()
            assert ends.wait(60)
            self.train()

        def train(self):
            pass

    opened, scope = [], parwrap.accumulate.scope
    monkeypatch.setattr(parwrap.accumulate, "scope", lambda *given: opened.append(threading.current_thread()) or scope(*given))
    events = [threading.Event() for _ in range(4)]
    threads = [threading.Thread(target=Trainer().fit, args=events[at : at + 2]) for at in (0, 2)]
    for thread, (started, _) in zip(threads, (events[:2], events[2:]), strict=True):
        thread.start()
        assert started.wait(60)
    for thread, (_, ends) in zip(threads, (events[:2], events[2:]), strict=True):  # the first to start is the first to end
        ends.set()
        thread.join()

    assert threads == opened


def test_an_instance_is_pickled_as_any():
    trainer = Overriding()
    trainer.best = trainer.train()

    assert {"best": first_of(6)} == vars(pickle.loads(pickle.dumps(trainer)))


def test_the_mode_of_a_module_is_no_training_method_unless_it_is_named():
    class Model(parwrap.DistributedMixin, nn.Linear, seed=5):
        def fit(self):
            return torch.rand(1).item()

    class Frozen(Model):
        def train(self, mode=True):
            self.drawn = torch.rand(1).item()
            return super().train(mode)

    class Passing(Frozen):
        def train(self, *args):
            return super().train(*args)

    class Named(Frozen, parwrap_methods=("train",)):
        pass

    class Training(parwrap.DistributedMixin, nn.Linear, seed=5):
        def train(self, epochs=3):
            return torch.rand(1).item()

    assert Model.train is nn.Module.train
    assert first_of(5) == Model(1, 1).fit() == Training(1, 1).train(2)
    for cls, seeded in ((Frozen, False), (Passing, False), (Named, True)):
        model = cls(1, 1)
        assert not model.eval().training
        assert seeded == (first_of(5) == model.drawn)


class Loop:
    """A plain trainer with an epoch a call, which ``fit`` calls."""

    def __init__(self, batch_size):
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        samples = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.loader = DataLoader(TensorDataset(samples), batch_size=batch_size)

    def train(self):
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), x[:, :1]).backward()
            self.optimizer.step()

    def fit(self, epochs=2):
        for _ in range(epochs):
            self.train()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Distributed(parwrap.DistributedMixin, parwrap.AccumulateMixin, Loop, batch="global", steps=2):
    def train(self):
        super().train()


class Mixed(parwrap.AmpMixin, Distributed, level="O0"):
    def fit(self):
        return super().fit()


@pytest.mark.ranks(2)
def test_a_class_trains_on_ranks_as_in_one_process():
    """Methods that call each other are in the scopes once: two windows of two batches are not four."""
    expected = Loop(16).fit()

    torch.testing.assert_close(expected, Mixed(8).fit(), rtol=0, atol=1e-12)


class Evaluating(Loop):
    """A plain trainer whose training evaluates."""

    def fit(self, epochs=2):
        results = []
        for _ in range(epochs):
            self.train()
            results.append(self.evaluate(DataLoader(torch.arange(10.0), batch_size=2)))
        return results

    @torch.no_grad()
    def evaluate(self, loader):
        batches = list(loader)
        return {"mean": torch.cat(batches).mean().item(), "batches": len(batches) * 1.0}


class Joint(parwrap.DistributedMixin, parwrap.EvaluateMixin, Evaluating, reduce={"mean": "mean", "batches": "sum"}, check=False):
    def evaluate(self, loader):
        self.read = len(list(loader))
        return super().evaluate(loader)


@pytest.mark.ranks(2)
def test_an_evaluation_inside_training_is_that_of_one_process_and_each_rank_reads_a_part():
    trainer = Joint(16)

    assert [{"mean": 4.5, "batches": 5.0}] * 2 == Evaluating(16).fit() == trainer.fit()
    assert 5 == parwrap.reduce_sum(trainer.read)


class Normed(Loop):
    def __init__(self, batch_size):
        super().__init__(batch_size)
        self.model.insert(1, nn.BatchNorm1d(3).double())


class SyncedNorm(parwrap.DistributedMixin, parwrap.SyncBNMixin, Normed, batch="global"):
    pass


@pytest.mark.ranks(2)
def test_batch_norms_of_a_class_use_the_whole_batch():
    expected = Normed(16).fit()

    torch.testing.assert_close(expected, SyncedNorm(16).fit(), rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_batches_of_a_class_hold_samples_of_one_length():
    class Reading(parwrap.DistributedMixin, parwrap.UniformLengthMixin, pad_value=0):
        def train(self):
            texts = TensorDataset(torch.tensor([[5, 3, 8, 1], [7, 0, 0, 0], [6, 2, 9, 9], [4, 0, 0, 0]] * 2))
            return {tokens.shape[1] for (tokens,) in parwrap.shard(DataLoader(texts, batch_size=2, shuffle=True))}

    assert {1, 4} == set().union(*parwrap.gather(Reading().train()))


def test_keywords_that_no_mixin_takes_are_for_the_other_bases():
    class Registered:
        def __init_subclass__(cls, name, **keywords):
            super().__init_subclass__(**keywords)
            cls.name = name

    class Named(parwrap.DistributedMixin, Registered, name="mine", seed=1, parwrap_methods=()):
        pass

    assert "mine" == Named.name


def runs(self):
    return 1


async def waits(self):
    return 1


@pytest.mark.parametrize(
    ("bases", "attributes", "keywords", "text"),
    [
        (
            (parwrap.DistributedMixin, Drawing),
            {},
            {"sead": 1},
            "T has the class keyword sead, which none of its mixins takes; did you mean 'seed'?",
        ),
        (
            (parwrap.AmpMixin, Drawing),
            {},
            {"xyz": 1},
            "T has the class keyword xyz, which none of its mixins takes; they take backoff_factor, ",
        ),
        ((parwrap.DistributedMixin, Drawing), {}, {"batch": "all"}, "batch='all' is not a valid value."),
        (
            (parwrap.AmpMixin,),
            {"run": runs},
            {"parwrap_methods": "run"},
            "T.parwrap_methods is 'run', not a tuple of names: write ('run',).",
        ),
        (
            (parwrap.AmpMixin, Drawing),
            {},
            {"parwrap_methods": ("trian",)},
            "T.parwrap_methods names 'trian', which T does not have",
        ),
        ((parwrap.AmpMixin,), {"train": waits}, {}, "@parwrap.amp cannot decorate waits ("),
        (
            (parwrap.DistributedMixin, parwrap.AmpMixin),
            {"run": runs, "train_model": runs},
            {},
            "T has none of the methods that DistributedMixin and AmpMixin would decorate: train, fit. Add one, or name your own with the "
            "class keyword, as in parwrap_methods=('train_model',). If this is a base class and its subclasses have the methods, set "
            "parwrap_methods=().",
        ),
        (
            (parwrap.AmpMixin, nn.Module),
            {"run": runs},
            {},
            "T has none of the methods that AmpMixin would decorate: train, fit (the train(mode) of a module only sets its mode). ",
        ),
        (
            (parwrap.DistributedMixin, parwrap.EvaluateMixin),
            {"fit": runs, "run_validation": runs},
            {"reduce": "sum"},
            "T has none of the methods that EvaluateMixin would decorate: evaluate, validate, test. Add one, or name your own with the "
            "class keyword, as in parwrap_evaluate_methods=('run_validation',). ",
        ),
        (
            (parwrap.EvaluateMixin,),
            {"evaluate": runs},
            {"reduce": "sum", "parwrap_methods": ("evaluate",)},
            "T has parwrap_methods, but no mixin that uses it: its mixins use parwrap_evaluate_methods. Write that instead.",
        ),
        ((parwrap.EvaluateMixin,), {"evaluate": runs}, {}, "@parwrap.evaluate does not say how the ranks' results are merged"),
    ],
)
def test_a_class_that_cannot_be_as_it_is_written(bases, attributes, keywords, text):
    with pytest.raises(UsageError) as refusal:
        type("T", bases, attributes, **keywords)

    assert str(refusal.value).startswith(text)


def test_a_base_class_may_leave_the_methods_to_its_subclasses():
    class Base(parwrap.DistributedMixin, seed=5, parwrap_methods=()):
        pass

    class Trainer(Base, Drawing):
        pass

    assert first_of(5) == Trainer().train()
    with pytest.raises(UsageError, match="Empty has none of the methods that DistributedMixin would decorate"):

        class Empty(Base):
            def run(self):
                pass
