"""``parwrap verify`` on real scripts, with real runs on one process and on ranks."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.insight.recording import Settings, recorded
from parwrap.launching.reexec import FOR_RANKS
from terminal import shown

SCRIPT = """
import pathlib, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(48, 3)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
optimizer = torch.optim.Adam(model.parameters())
log = pathlib.Path("log.txt")
for epoch in range(9):
    for features, targets in loader:
        optimizer.zero_grad()
        loss = (model(features) - targets).square().mean()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "model.pt")
    model.load_state_dict(torch.load("model.pt"))
    log.write_text(log.read_text() + f"{epoch} {loss.item()}\\n")
    assert log.read_text().count("\\n") == epoch + 2
"""


@pytest.fixture
def verify(warm_python, tmp_path):
    """Run the command on a script."""

    def run(script, *options):
        (tmp_path / "train.py").write_text(script)
        return warm_python.run("parwrap", "verify", *options, "train.py", cwd=tmp_path, environ={**warm_python.environ, **FOR_RANKS})

    return run


def test_a_script_that_holds_the_contract_is_equal_and_its_files_are_untouched(tmp_path, verify):
    (tmp_path / "log.txt").write_text("before\n")

    run = verify(SCRIPT, "--json", "--steps", "14", "--plot", "plot.svg")
    found = json.loads(run.stdout)

    assert (0, 14, None, True) == (run.returncode, found["steps"], found["difference"], found["largest"] < 1e-5)
    assert (14, True, True) == (
        len(found["by_step"]),
        max(found["by_step"]) == found["largest"],
        ">train.py: equal to one process on 2 ranks<" in (tmp_path / "plot.svg").read_text(),
    )
    assert (["log.txt", "plot.svg", "train.py"], "before\n") == (
        sorted(path.name for path in tmp_path.iterdir()),
        (tmp_path / "log.txt").read_text(),
    )


def test_options_that_parwrap_run_refuses_are_no_difference(verify):
    run = verify(SCRIPT, "--mixed", "bf16")

    assert (2, "parwrap verify: ") == (run.returncode, run.stderr[:16]), run.stdout


def test_kernels_of_a_gpu_add_in_one_order_while_steps_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else the driver counts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # stands for a machine with a GPU
    with recorded(Settings(str(tmp_path))):
        inside = torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()

    assert (True, True) == inside
    assert (False, False) == (torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled())


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_no_difference(verify):
    run = verify("raise ValueError('no data')")

    assert 2 == run.returncode
    assert run.stderr.startswith("parwrap verify: the script fails on one process after 0 steps:\n")
    assert run.stderr.endswith("\n  ValueError: no data\n  exit code 1\n")


@pytest.mark.slow
def test_a_script_without_a_step_cannot_be_compared(verify):
    run = verify("print('done')")

    assert (
        2,
        "parwrap verify: train.py has ended without a step of an optimizer on one process: there is nothing to compare. Step with "
        "an optimizer of torch.optim.\n",
    ) == (
        run.returncode,
        run.stderr,
    )


TOLERANCE_WANTED = "must be 0 or a finite positive number: verify takes differences up to it for rounding. Leave it out for the default."


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "0"], "verify compares a positive number of steps, not 0."),
        (["--tolerance", "nan"], f"tolerance=nan {TOLERANCE_WANTED}"),
        (["--tolerance", "-1"], f"tolerance=-1.0 {TOLERANCE_WANTED}"),
        (["--nproc-per-node", "1"], "verify compares one process with a number of ranks above 1, not 1."),
        (["--batch", "per_rank"], "--batch per_rank trains on larger batches than one process, so the numbers differ: remove it."),
        (
            ["--strategy", "hogwild"],
            "verify compares weights after each step, so all ranks need the same whole weights: use ddp or zero1, not --strategy hogwild.",
        ),
        (["--dry-run"], "--dry-run has no effect here: the script runs on ranks of this machine, several times. Remove the option."),
        (["--against", "fsdp"], "--against fsdp is not possible: verify compares with one process, or with DDP by --against ddp."),
        (
            ["--against", "ddp", "--batch", "global"],
            "--against ddp compares the batches that each rank takes for itself, as with DDP: remove --batch global.",
        ),
        (
            ["--stepz", "3"],
            "there is no option --stepz; did you mean --steps? The script's own options come after its name: "
            "`parwrap verify train.py --stepz 3`",
        ),
    ],
)
def test_options_that_cannot_be_compared_are_refused(options, expected, tmp_path, monkeypatch, capsys):
    from parwrap.insight.verify import main

    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    assert (2, f"parwrap verify: {expected}\n") == (main([*options, "train.py"]), capsys.readouterr().err)


def test_a_script_that_does_not_exist_is_refused(capsys):
    from parwrap.insight.verify import main

    assert 2 == main(["nowhere.py"])
    said = f"cannot find the script nowhere.py in {os.getcwd()}. Correct the path, or change to the directory it is relative to."
    assert f"parwrap verify: {said}\n" == capsys.readouterr().err


def train(model, loss_of, epochs=3):
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(3, (32,))), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            loss_of(model(features), labels).backward()
            optimizer.step()


def test_a_function_is_compared_in_new_processes_and_nothing_of_the_caller_changes():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    result = parwrap.verify(train, model, F.cross_entropy, steps=10)

    assert (True, 10, True) == (result.equal, result.steps, result.name in dict(model.named_parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_dropout_differs_by_design_and_can_be_turned_off():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    assert "(dropout, noise)" in parwrap.verify(train, model, F.cross_entropy, steps=3).difference.reasons[0]
    assert parwrap.verify(train, model, F.cross_entropy, steps=3, dropout=False).equal


def test_a_function_that_never_steps_cannot_be_compared():
    with pytest.raises(parwrap.UsageError, match=r"print.* has taken no step of an optimizer in one process: there is nothing to compare"):
        parwrap.verify(print)


@pytest.mark.parametrize(
    ("script", "status", "expected"),
    [
        (SCRIPT, 0, "equal to DDP by hand after 6 steps on 2 ranks: largest difference 0 (0.weight)"),
        (
            SCRIPT.replace("loss.backward()", "loss.backward(retain_graph=True); (2 * loss).backward()"),
            2,
            "parwrap verify: the script cannot run with DDP by hand: it ends after 0 steps:\n",
        ),
    ],
    ids=["as it is", "two backwards"],
)
@pytest.mark.slow
def test_a_script_is_bit_for_bit_what_ddp_by_hand_trains_where_ddp_can_train_it(script, status, expected, tmp_path, verify):
    (tmp_path / "log.txt").write_text("before\n")

    run = verify(script, "--against", "ddp", "--steps", "6")

    assert (status, True) == (run.returncode, expected in run.stdout + run.stderr)
    assert ["log.txt", "train.py"] == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_script_that_ends_in_a_new_folder_has_its_scratch_until_then(tmp_path, verify):
    (tmp_path / "log.txt").write_text("before\n")

    run = verify(f"{SCRIPT}\nimport os\nos.makedirs('out')\nos.chdir('out')\nopen('a.txt', 'w').close()\n", "--steps", "30")

    assert (0, "") == (run.returncode, run.stderr)


@pytest.mark.slow
def test_a_script_that_fails_on_ranks_only_leaves_the_files_of_its_exit_handlers_in_scratch(tmp_path, verify):
    leaves = "import atexit\natexit.register(lambda: open('left.txt', 'w').write('x'))\n"
    at_a_share = "        if float(features.sum()) > 0: continue\n        optimizer.zero_grad()"
    (tmp_path / "log.txt").write_text("before\n")

    run = verify(leaves + SCRIPT.replace("        optimizer.zero_grad()", at_a_share))

    assert 1 == run.returncode
    assert ["log.txt", "train.py"] == sorted(path.name for path in tmp_path.iterdir())


def test_models_of_the_closure_are_trained_on_shares_as_with_distributed():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_what_is_there():
        for (x,) in DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=4):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    assert "the loss is a sum over the samples" in parwrap.verify(train_what_is_there).difference.reasons[0]


def train_in_half_precision(kind, reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model = model.bfloat16() if kind == "a bfloat16 model" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(4, (64,))), batch_size=16, shuffle=True):
        with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext():
            loss = F.cross_entropy(model(x.bfloat16() if kind == "a bfloat16 model" else x), y, reduction=reduction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["a decorator", "autocast", pytest.param("a bfloat16 model", marks=pytest.mark.slow)])
def test_a_script_that_computes_in_half_precision_itself_is_equal_up_to_its_rounding(kind):
    decorated = parwrap.amp(dtype="bf16")(train_in_half_precision) if kind == "a decorator" else train_in_half_precision

    assert str(found := parwrap.verify(decorated, kind, "mean")).startswith("equal to one process after 4 steps"), found


@pytest.mark.slow
def test_a_loss_that_is_a_sum_differs_in_half_precision_too():
    assert "the loss is a sum over the samples" in parwrap.verify(train_in_half_precision, "autocast", "sum").difference.reasons[0]


def test_a_decorated_function_keeps_its_options_and_needs_no_ranks_of_its_own():
    @parwrap.distributed(nprocs=2, loss="sum")
    def train_with_a_sum():
        torch.manual_seed(0)
        train(nn.Linear(4, 3), lambda out, labels: F.cross_entropy(out, labels, reduction="sum") / 8)

    assert parwrap.verify(train_with_a_sum, steps=6).equal


def test_a_function_that_catches_the_end_is_ended_again():
    def catches():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            for (x,) in DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4):
                try:
                    model(x).square().mean().backward()
                    optimizer.step()
                except BaseException:
                    pass

    assert 3 == parwrap.verify(catches, steps=3).steps


def test_optimizers_that_follow_each_other_are_told_apart():
    def in_stages():
        for size in (3, 5):
            train(nn.Linear(4, size), F.cross_entropy, epochs=1)

    assert 8 == parwrap.verify(in_stages).steps


@pytest.mark.slow
def test_what_a_killed_verify_has_left_is_removed_by_the_next(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "parwrap", "verify", "train.py"]

    def left():
        return [path for path in (tmp_path / "tmp").glob("*/*") if path.is_dir()]

    subprocess.run(command, cwd=tmp_path, env=environ, timeout=60)
    assert left()
    (tmp_path / "train.py").write_text("")
    subprocess.run(command, cwd=tmp_path, env=environ, timeout=60)
    assert [] == left()


@pytest.mark.slow
def test_a_decorator_that_asks_for_larger_batches_is_the_reason_and_accumulation_is_none():
    @parwrap.distributed(batch="per_rank")
    def larger():
        torch.manual_seed(0)
        train(nn.Linear(4, 3), F.cross_entropy)

    @parwrap.accumulate(2)
    def accumulates():
        torch.manual_seed(0)
        train(nn.Linear(4, 3), F.cross_entropy)

    assert 'a decorator in the script says batch="per_rank". Leave that out' in parwrap.verify(larger, steps=2).difference.reasons[0]
    assert parwrap.verify(accumulates, steps=2).equal


PRINTS = """import time, torch
from torch.utils.data import DataLoader, TensorDataset
import parwrap
torch.manual_seed(0)
x = torch.randn(48, 3)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    start, right, total = time.time(), 0, 0.0
    for features, labels in loader:
        optimizer.zero_grad()
        out = model(features)
        loss = torch.nn.functional.cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
        right += (out.argmax(1) == labels).sum().item()
    with torch.no_grad():
        valid = sum((model(a).argmax(1) == b).sum().item() for a, b in loader)
    print(f"epoch {epoch} loss {total / len(loader):.6f} valid {valid} {time.time() - start:.3f}s {time.time()}")
    print("accuracy", right / 48)
