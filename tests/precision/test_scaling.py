"""fp16 without an edit to the loop, against torch's GradScaler by hand."""

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import parwrap
from parwrap.precision.aside import stand_aside, warn_once

FP16 = torch.float16
LOW = {"dtype": "fp16", "init_scale": 1024.0}
"""So low that nothing overflows by itself."""


@pytest.fixture(autouse=True)
def _said_anew():
    stand_aside.cache_clear()
    warn_once.cache_clear()


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(count=12, overflowing=()):
    """Inputs and targets; the gradients of batches ``overflowing`` are not finite in float16."""
    generator = torch.Generator().manual_seed(1)
    made = [(x, x[:, :1] * 2) for x in torch.randn(count, 8, 6, generator=generator)]
    return [(x, y * (1e4 if number in overflowing else 1)) for number, (x, y) in enumerate(made)]


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


class Recorder:
    """What a loop by hand and one under parwrap have in common: each step's gradients and scale are remembered."""

    def __init__(self):
        self.seen = []

    def see(self, model, scale):
        self.seen.append([scale, *(None if p.grad is None else p.grad.clone() for p in model.parameters())])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def by_hand(data, micro=1, clip=None, **policy):
    model, recorder = build(), Recorder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **policy)
    for number, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=FP16):
            loss = loss_of(model, x, y) / micro
        scaler.scale(loss).backward()
        if (number + 1) % micro == 0:
            scaler.unscale_(optimizer)
            recorder.see(model, scaler.get_scale())
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()["state"], scaler.get_scale(), recorder.seen


def plain(data, micro=1, clip=None):
    model, recorder = build(), Recorder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(data):
        loss = loss_of(model, x, y) / micro
        loss.backward()
        if (number + 1) % micro == 0:
            recorder.see(model, parwrap.amp_state().scale)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()["state"], parwrap.amp_state().scale, recorder.seen


@pytest.mark.parametrize("policy", [{}, {"growth_interval": 3}, {"init_scale": 2.0**24, "growth_interval": 2, "growth_factor": 4.0}])
@pytest.mark.parametrize("loop", [{}, {"micro": 3}, {"clip": 0.1}, {"micro": 2, "clip": 0.1}], ids=str)
def test_weights_state_gradients_and_scale_are_bit_for_bit_those_by_hand(loop, policy):
    data = batches(overflowing=(4, 5))

    assert same(by_hand(data, **loop, **policy), parwrap.amp(dtype="fp16", **policy)(plain)(data, **loop))


def test_a_step_with_an_overflow_is_skipped_and_counted_and_halves_the_scale():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (x, y), before = batches(1, overflowing=[0])[0], copy.deepcopy(model.state_dict())
        loss_of(model, x, y).backward()

        assert not all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()

        assert same(before, model.state_dict())
        assert (parwrap.amp_state().scale, parwrap.amp_state().skipped_steps) == (32768.0, 1)
        return True

    assert parwrap.amp(dtype="fp16")(train)()


def test_gradients_are_true_scale_also_where_some_were_there_before():
    model = nn.Linear(4, 4, bias=False)
    x = torch.eye(4)
    with parwrap.amp(**LOW):
        model.weight.grad = torch.full((4, 4), 0.1)
        model(x).sum().backward()

    assert torch.equal(model.weight.grad, torch.full((4, 4), 0.1) + 1)


def test_inputs_bare_tensors_and_what_retains_its_gradient_get_true_scale_gradients():
    weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    with parwrap.amp(**LOW):
        hidden = x @ weight
        hidden.retain_grad()
        for times in (1, 2):
            (hidden.float() * 2).sum().backward(retain_graph=True)

            assert {2.0 * times} == set(hidden.grad.flatten().tolist())
            assert {4.0 * times} == set(weight.grad.flatten().tolist())
            assert {6.0 * times} == set(x.grad.flatten().tolist())


def test_backward_for_given_inputs_and_with_a_given_gradient():
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with parwrap.amp(**LOW):
        hidden = weight * other
        hidden.backward(torch.full((3,), 0.5), inputs=[weight], retain_graph=True)
        hidden.sum().backward(inputs=[hidden])

    assert ([0.5] * 3, None, [1.0] * 3) == (weight.grad.tolist(), other.grad, hidden.grad.tolist())


