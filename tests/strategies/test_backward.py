"""What a backward leaves in gradients and in the loss (contract, rule 5 and its small print), against the formula."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import LockstepError, UsageError


def rank():
    return parwrap.rank()


def batches(count=4):
    """Each rank's batch is full of numbers of its own: 1 on rank 0, 2 on rank 1."""
    return parwrap.replicate(DataLoader(TensorDataset(torch.ones(2 * count, 3)), batch_size=2))


def scale():
    return float(rank() + 1)


MEAN = 1.5
"""The mean of 1 and 2."""


def distributed(function):
    """Run it as a decorated function runs."""
    return parwrap.distributed(function)()


def model_and_optimizer(build=lambda: nn.Linear(3, 1, bias=False), lr=0.0):
    torch.manual_seed(0)
    model = build()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


# the loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_becomes_the_mean_over_ranks(dtype):
    def run():
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        torch.optim.SGD([weight], lr=0.0)
        loss = (weight * scale() / 3).sum()
        loss.backward()
        return loss.item()

    expected = float((torch.tensor(1 / 3, dtype=dtype) + torch.tensor(2 / 3, dtype=dtype)) / 2)

    assert expected == pytest.approx(distributed(run), abs=0 if dtype == torch.float64 else 1e-7, rel=1e-15)


@pytest.mark.ranks(2)
def test_the_argument_of_a_grad_scaler_becomes_the_mean_too():
    def run():
        model, _ = model_and_optimizer()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = (model.weight.sum() * 0 + scale()).sum()
        scaled = scaler.scale(loss)
        scaled.backward()
        return loss.item(), scaled.item()

    assert (MEAN, 8 * MEAN) == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_a_graph_that_is_kept_keeps_its_loss(options):
    def run():
        model, _ = model_and_optimizer()
        square = (model.weight.sum() * 0 + scale()).square().sum()
        loss = square.sqrt()  # its backward uses its own value
        loss.backward(**options)
        return loss.item()

    assert scale() == distributed(run)


@pytest.mark.ranks(2)
def test_a_view_keeps_its_numbers():
    def run():
        model, _ = model_and_optimizer()
        losses = model.weight.sum() * 0 + torch.full((2,), scale())
        losses[0].backward()
        return losses.tolist()

    assert [scale()] * 2 == distributed(run)


@pytest.mark.ranks(2)
def test_a_quotient_is_averaged_and_so_is_the_loss_before_it():
    def run():
        model, _ = model_and_optimizer()
        loss = model.weight.sum() * 0 + scale()
        quotient = loss / 4
        quotient.backward()
        return loss.item(), quotient.item()

    assert (MEAN, MEAN / 4) == distributed(run)


@pytest.mark.ranks(2)
def test_a_plateau_scheduler_takes_rank_zeros_metric():
    def run():
        _, optimizer = model_and_optimizer(lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for metric in (1.0, 2.0 if rank() == 0 else 0.5):  # rank 1 alone would go on
            scheduler.step(metric)
        return optimizer.param_groups[0]["lr"]

    assert 0.5 == distributed(run)


# gradients


def gradients_of(build, forward):
    """The gradients of one backward over ranks whose losses are scaled by 1 and 2."""

    def run():
        model, _ = model_and_optimizer(build)
        forward(model)
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    return distributed(run)


@pytest.mark.ranks(2)
def test_gradients_are_the_mean():
    (grad,) = gradients_of(lambda: nn.Linear(3, 1, bias=False), lambda model: (model(torch.ones(1, 3)).sum() * scale()).backward())

    assert [[MEAN] * 3] == grad.tolist()


@pytest.mark.ranks(2)
def test_a_parameter_that_one_rank_reaches_gets_its_part_and_one_that_none_reaches_keeps_none():
    def forward(model):
        model[rank()](torch.ones(1, 3)).sum().backward()

    first, second, never = gradients_of(lambda: nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(3)), forward)

    assert [[0.5] * 3] == first.tolist() == second.tolist()
    assert never is None


@pytest.mark.ranks(2)
def test_a_frozen_parameter_takes_no_part_and_joins_when_it_is_thawed():
    def run():
        model, optimizer = model_and_optimizer(lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)))
        grads = []
        for frozen in (False, True, False):
            model[0].requires_grad_(not frozen)
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).sum() * scale()).backward()
            grads.append(None if model[0].weight.grad is None else model[0].weight.grad.clone())
        return grads

    first, frozen, thawed = distributed(run)

    assert frozen is None
    assert torch.equal(first, thawed)
    assert all(torch.equal(first, other) for other in parwrap.gather(thawed))


