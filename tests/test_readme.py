"""What the README and the examples say is run; the README's Python is a doctest of its own."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docutils.core import publish_doctree

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.rst").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.rst"), *ROOT.glob("docs/**/*.rst")])


def test_the_main_job_trains_digits_to_over_95_percent_and_prints_once():
    (command,) = re.findall(r"&& \.venv/bin/python (-m parwrap\.run --nproc-per-node 2 examples/digits\.py)$", README, re.MULTILINE)
    run = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    *epochs, last = run.stdout.splitlines()

    assert float(re.fullmatch(r"test accuracy (\d\.\d+)", last)[1]) > 0.95
    assert len(epochs) == len(set(epochs))
    assert re.search(
        r"^parwrap: 2 ranks, gloo on cpu, ddp, batch 32 per rank, 64 global, learning rate unchanged, 1437 samples / 2 ranks, seed \d+$",
        run.stderr,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param("", marks=pytest.mark.slow),
        "-m parwrap.run --nproc-per-node 2",
        pytest.param("-m parwrap.run --plain --nproc-per-node 2", marks=pytest.mark.slow),
    ],
)
def test_the_decorated_example_runs_alone_and_on_two_ranks_however_it_is_launched(launch):
    command = [sys.executable, *shlex.split(launch), "examples/decorated.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout

    assert 1 == printed.count("epoch 5")
    assert 0.9 < float(re.search(r"held-out accuracy (\d\.\d+) on", printed)[1])
    assert f"on {2 if launch else 1} rank(s)" in printed


def test_the_example_that_launches_its_ranks_trains_on_two_and_goes_on_by_itself():
    command = [sys.executable, "examples/self_launch.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout

    assert re.search(r"^epoch 5: training loss \d\.\d+ on rank 0 of 2$", printed, re.MULTILINE)
    assert 0.9 < float(re.search(r"^held-out accuracy (\d\.\d+) on 1 rank$", printed, re.MULTILINE)[1])


def test_the_example_with_texts_wastes_little_on_padding_with_the_option_that_the_readme_names():
    (command,) = re.findall(r"^    python (-m parwrap\.run .*--uniform-length.* examples/text\.py)$", README, re.MULTILINE)
    small = ["--functions=40", "--epochs=1", "--longest=128", "--batch-size=4"]
    run = subprocess.run([sys.executable, *shlex.split(command), *small], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)

    assert float(re.search(r"padding (\S+)", run.stdout)[1]) < 0.1
    assert 1 == run.stdout.count("epoch 1")
    assert re.search(r"272 samples / 2 ranks, uniform_length, seed \d+$", run.stderr, re.MULTILINE)


def test_the_test_command_is_the_one_that_ci_runs():
    assert re.search(r"^ +python3 -m venv .*-e '\.\[test\]' && \.venv/bin/python -m pytest -n 2 --dist loadfile$", README, re.MULTILINE)


def test_the_costs_that_the_readme_tells_are_the_benchmarks_own():
    measured = json.loads((ROOT / "benchmarks" / "overhead.json").read_text())
    for part in ("steps", "memory"):
        values = [row["value"] for row in measured[part]["rows"] if row["limit"] is not None]

        assert 5 == len(values)
        assert [] == [value for value in values if f"x {value:.3f}" not in README]


def test_what_the_readme_tells_of_uniform_lengths_is_what_was_measured():
    for row in json.loads((ROOT / "benchmarks" / "uniform_length.json").read_text())["rows"]:
        padding = sorted(run["padding"] for run in row["runs"]["uniform_length"])[len(row["samples"]) // 2]

        assert row["value"] <= row["limit"] == 0.5
        assert padding < 0.05
        assert f"in {row['value']:.2f} o" in README
        assert f"{padding * 100:.1f} %" in README


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_in_the_readme(script):
    assert f"examples/{script.name}" in README


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document):
    named = re.findall(r"``((?:parwrap|tests|docs|benchmarks|examples|\.ci)/[\w./]*)``", document.read_text())

    assert [] == [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_render_without_a_warning(document):
    """As the index renders the README, which knows no roles of Sphinx either."""
    warnings = io.StringIO()
    settings = {"report_level": 1, "halt_level": 5, "warning_stream": warnings, "file_insertion_enabled": False, "raw_enabled": False}
    publish_doctree(document.read_text(), source_path=document.name, settings_overrides=settings)

    assert "" == warnings.getvalue()


@pytest.mark.parametrize("option", re.findall(r"^``([a-z_]+)``  +", README, re.MULTILINE))
def test_options_that_the_readme_lists_exist(option):
    import parwrap
    from parwrap.options import Options

    assert hasattr(Options(), option)
    assert f"    {option}: " in parwrap.distributed.__doc__