@pytest.mark.parametrize("given", [None, torch.tensor(0.5)])
@pytest.mark.parametrize("within", [{"inputs": True}, {}], ids=["inputs", ""])
def test_backward_of_an_edge_of_the_graph(given, within):
    def gradients():
        weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
        edge = torch.autograd.graph.get_gradient_edge((weight * 2).sum() * other.sum())
        torch.autograd.backward([edge, (other * 3).sum()], [given, None], **({"inputs": [weight, other]} if within else {}))
        return weight.grad, other.grad

    expected = gradients()
    with parwrap.amp(**LOW):
        assert same(expected, gradients())
    with parwrap.amp(**LOW), pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(nn.Parameter(torch.ones(3)) * 2))


def test_a_graph_of_the_gradients_is_true_scale_too():
    p = nn.Parameter(torch.tensor([3.0]))
    with parwrap.amp(**LOW):
        (p**2).sum().backward(create_graph=True)
        first, p.grad = p.grad, None

        assert [6.0] == first.tolist()
        (first**2).sum().backward()

    assert [24.0] == p.grad.tolist()  # of (2 p) ** 2


def test_sparse_gradients():
    embedding = nn.Embedding(5, 2, sparse=True)
    with parwrap.amp(**LOW):
        embedding(torch.tensor([1, 1, 3])).sum().backward()

    assert embedding.weight.grad.is_sparse
    assert [0, 2, 0, 1, 0] == embedding.weight.grad.to_dense()[:, 0].tolist()


def test_hooks_of_the_user_on_parameters_see_true_scale_gradients():
    p, seen = nn.Parameter(torch.ones(2)), []
    handle = p.register_hook(lambda grad: grad.clamp(max=0.25))
    p.register_hook(lambda grad: seen.append(grad.tolist()))
    with parwrap.amp(**LOW):
        (p * 3).sum().backward()

        assert ([[0.25] * 2], [0.25] * 2) == (seen, p.grad.tolist())
    handle.remove()
    p.sum().backward()

    assert [1.0, 1.0] == seen[1]
    assert 1 == len(p._backward_hooks)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant):
    def gradients(scope):
        model, x = build(), torch.ones(4, 6, requires_grad=True)
        with scope:
            hidden = checkpoint(model[:2], x, use_reentrant=use_reentrant)
            checkpoint(model[2:], hidden, use_reentrant=use_reentrant).float().mean().backward()
        return [p.grad for p in (*model.parameters(), x)]

    plain = gradients(torch.autocast("cpu", dtype=FP16))

    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(plain, gradients(parwrap.amp(**LOW)), strict=True))


def gan(data, backward, step, update):
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (critic, generator)]
    noise = torch.Generator().manual_seed(2)
    scales = []
    for real, _ in data:
        for optimizer, loss in ((optimizers[0], lambda fake, real=real: critic(fake.detach()).mean() - critic(real).mean()),
                                (optimizers[1], lambda fake: -critic(fake).mean())):  # fmt: skip
            optimizer.zero_grad()
            backward(lambda loss=loss: loss(generator(torch.randn(8, 3, generator=noise))))
            step(optimizer)
        scales.append(update())
    return generator.state_dict(), critic.state_dict(), scales


def test_two_optimizers_share_one_scale_that_changes_once_an_iteration():
    data = [(x * (1e5 if number in (3, 7) else 1), y) for number, (x, y) in enumerate(batches())]
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def backward_by_hand(loss):
        with torch.autocast("cpu", dtype=FP16, cache_enabled=False):
            scaled = scaler.scale(loss())
        scaled.backward()

    def update_by_hand():
        scaler.update()
        return scaler.get_scale()

    expected = gan(data, backward_by_hand, scaler.step, update_by_hand)
    with parwrap.amp(dtype="fp16", growth_interval=2):
        actual = gan(data, lambda loss: loss().backward(), lambda optimizer: optimizer.step(), lambda: parwrap.amp_state().scale)

    assert same(expected, actual)
    assert {16384.0, 32768.0, 65536.0} <= set(expected[2])


def test_a_closure_whose_gradients_overflow_changes_nothing():
    def train(closures):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
        for x, y in batches(overflowing=(0, 5, 6)):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            if closures:
                assert isinstance(optimizer.step(closure), torch.Tensor)
            else:
                closure()
                optimizer.step()
        return model.state_dict(), parwrap.amp_state().scale, parwrap.amp_state().skipped_steps

    expected, actual = (parwrap.amp(dtype="fp16")(train)(closures) for closures in (False, True))

    assert same(expected, actual)
    assert 3 <= actual[2]