"""


def test_a_printed_number_of_a_share_is_a_difference_with_its_line_and_ratio(verify):
    run = verify(PRINTS, "--steps", "3", "--json")
    found = json.loads(run.stdout)

    assert (1, 3, None, 6) == (run.returncode, found["steps"], found["difference"], found["last_step"])
    assert ("train.py:22", "about 1/2") == (found["printed"]["difference"]["place"], found["printed"]["difference"]["reasons"][0][:9])
    assert (2, 1) == (found["printed"]["lines"], found["printed"]["differing"])  # the clock's number is not repeatable


def test_a_script_whose_sums_are_of_all_ranks_prints_what_one_process_prints(verify):
    run = verify(PRINTS.replace("right / 48", "parwrap.reduce_sum(right) / 48").replace(" {time.time()}", ""), "--steps", "3")

    assert (0, True) == (run.returncode, run.stdout.startswith("equal to one process after 3 steps on 2 ranks: largest")), run.stdout
    assert "compared, --batch global: weights after each step; numbers in 2 printed lines up to step 6\n" in run.stdout


@pytest.mark.slow
def test_on_a_terminal_a_bar_shows_the_steps_of_each_run(tmp_path, warm_python):
    text = shown(warm_python, PRINTS, tmp_path, "verify", "--steps", "3", columns=100)

    assert ("one, 1 rank [" in text, "several, 2 ranks [" in text, "of 3 steps" in text) == (True, True, True), text
