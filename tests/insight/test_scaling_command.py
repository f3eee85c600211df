"""``parwrap scaling`` on a real script, and the numbers that it makes of times."""

import json
import subprocess
import sys

import pytest

from parwrap.insight.scaling import Point, _told, main

SCRIPT = """
import pathlib, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(20):
    for (x,) in DataLoader(TensorDataset(torch.rand(48, 4)), batch_size=8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    pathlib.Path("log.txt").write_text(str(epoch))
"""


@pytest.mark.slow
def test_a_script_is_timed_on_each_number_of_ranks_and_drawn(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "parwrap", "scaling", "--ranks", "1,2", "--steps", "10", "--plot", "speed.svg", "--json", "train.py"]

    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    one, two = json.loads(run.stdout)

    assert (1, 1.0, None, 2) == (one["ranks"], one["efficiency"], one["serial"], two["ranks"])
    assert [8, 16] == [round(each["samples_per_second"] * each["step"]) for each in (one, two)]  # samples of a step on all ranks
    assert two["samples_per_second"] / one["samples_per_second"] / 2 == pytest.approx(two["efficiency"])
    assert all(slow <= fast for slow, fast in (one["spread"], two["spread"]))
    drawn = (tmp_path / "speed.svg").read_text()
    assert all(f">{text}<" in drawn for text in (f"{one['samples_per_second']:,.0f}", f"{two['efficiency']:.0%}", "8 of 10 steps"))
    assert f"train.py: {two['samples_per_second'] / one['samples_per_second']:.2f} times as fast on 2 ranks as on 1" in drawn
    assert ["speed.svg", "train.py"] == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_script_that_ends_before_is_timed_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("range(20)", "range(4)"))

    assert 0 == main(["--steps", "1000", "--json", "train.py"])
    one, two = json.loads(capsys.readouterr().out)
    assert [8, 16] == [round(each["samples_per_second"] * each["step"]) for each in (one, two)]


def test_ranks_that_would_share_a_gpu_are_not_timed(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parwrap.insight.scaling.gpu_count", lambda: 1)

    assert 2 == main(["--ranks", "1,2", "train.py"])
    assert capsys.readouterr().err == (
        "parwrap scaling: --ranks 1,2 is more than the GPUs that torch can use here (1), and ranks that share a GPU are no faster than "
        "one: give at most 1, or add --backend gloo to time them nevertheless.\n"
    )


def test_the_table_says_what_twice_as_many_ranks_would_give():
    told = _told([Point(1, 1000.0, 0.008), Point(2, 1600.0, 0.01, efficiency=0.8, serial=0.25)])
    nonsense = _told([Point(1, 1000.0, 0.008), Point(2, 9000.0, 0.002, efficiency=4.5, serial=-0.8)])

    assert "    1         1,000        8.00        100%" == told.splitlines()[1]
    assert "    2         1,600       10.00         80%            25.0%" == told.splitlines()[2]
    assert "at 4 ranks expect 2,286 samples/s (57%), if that part stays" == told.splitlines()[3]  # 1000 / (0.25 + 0.75 / 4)
    assert "450% is more than ranks can give: something else has slowed the first run down. Measure again." == nonsense.splitlines()[3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ranks", "2,1"], "--ranks 2,1 is not a list of two or more numbers of ranks in ascending order, such as 1,2,4."),
        (["--ranks", "2"], "--ranks 2 is not a list of two or more numbers of ranks in ascending order, such as 1,2,4."),
        (["--plot", "speed.xyz"], "--plot speed.xyz has no ending that says what to draw: end it with .png, .svg or .pdf."),
        (["--plot", "no/speed.png"], "--plot no/speed.png is in a folder that does not exist: make the folder first."),
        (["--steps", "0"], "--steps 0 is not a positive number of steps: pass 1 or more."),
    ],
)
def test_what_cannot_be_measured_is_refused(options, expected, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    assert (2, f"parwrap scaling: {expected}\n") == (main([*options, "train.py"]), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            SCRIPT.replace("range(20)", "range(1)").replace("48", "40"),
            "train.py takes at most 5 steps of an optimizer on 1 rank, and the first 5 warm up and are not timed: let the script",
        ),
        (SCRIPT.replace("DataLoader(TensorDataset(torch.rand(48, 4)), batch_size=8)", "[(torch.rand(8, 4),)] * 6"), "reads no DataLoader"),
        ("raise ValueError('no data')", "the script fails on 1 rank:\n"),
    ],
    ids=["too short", "no loader", "fails"],
)
@pytest.mark.slow
def test_a_script_that_cannot_be_timed_says_why(script, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)

    assert (2, True) == (main(["--steps", "10", "train.py"]), expected in capsys.readouterr().err)


def test_a_plot_without_matplotlib_names_the_command_that_brings_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parwrap.insight.plots.find_spec", lambda name: None)

    assert (2, "parwrap scaling: --plot needs matplotlib: pip install 'parwrap[report]'.\n") == (
        main(["--plot", "speed.png", "train.py"]),
        capsys.readouterr().err,
    )
