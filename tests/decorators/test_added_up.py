"""Names that a training loop adds up and the script uses after it, as ``explain`` reads them from the source."""

import pytest

from parwrap.decorators.added_up import added_up

METER = """class Meter:
    def __init__(self):
        self.sum = 0
    def update(self, value, n):
        self.sum += value * n
    def show(self, value):
        print(value)
"""


@pytest.mark.parametrize(
    ("body", "after", "expected"),
    [
        ("right += (model(x) == y).sum().item()", "print(right)", ["right"]),
        ("right = right + (model(x) == y).sum().item()", "print(right)", ["right"]),
        ("out = model(x)\nright += (out == y).sum()", "return right", ["right"]),
        ("if model(x).argmax() == y: right += 1", "print(right)", ["right"]),
        ("for a, b in zip(model(x), y): counts[b] += 1", "print(counts)", ["counts"]),
        ("self.right += len(x)", "print(self.right)", ["self.right"]),
        ("outputs.append(model(x))", "auc(torch.cat(outputs))", ["outputs"]),
        ("meter.update(loss_of(x), len(x))", "print(meter.sum)", ["meter"]),
        ("loss = loss_of(x)\ntotal += loss.item()\nloss.backward()", "print(total)", ["total"]),
        ("loss = loss_of(x)\nloss.backward()\ntotal += loss.item() * x.size(0)", "print(total)", ["total"]),
        ("loss = a(x) + b(x)\npart = a(x)\nloss.backward()\ntotal += loss.item(); parts += part.item()", "print(total, parts)", ["parts"]),
    ],
)
def test_what_is_added_up_from_the_batches_and_used_after_the_loop_is_found(body, after, expected):
    assert expected == names(body, after)


@pytest.mark.parametrize(
    ("body", "after"),
    [
        pytest.param("steps += 1", "print(steps)", id="counts batches"),
        pytest.param("if i % 10 == 0: steps += 1", "print(steps)", id="the index decides"),
        pytest.param("loss = loss_of(x)\nloss.backward()\ntotal += loss.item()", "print(total / steps)", id="a loss after its backward"),
        pytest.param("loss = loss_of(x)\n(loss / 4).backward()\ntotal += loss.item()", "print(total)", id="divided"),
        pytest.param("loss = loss_of(x)\nscaler.scale(loss).backward()\nlosses.append(loss.item())", "print(losses)", id="scaled"),
        pytest.param("right += len(x)", "pass", id="not used"),
        pytest.param("right += len(x)", "right = parwrap.total(right, of=loader)\nprint(right)", id="total"),
        pytest.param("right += len(x)", "right, n = parwrap.reduce_sum((right, n))\nprint(right)", id="in a tuple"),
        pytest.param("outputs.append(model(x))", "print(torch.cat(gather(outputs)))", id="gathered"),
        pytest.param("right += parwrap.reduce_sum(len(x))", "print(right)", id="added up in the loop"),
        pytest.param("meter.show(x)", "print(meter)", id="a method that adds nothing"),
        pytest.param("bar.update(len(x))", "bar.close()", id="an object of another file"),
    ],
)
def test_what_is_right_on_all_ranks_is_not_listed(body, after):
    assert [] == names(body, after)


def names(body, after):
    lines = [f"        {line}" for line in body.splitlines()], [f"    {line}" for line in after.splitlines()]
    head = [
        *METER.splitlines(),
        "def train(self, loader):",
        "    meter, right, total = Meter(), 0, 0.0",
        "    for i, (x, y) in enumerate(loader):",
    ]
    return [each.name for each in added_up("\n".join([*head, *lines[0], *lines[1]]), len(head))]


def test_another_loop_and_source_that_is_no_python_have_none():
    source = "for x in loader:\n    n += len(x)\nprint(n)\n"

    assert (["n"], [], []) == ([each.name for each in added_up(source, 1)], added_up(source, 2), added_up("!ls\n" + source, 2))