@pytest.mark.ranks(2)
def test_a_frozen_parameter_of_another_optimizer_joins_when_it_is_thawed():
    def run():
        first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in (first, second)]
        for frozen in (True, False):
            first.requires_grad_(not frozen)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (second(first(torch.ones(1, 3))).sum() * scale()).backward()
        return first.weight.grad

    grads = parwrap.gather(distributed(run))

    assert grads[0].abs().sum() > 0
    assert torch.equal(*grads)


@pytest.mark.ranks(2)
def test_a_bare_tensor_of_an_optimizer_that_backward_names_is_averaged():
    def run():
        values = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([values], lr=0.0)
        (values.sum() * (1 + parwrap.rank())).backward(inputs=[values])
        optimizer.step()
        return values.grad.tolist()

    assert [1.5] * 3 == distributed(run)


@pytest.mark.ranks(2)
def test_parameters_whose_memory_format_changes_have_their_gradients():
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(parwrap.rank()))

    def run():
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        grads = []
        for layout in (torch.contiguous_format, torch.channels_last):
            model.to(memory_format=layout)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            grads.append(model.weight.grad.contiguous())
        return grads

    contiguous, channels_last = distributed(run)

    torch.testing.assert_close(contiguous, channels_last)


def replaced(model, optimizer):
    """As scripts prune and grow: ``param_groups`` gets another tensor, which no call of torch tells."""
    model.weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(model.weight.detach().clone())


def cast(model, optimizer):
    model.weight.data = model.weight.data.double()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", [replaced, cast])
@pytest.mark.parametrize("options", [{}, {"strategy": "zero1"}, {"strategy": "local_sgd", "every": 1}], ids=["ddp", "zero1", "local_sgd"])
def test_a_parameter_whose_tensor_the_script_replaces_is_averaged(change, options):
    @parwrap.distributed(**options)
    def run():
        model, optimizer = model_and_optimizer(lr=1.0)
        nn.init.zeros_(model.weight)
        for step in range(4):
            if step == 2:
                change(model, optimizer)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=model.weight.dtype)).sum() * scale()).backward()
            optimizer.step()
        return model.weight

    assert [[-4 * MEAN] * 3] == run().tolist()


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("clear", [True, False])
def test_another_shape_through_data_is_an_error_that_names_the_parameter_and_the_remedy(clear):
    """As some pruning does: the weight loses an input in the midst of a pass."""

    @parwrap.distributed
    def run():
        model, optimizer = model_and_optimizer(lr=1.0)
        for step in range(4):
            if step == 2:
                model.weight.data = model.weight.data[:, :2].clone()
            if clear:
                optimizer.zero_grad()
            model(torch.ones(1, model.weight.shape[1])).sum().backward()
            optimizer.step()

    said = r"weight .* another shape .*\(1, 2\).*test_backward\.py:\d+.*nn\.Parameter\(values\)"
    with pytest.raises((UsageError, LockstepError), match=f"{said}|A rank has raised an error"):  # the second rank may see the first one's
        run()


@pytest.mark.ranks(2)
def test_hooks_of_a_parameter_without_a_gradient_are_not_called():
    def forward(model):
        model[1].weight.register_hook(lambda grad: grad * 2)
        model[0](torch.ones(1, 3)).sum().backward()

    used, unused = gradients_of(lambda: nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2)), forward)

    assert [[1.0] * 3] == used.tolist()
    assert unused is None


@pytest.mark.ranks(2)
def test_sparse_gradients_are_averaged_and_stay_sparse():
    def build():
        return nn.ModuleList(nn.Embedding(4, 2, sparse=True) for _ in range(2))

    def forward(model):
        (sum(each(torch.tensor([rank()])).sum() for each in model) * scale()).backward()

    for grad in gradients_of(build, forward):
        assert grad.is_sparse
        assert [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]] == grad.to_dense().tolist()


@pytest.mark.ranks(2)
def test_a_model_that_is_cast_is_averaged_in_its_new_type():
    def run():
        model, optimizer = model_and_optimizer()
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.ones(1, 3, dtype=model.weight.dtype)
            (model(x).sum() * scale()).backward()
            grad = model.weight.grad.clone()
            model.double()
        return grad

    grad = distributed(run)

    assert (torch.float64, [[MEAN] * 3]) == (grad.dtype, grad.tolist())


