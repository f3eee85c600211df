"""How two recorded runs compare, and the reasons that the records show. No run is needed."""

import math

import pytest
import torch

from parwrap.checks.same_work import WHOLE_WORK
from parwrap.insight.comparison import compared
from parwrap.insight.recording import Recorded, Step

START, GRAD, LR = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25]), 0.1
BY_DESIGN = "this differs by design"


def step(grad=GRAD, before=START, **others):
    """A first step of SGD with that gradient."""
    options = {"samples": 8, "data": [3.0, 5.0], "options": [{"lr": LR}], "number": 0, "lr": LR, "names": ["fc.weight"], **others}
    rate, names = options.pop("lr"), options.pop("names")
    fixed = "train.py:7", options.pop("number"), "SGD", options.pop("options"), names, [len(before)]
    return Step(*fixed, [before], [grad], [before - rate * grad], **options)


def found(one, several, ranks=2, synchronized=True, half=False, said="", batch_norms=False, failed=False, tolerance=None):
    runs = Recorded(one, half=half), Recorded(several, batch_norms, half, failed)
    return compared(*runs, ranks, synchronized=synchronized, said=said, tolerance=tolerance)


def test_rounding_may_add_up_from_step_to_step():
    drifting = [step(before=START * (1 + each * 3e-6)) for each in range(6)]

    assert found([step()] * 6, drifting, tolerance=4e-6).equal
    assert not found([step()] * 6, drifting, tolerance=1e-6).equal


def test_equal_runs_are_equal_and_the_largest_difference_is_named():
    result = found([step()] * 3, [step(GRAD + 2e-6)] * 3)

    assert (True, 3, "fc.weight") == (result.equal, result.steps, result.name)
    assert math.isclose(0.5 * 2e-6 * LR, result.largest, rel_tol=0.2)  # beside the largest value, which is 2
    assert (
        f"equal to one process after 3 steps on 2 ranks: largest difference {result.largest:.1g} (fc.weight)" == str(result).splitlines()[0]
    )


def test_the_first_step_that_differs_is_named_with_both_values():
    result = found([step(), step()], [step(), step(GRAD + torch.tensor([0.0, 1.0]))])

    assert (1, 2, "train.py:7", "fc.weight[1]") == (result.steps, result.difference.step, result.difference.place, result.difference.what)
    assert (pytest.approx(-2.025), pytest.approx(-2.125)) == (result.difference.one, result.difference.several)


def test_differences_are_measured_after_the_first_step_that_differs_too():
    other = step(GRAD + torch.tensor([0.0, 1.0]))
    none = step(torch.tensor([0.0, math.nan]))
    result = found([step()] * 4, [step(), other, step(before=START + 1), none])

    assert (2, 0.0) == (result.difference.step, result.by_step[0])
    after = START - LR * GRAD
    assert [pytest.approx(LR / 2.025, rel=1e-5), pytest.approx(1 / float(after.abs().max()), rel=1e-5), None] == result.by_step[1:]


@pytest.mark.parametrize(
    ("expected", "one", "several", "context"),
    [
        ("1/2 of that of one process: the loss is a sum", {}, {"grad": GRAD / 2}, {}),
        ("1/4 of that of one process: the loss is a sum", {}, {"grad": GRAD / 4}, {"ranks": 4}),
        ("0.8 times that of one process: the loss is divided by a number other than that of its samples", {}, {"grad": GRAD * 0.8}, {}),
        ("lr of SGD is 0.1 on one process and 0.2 on 2 ranks", {}, {"grad": GRAD * 2, "options": [{"lr": 0.2}]}, {}),
        ("the weights differ before anything is trained", {}, {"before": START + 1}, {}),
        ("trains on 8 samples on one process and on 9 on 2 ranks", {}, {"grad": -GRAD, "samples": 9}, {}),
        ("the runs take different branches: a number that was computed from a share", {}, {"grad": -GRAD, "passes": 1}, {}),
        (
            "the step follows 6 batches on one process and 8 on 2 ranks",
            {"batches": 6},
            {"grad": -GRAD, "samples": 11, "batches": 8, "read": 2},
            {},
        ),
        ("half precision rounds sums over other parts of a batch in another way", {}, {"grad": GRAD.flip(0)}, {"half": True}),
        ("all ranks do the same work", {}, {"grad": -GRAD, "samples": 16, "data": [6.0, 10.0]}, {}),
        ("all ranks do the same work", {}, {"grad": -GRAD}, {"said": f"parwrap: all ranks compute the same losses at 3: {WHOLE_WORK}"}),
        ("the runs take different branches", {"read": 3}, {"grad": -GRAD, "read": 4}, {}),
        ("the ranks read other samples than one process", {}, {"grad": GRAD.flip(0), "data": [3.0, 6.0]}, {}),
        (f"(augmentation), by each rank for itself: {BY_DESIGN}", {"draws_reading": True}, {"grad": GRAD.flip(0), "data": [3.0, 6.0]}, {}),
        (f"(dropout, noise), which each rank draws for itself: {BY_DESIGN}", {"draws_training": True}, {"grad": GRAD.flip(0)}, {}),
        ("batch norms use the statistics of each rank's part", {}, {"grad": GRAD.flip(0)}, {"batch_norms": True, "synchronized": False}),
        ("the loss is not a mean over samples", {}, {"grad": GRAD.flip(0)}, {"batch_norms": True}),
        ("the gradients agree, and the optimizer enlarges their rounding", {}, {"grad": GRAD * (1 + 1e-4)}, {"tolerance": 1e-9}),
    ],
)
def test_the_first_reason_is_what_the_records_show(expected, one, several, context):
    reasons = found([step(**one)], [step(**several)], **context).difference.reasons

    assert expected in reasons[0]