def test_lbfgs_passes_over_an_overflow():
    def train():
        model = nn.Linear(6, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        for x, y in batches(overflowing=(0, 3)):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return model, parwrap.amp_state().skipped_steps

    model, skipped = parwrap.amp(dtype="fp16")(train)()

    assert skipped >= 2
    assert (model.weight[0, 0] - 2).abs() < 0.2


def test_schedulers_do_not_warn_about_a_skipped_step():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1)
        loss_of(model, *batches(1, overflowing=[0])[0]).backward()
        optimizer.step()
        scheduler.step()
        return parwrap.amp_state().skipped_steps

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 1 == parwrap.amp(dtype="fp16")(train)()


@pytest.mark.parametrize("owned", [True, False], ids=["an optimizer", "by hand"])
def test_a_training_that_has_diverged_ends_with_what_to_do(owned):
    @parwrap.amp(dtype="fp16", init_scale=8.0)
    def train():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1) if owned else None
        for _ in range(400):
            (weight * math.nan).sum().backward()
            if optimizer:
                optimizer.step()
            weight.grad = None

    with pytest.raises(parwrap.ParwrapError) as error:
        train()

    assert str(error.value) == (
        "gradients were not finite in 28 iterations in a row, and the loss scale has fallen to 3e-08: the training has diverged, or its "
        "gradients do not fit into float16. Compute in bf16 (parwrap.amp(dtype='bf16'), --amp bf16), lower the learning rate, or look for "
        "what makes the loss infinite or NaN."
    )


@pytest.fixture(params=["dtype", "device"])
def _other_defaults(request):
    if request.param == "dtype":
        torch.set_default_dtype(torch.float64)
    else:
        torch.set_default_device("meta")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_other_defaults")