@pytest.mark.ranks(2)
def test_inputs_of_a_backward_are_all_that_is_averaged():
    def run():
        model, _ = model_and_optimizer(lambda: nn.Linear(3, 1))
        (model(torch.ones(1, 3)).sum() * scale()).backward(inputs=[model.bias])
        return model.weight.grad, model.bias.grad.tolist()

    assert (None, [MEAN]) == distributed(run)


@pytest.mark.ranks(2)
def test_gradients_with_a_graph_are_averaged():
    def run():
        model, _ = model_and_optimizer()
        model(torch.ones(1, 3)).square().sum().mul(scale()).backward(create_graph=True)
        return model.weight.grad.detach().clone(), model.weight.detach().sum()

    grad, total = distributed(run)

    torch.testing.assert_close(grad, torch.full((1, 3), 2 * MEAN * float(total)))


@pytest.mark.ranks(2)
def test_no_sync_adds_up_and_the_next_backward_averages_the_sum():
    def run():
        model, _ = model_and_optimizer(lambda: nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2)))
        x = torch.ones(1, 3)
        (model[0](x) + model[1](x)).sum().backward()
        model.zero_grad()
        with parwrap.no_sync():
            (model[1](x).sum() * scale()).backward()
        local = model[1].weight.grad.clone()
        (model[0](x).sum() * scale()).backward()  # it does not reach the second model
        return local.tolist(), model[0].weight.grad.tolist(), model[1].weight.grad.tolist()

    assert ([[scale()] * 3], [[MEAN] * 3], [[MEAN] * 3]) == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("create_graph", [False, True])
def test_no_sync_may_come_before_the_first_backward(create_graph):
    def run():
        model, _ = model_and_optimizer(lambda: nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2)))
        x = torch.ones(1, 3)
        with parwrap.no_sync():
            (model[1](x).sum() * scale()).backward()
        (model[0](x).sum() * scale()).backward(create_graph=create_graph)
        return [each.weight.grad.tolist() for each in model]

    assert [[[MEAN] * 3]] * 2 == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("holds_more", [0, 1])
def test_parameters_without_an_optimizer_join_when_they_are_first_reached(holds_more):
    held = []

    def run():
        model, optimizer = model_and_optimizer()
        held.append(nn.Linear(1, 1))  # rank 0 or 1 drops it
        other = nn.Linear(3, 1, bias=False)
        if parwrap.rank() != holds_more:
            held.clear()
        for step in range(3):
            optimizer.zero_grad()
            other.zero_grad()
            loss = model(torch.ones(1, 3)).sum()
            ((loss + other(torch.ones(1, 3)).sum() if step else loss) * scale()).backward()
            optimizer.step()
            if step:
                assert [[MEAN] * 3] == other.weight.grad.tolist()
        return model.weight.grad.tolist()

    assert [[MEAN] * 3] == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("one_rank", [False, True])
def test_the_parameters_of_an_auxiliary_loss_join_when_it_begins(one_rank):
    def run():
        model, first = model_and_optimizer()
        other = nn.Linear(3, 1, bias=False)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        grads = []
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            loss = model(torch.ones(1, 3)).sum()
            if step >= 2 and not (one_rank and rank() == 1 and step == 2):
                loss = loss + other(torch.ones(1, 3)).sum() * scale()
            loss.backward()
            grads.append(None if other.weight.grad is None else other.weight.grad.tolist())
        return grads

    assert [None, None, [[0.5 if one_rank else MEAN] * 3], [[MEAN] * 3]] == distributed(run)


@pytest.mark.ranks(2)
def test_a_hand_written_sgd_without_an_optimizer_is_averaged():
    def run():
        weight = torch.ones(3, requires_grad=True)
        for _ in range(3):
            (weight * scale()).sum().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad = None
        return weight.tolist()

    assert [pytest.approx(1 - 3 * 0.1 * MEAN)] * 3 == distributed(run)


# buffers