def test_values_whose_gradients_are_rounding_are_left_out():
    one, several = (step(torch.tensor([1.0, noise])) for noise in (3e-8, -4e-8))
    one.after[0][1] += 0.1  # Adam makes a step of it
    several.after[0][1] -= 0.1

    result = found([one], [several])

    assert (True, 1) == (result.equal, result.left_out)
    assert str(result).splitlines()[0].endswith("; left out, because gradients are only rounding errors: 1 value")


def test_in_half_precision_more_gradients_are_rounding():
    one, several = (step(torch.tensor([1.0, noise])) for noise in (3e-4, -2e-4))
    one.after[0][1] += 0.1
    several.after[0][1] -= 0.1

    assert (True, False) == (found([one], [several], half=True).equal, found([one], [several]).equal)


def test_values_that_differ_in_the_last_digits_are_shown_with_them():
    result = found([step()], [step(before=START * (1 + 1e-7))], tolerance=0.0)

    assert "fc.weight[1] before the first step is -2 with one process and -2.00000024 with parwrap" in str(result)


def test_a_value_without_any_gradient_is_compared():
    one, several = (step(torch.tensor([1.0, 0.0])) for _ in range(2))
    several.after[0][1] += 1

    assert "fc.weight[1]" == found([one], [several]).difference.what


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_in_one_run_only_differs(value):
    broken = step()
    broken.after[0][1] = value

    assert "fc.weight[1]" == found([step()], [broken]).difference.what
    assert found([broken], [broken]).equal


def test_other_steps_are_a_difference():
    result = found([step(), step()], [step()])

    assert (2, "the number of steps", 2, 1) == (
        result.difference.step,
        result.difference.what,
        result.difference.one,
        result.difference.several,
    )
    assert "the runs take different branches" in result.difference.reasons[0]


def test_an_error_on_several_ranks_is_a_difference_with_its_text():
    said = "Traceback (most recent call last):\n  File\nparwrap.errors.LockstepError: the ranks have come apart:\n  rank 0"

    result = found([step(), step()], [step()], said=said, failed=True)

    assert "LockstepError: the ranks have come apart:\n       rank 0" == result.difference.reasons[0]


def test_an_error_after_the_last_step_is_a_difference_too():
    result = found([step()], [step()], said="ValueError: at the end", failed=True)

    assert "the end is after 1 step with one process and after 1 step with an error with parwrap\n  1. ValueError: at the end" in str(
        result
    )


def test_a_gradient_shows_what_a_small_learning_rate_hides():
    result = found([step(lr=1e-9)], [step(GRAD / 2, lr=1e-9)])

    assert ("the norm of the gradient of fc.weight", True) == (result.difference.what, "the loss is a sum" in result.difference.reasons[0])


def test_two_models_with_the_same_names_are_two():
    generator, critic = step(), step(torch.ones(5), torch.zeros(5), number=1)

    assert 4 == found([generator, critic] * 2, [generator, critic] * 2).steps


def test_a_group_of_parameters_that_is_added_later_is_compared():
    def grown(last):
        added = step()
        added.names, added.sizes = ["fc.weight", "head.bias"], [2, 1]
        for each in (added.before, added.grads, added.after):
            each.append(torch.tensor([last]))
        return added

    result = found([step(), grown(0.5)], [step(), grown(0.75)])

    assert (2, "head.bias before the first step", True) == (
        result.difference.step,
        result.difference.what,
        "the weights of an optimizer differ before its first step" in result.difference.reasons[0],
    )


def test_another_optimizer_is_a_difference_with_both_names():
    other = step()
    other.optimizer = "Adam"

    text = str(found([step()], [other]))

    assert "the optimizer that steps is SGD of 1 parameter with one process and Adam of 1 parameter with parwrap" in text


def test_the_place_of_a_value_is_that_in_the_whole_tensor():
    one, several = (step(torch.ones(9), torch.zeros(9)) for _ in range(2))
    one.sizes = several.sizes = [9 * 65_536]
    several.after[0][4] += 1

    assert "fc.weight[36]" == found([one], [several]).difference.what


def test_values_that_are_no_numbers_in_both_runs_are_counted():
    broken = step(torch.tensor([math.nan, 1.0]))

    assert str(found([broken], [broken])).splitlines()[0].endswith("; 1 values are nan or infinite in both")


def test_gradients_that_have_become_rounding_are_no_difference():
    tiny = [step(torch.tensor([1.5e-7, 0.0]), lr=0.0), step(torch.tensor([1.6e-7, 0.0]), lr=0.0)]

    assert found([step(), tiny[0]], [step(), tiny[1]]).equal