@pytest.mark.parametrize("asked", [{"dtype": "fp16"}, {"level": "O2"}], ids=str)
def test_other_defaults_of_torch_change_nothing(asked):
    @parwrap.amp(**asked)
    def train():
        model = nn.Linear(4, 1, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (math.inf, 1.0):
            optimizer.zero_grad()
            before = model.weight.clone()
            (model(torch.ones(2, 4, device="cpu")).float().mean() * factor).backward()
            optimizer.step()
        return torch.equal(before, model.weight), parwrap.amp_state()

    stayed, state = train()

    assert (False, 32768.0, 1) == (stayed, state.scale, state.skipped_steps)


def test_the_scale_goes_on_from_call_to_call_unless_a_new_training_begins():
    model = build()
    outside = torch.optim.SGD(model.parameters(), lr=0.01)

    @parwrap.amp(dtype="fp16")
    def step(optimizer=None):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        loss_of(model, *batches(1, overflowing=[0])[0]).backward()
        optimizer.step()
        return parwrap.amp_state().scale

    assert [32768.0, 16384.0] == [step(outside), step(outside)]
    assert 32768.0 == step()


@pytest.mark.parametrize(
    "decorator", [parwrap.amp(dtype="fp16"), parwrap.amp(level="O2"), parwrap.amp(dtype="bf16")], ids=["fp16", "O2", "bf16"]
)
def test_nothing_of_a_training_is_kept_alive_once_the_function_has_returned(decorator):
    @decorator
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss_of(model, *batches(1)[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[0].weight)

    kept = train()
    gc.collect()

    assert [None] * 3 == [each() for each in kept]


def test_an_optimizer_that_is_built_between_two_calls_skips_too():
    @parwrap.amp(dtype="fp16")
    def step(model, optimizer):
        loss_of(model, *batches(1, overflowing=[0])[0]).backward()
        optimizer.step()
        return parwrap.amp_state().skipped_steps

    for number in (1, 2):
        model = build()
        before = copy.deepcopy(model.state_dict())

        assert number == step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert same(before, model.state_dict())


def test_weights_that_are_changed_by_hand_are_not_ruined_by_an_overflow(capfd):
    def train():
        weight = torch.zeros(6, 1, requires_grad=True)
        for x, y in batches(40, overflowing=(0, 5)):
            nn.functional.mse_loss(x @ weight, y).backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
        return weight

    assert (parwrap.amp(dtype="fp16")(train)()[0] - 2).abs() < 0.1
    assert 1 == capfd.readouterr().err.count("the gradient of a tensor that no optimizer owns has overflowed in float16. It was set to 0")


def test_a_model_that_is_half_already_is_refused():
    model = build().half()
    with parwrap.amp(dtype="fp16"), pytest.raises(parwrap.UsageError, match="is float16 already, and its gradients would vanish"):
        model(torch.ones(1, 6)).sum().backward()


def test_a_checkpoint_of_the_optimizer_carries_the_scale(tmp_path):
    def train(stop=None, start=0):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if start:
            saved = torch.load(tmp_path / "checkpoint.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in batches(overflowing=(1, 2))[start:stop]:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
        state = parwrap.amp_state()
        return model.state_dict(), state.scale, state.skipped_steps

    with_amp = {"dtype": "fp16", "growth_interval": 3}
    expected = parwrap.amp(**with_amp)(train)()
    parwrap.amp(**with_amp)(train)(stop=5)
    actual = parwrap.amp(**with_amp)(train)(start=5)

    assert same(expected, actual)
    optimizer = torch.optim.Adam(build().parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["optimizer"])  # also where there is no parwrap

    assert ["param_groups", "state"] == sorted(optimizer.state_dict())


def test_the_state_of_a_grad_scaler_can_be_loaded_and_its_own_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    with parwrap.amp(dtype="fp16"):
        parwrap.amp_state().load_state_dict(scaler.state_dict())
        state = parwrap.amp_state().state_dict()

        assert (8.0, 7, 0) == (state["scale"], state["growth_interval"], state["skipped_steps"])
    with parwrap.amp(dtype="fp16"):
        parwrap.amp_state().load_state_dict({**state, "skipped_steps": 3})

        assert "AmpState(scale=8.0, skipped_steps=3)" == repr(parwrap.amp_state())
    with parwrap.amp(dtype="bf16"):
        parwrap.amp_state().load_state_dict(state)

        assert ({}, 1.0) == (parwrap.amp_state().state_dict(), parwrap.amp_state().scale)


def test_a_script_with_a_scaler_of_its_own_is_left_to_it(capfd):
    data = batches(overflowing=(4,))
    expected = by_hand(data, clip=0.1)
    for _ in range(2):
        with parwrap.amp(dtype="fp16"):
            assert same(expected, by_hand(data, clip=0.1))
            assert math.isfinite(expected[2])

    said = [line for line in capfd.readouterr().err.splitlines() if "GradScaler" in line]
    assert [
        "parwrap: this script uses GradScaler itself, so parwrap.amp stands aside: it scales no loss and skips no step itself here. Remove "
        "the script's own to have parwrap do it."
    ] == said


@pytest.mark.ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        weights = []
        for number, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad()
            loss_of(model, x, y * (1e4 if (number, parwrap.rank()) == (2, 1) else 1)).backward()
            before = copy.deepcopy(model.state_dict())
            optimizer.step()
            weights.append(same(before, model.state_dict()))
        return weights, parwrap.amp_state().scale, parwrap.amp_state().skipped_steps, model.state_dict()

    def both():
        return parwrap.gather(train())

    one, other = parwrap.distributed(parwrap.amp(**LOW)(both))()

    assert same(one, other)
    assert ([False, False, True, False, False, False], 512.0, 1) == one[:3]


@pytest.mark.ranks(2)
def test_gradients_are_bit_for_bit_those_of_ddp_by_hand():
    """Each rank has its own data, and accumulates; the scale is a power of two, which changes no bit."""
    data = batches(8)[parwrap.rank() :: 2]
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=FP16):
            loss = loss_of(ddp, x, y)
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    @parwrap.amp(dtype="fp16")
    @parwrap.distributed
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(data):
            loss_of(model, x, y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return model

    assert same(model.state_dict(), train().state_dict())


@pytest.mark.ranks(2)
def test_ranks_that_leave_early_and_come_back_have_the_state_of_the_others():
    @parwrap.distributed
    @parwrap.amp(**LOW)
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches(6 if parwrap.rank() else 3, overflowing=(4,)):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        parwrap.barrier()
        return model.state_dict(), parwrap.amp_state().scale, parwrap.amp_state().skipped_steps

    one, other = parwrap.gather(train())

    assert same(one, other)
    assert (512.0, 1) == one[1:]


@pytest.mark.ranks(2)
def test_branches_that_differ_by_rank_average_true_scale_gradients():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with parwrap.distributed(), parwrap.amp(**LOW):
        optimizer = torch.optim.SGD([first, second], lr=0.0)
        for times in (1, 2, 3, 4):
            mine = first if parwrap.rank() == 0 else second
            (mine * 2).sum().backward()

            assert ([1.0 * times] * 3, [1.0 * times] * 3) == (first.grad.tolist(), second.grad.tolist())
            optimizer.step()