class Codebook(nn.Module):
    """A buffer that each training forward changes by what is in the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.mean() * scale()
        return self.linear(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ([3, 3], r"differ between ranks: none on rank 0 and running_mean, torch.float32 of shape \(3,\), on rank 1 \(sending"),
        ([4], r": running_mean, torch.float32 of shape \(3,\), on rank 0 and running_mean, torch.float32 of shape \(4,\), on rank 1"),
    ],
)
def test_buffers_in_eval_mode_that_differ_are_refused(widths, text):
    def run():
        model, optimizer = model_and_optimizer()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        norms = nn.Sequential(*(nn.BatchNorm1d(width) for width in ([3] if rank() == 0 else widths))).eval()
        with torch.no_grad():
            list(batches())
        del norms

    with pytest.raises(parwrap.errors.RankMismatchError, match=text):
        distributed(run)


@pytest.mark.ranks(2)
def test_buffers_that_training_changes_are_rank_zeros():
    def run():
        model, optimizer = model_and_optimizer(Codebook)
        for (x,) in batches(5):
            model(x).sum().backward()
            optimizer.step()
        return model.seen.item()

    assert 5.0 == distributed(run)


@pytest.mark.ranks(2)
def test_batch_norms_are_evaluated_with_rank_zeros_statistics():
    def run():
        model, optimizer = model_and_optimizer(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
        for (x,) in batches():
            model(x * scale() + torch.arange(2.0)[:, None] * scale()).sum().backward()
            optimizer.step()
        apart = parwrap.gather(model[0].running_mean)
        model.eval()
        with torch.no_grad():
            for _ in batches():
                pass
        return torch.equal(*apart), torch.equal(apart[0], model[0].running_mean)

    assert (False, True) == distributed(run)


# errors


@pytest.mark.ranks(2)
def test_an_error_inside_a_backward_cannot_be_passed_over_and_keeps_nothing_alive():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            activations = torch.ones(1)
            alive.append(weakref.ref(activations))
            raise ValueError("out of memory")

    alive = []

    def run():
        model, _ = model_and_optimizer()
        with contextlib.suppress(ValueError):
            Fails.apply(model(torch.ones(1, 3))).sum().backward()
        gc.collect()
        assert alive[0]() is None
        model(torch.ones(1, 3)).sum().backward()

    # the slower rank may see first that the other has left its backward
    with pytest.raises(parwrap.LockstepError, match=r"has raised before.*\(ValueError: out of memory\)|the ranks have come apart"):
        distributed(run)


@pytest.mark.ranks(2)
def test_a_backward_on_rank_zero_alone_is_an_error():
    def run():
        model, _ = model_and_optimizer()
        if rank() == 0:
            parwrap.rank_zero_only(lambda: model(torch.ones(1, 3)).sum().backward())()

    if rank() == 0:
        with pytest.raises(parwrap.UsageError, match=r"test_backward.py:\d+ runs a backward inside @parwrap.rank_zero_only"):
            distributed(run)
    else:
        with pytest.raises(parwrap.LockstepError, match="rank 0 has raised an error"):
            distributed(run)


@pytest.mark.ranks(2)
def test_two_backwards_at_a_time_are_an_error():
    def run():
        model, _ = model_and_optimizer()
        raised = []

        def other():
            try:
                model(torch.ones(1, 3)).sum().backward()
            except parwrap.UsageError as error:
                raised.append(str(error))

        def while_backward_runs(grad):
            thread = threading.Thread(target=other, name="second")
            thread.start()
            thread.join()

        out = model(torch.ones(1, 3))
        out.register_hook(while_backward_runs)
        out.sum().backward()
        return raised

    (text,) = distributed(run)

    assert "runs a backward in thread 'second' while thread 'MainThread' runs another one" in text


@pytest.mark.ranks(2)
def test_ranks_that_train_different_models_are_an_error():
    def run():
        model, _ = model_and_optimizer(lambda: nn.Linear(3, 1 + rank()))
        model(torch.ones(1, 3)).sum().backward()

    text = r"the ranks train different parameters in the backward at test_backward.py:\d+: one of shape \(1, 3\) .* on rank 0 and one of "
    text += r"shape \(2, 3\)"
    with pytest.raises(parwrap.RankMismatchError, match=text):
        distributed(run)


# what the review of the first tests found


@pytest.mark.ranks(2)
def test_an_infinite_loss_stays_infinite():
    def run():
        model, _ = model_and_optimizer()
        loss = (model.weight.sum() * 0 + scale()) / torch.zeros(())
        loss.backward()
        return loss.item()

    assert float("inf") == distributed(run)


@pytest.mark.ranks(2)
def test_an_error_of_the_script_in_a_backward_is_not_its_own_cause():
    def run():
        model, _ = model_and_optimizer()
        loss = model.weight.square().sum()
        loss.backward()
        loss.backward()

    with pytest.raises(RuntimeError, match="backward through the graph a second time") as caught:
        distributed(run)

    assert caught.value.__cause__ is None


@pytest.mark.ranks(2)
def test_an_error_in_a_backward_with_a_graph_cannot_be_passed_over_either():
    def run():
        model, _ = model_and_optimizer()
        out = model(torch.ones(1, 3))
        out.register_hook(lambda grad: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            out.sum().backward(create_graph=True)
        model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(parwrap.LockstepError, match=r"has raised before.*\(ZeroDivisionError|the ranks have come apart"):
        distributed(run)


@pytest.mark.ranks(2)
def test_a_scope_leaves_nothing_of_a_model_alive():
    alive = []

    def run():
        for _ in range(3):
            model, optimizer = model_and_optimizer(lambda: nn.Sequential(Codebook(), nn.BatchNorm1d(1)))
            alive.append(weakref.ref(model[0].linear.weight))
            for (x,) in batches():
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            copy.deepcopy(model).eval()

    distributed(run)
    gc.collect()

    assert [None] * 3 == [weight() for weight in alive]


@pytest.mark.ranks(2)
def test_no_sync_counts_parts_of_batches_by_their_size():
    data = TensorDataset(torch.arange(1.0, 16.0)[:, None])  # batches of 5: parts of 3 and 2

    def run(context):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for number, (x,) in enumerate(DataLoader(data, batch_size=5)):
            with context() if number % 2 == 0 else contextlib.nullcontext():
                (weight * x).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return weight.item()

    expected = run(contextlib.nullcontext)

    assert expected == pytest.approx(parwrap.distributed(batch="global")(run)(parwrap.no_sync), abs=1e-6)


@pytest.mark.ranks(2)
def test_a_copy_that_only_rank_zero_evaluates_is_nobody_elses():
    def run():
        model, optimizer = model_and_optimizer(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
        for (x,) in batches():
            model(x).sum().backward()
            optimizer.step()
        parwrap.rank_zero_only(lambda: copy.deepcopy(model).eval())()
        model.eval()
        with torch.no_grad():
            return len(list(batches()))

    assert 4 == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [parwrap.rank_zero_only, parwrap.rank_zero_first])
def test_inside_a_block_of_rank_zero_passes_are_whole_and_a_backward_is_an_error(block):
    def run():
        model, optimizer = model_and_optimizer()
        loader = DataLoader(range(8), batch_size=2)

        @block
        def look():
            with pytest.raises(parwrap.UsageError, match=r"test_backward.py:\d+ runs a backward inside @parwrap.rank_zero_only"):
                model(torch.ones(1, 3)).sum().backward()
            return len(list(loader))

        whole = look()
        share = 0
        for _ in loader:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            share += 1
        return whole, share

    assert (4 if block is parwrap.rank_zero_first or rank() == 0 else None, 2) == distributed(run)


@pytest.mark.ranks(2)
def test_with_a_global_batch_hooks_and_functional_gradients_are_of_this_ranks_part():
    """Parts of 3 and 2 samples: the mean over each is its rank's, and only what a backward leaves is the mean of the batch."""
    samples = torch.arange(1.0, 6.0)
    hooked, alone, lengths = [], [], []

    def run():
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for x in DataLoader(samples, batch_size=5):
            alone.append(torch.autograd.grad((weight * x).mean(), weight)[0].item())
            lengths.append(len(list(x)))
            handle = weight.register_hook(lambda grad: hooked.append(grad.item()))
            (weight * x).mean().backward()
            handle.remove()
            optimizer.step()
        return weight.grad.item()

    mean = parwrap.distributed(batch="global")(run)()
    parts, (first, second) = parwrap.gather((alone, lengths)), parwrap.gather(hooked[0])

    assert samples.mean().item() == pytest.approx(mean)
    assert [2 * 6 / 5, 4.5 * 4 / 5] == pytest.approx([first, second])
    assert [3, 2] == [length for _, (length,) in parts]
    assert samples.sum().item() == pytest.approx(sum(part * length for (part,), (length,) in parts))
