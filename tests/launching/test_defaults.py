"""Defaults for ``parwrap run``: ``[tool.parwrap]`` of ``pyproject.toml``, and ``@args.txt``. The command line wins."""

from pathlib import Path

import pytest

from parwrap.errors import UsageError
from parwrap.launching.defaults import NONE, defaults_here
from parwrap.launching.plan import describe, plan_launch
from parwrap.launching.training_options import Given

pytestmark = pytest.mark.usefixtures("scripts")

TABLE = """
nproc-per-node = 2
batch = "global"
seed = 3
timeout = 2.5
sync_bn = true
quiet = false
"""


def plan(*argv):
    return plan_launch(argv, {}, 0, 8, defaults=defaults_here())


def write(table, path="pyproject.toml"):
    Path(path).write_text(f"[tool.parwrap]\n{table}")


def test_the_table_stands_before_the_options_of_the_command():
    write(TABLE)
    without, given = plan("train.py"), plan("--seed", "4", "--nproc-per-node=1", "--quiet", "train.py", "--seed", "5")

    assert {"batch": "global", "seed": 3, "timeout": 2.5} == without.script.scope
    assert {"sync_bn": Given()} == without.script.decorators
    assert (2, False) == (without.ranks, without.script.quiet)
    assert {"batch": "global", "seed": 4, "timeout": 2.5} == given.script.scope
    assert (1, True) == (given.ranks, given.script.quiet)


def test_a_file_of_options_stands_for_its_words_and_only_before_the_script():
    write(TABLE)
    Path("args.txt").write_text("--seed 5  # a comment\n--uneven drop")
    asked = plan("--seed", "4", "@args.txt", "--uneven", "pad", "train.py", "@args.txt")

    assert {"batch": "global", "seed": 5, "timeout": 2.5, "uneven": "pad"} == asked.script.scope
    assert ("@args.txt",) == asked.script.args


@pytest.mark.parametrize("options", [["--plain"], ["--no-defaults"]])
def test_a_script_that_is_only_launched_takes_the_defaults_of_the_launch_alone(options):
    write(TABLE)
    asked = plan(*options, "train.py")

    assert not asked.script.scope
    assert {} == asked.script.decorators
    assert {"--plain": 2, "--no-defaults": 1}[options[0]] == asked.ranks


def test_the_nearest_file_with_the_table_counts(tmp_path, monkeypatch):
    write("seed = 1")
    (tmp_path / "a" / "b").mkdir(parents=True)
    Path("a/pyproject.toml").write_text("[project]\nname = 'tool.parwrap'\n")
    monkeypatch.chdir("a/b")

    assert (tmp_path / "pyproject.toml", {"seed": 1}) == defaults_here()
    write("seed = 2")
    assert (tmp_path / "a" / "b" / "pyproject.toml", {"seed": 2}) == defaults_here()


def test_there_need_be_none():
    assert NONE == defaults_here()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("batchh = 'global'", r"pyproject.toml: \[tool.parwrap\] has the key batchh, .* did you mean batch\?"),
        ("launcher = 'slurm'", "pyproject.toml: .* the key launcher, which only a command can ask for"),
        ("partition = 'gpu'", "pyproject.toml: .* the key partition, an option of --launcher slurm"),
        ("batch = ['global']", r"pyproject.toml: .* has batch = \['global'\], but --batch takes a string or a number"),
        ("seed = true", "pyproject.toml: .* has seed = True, but --seed takes a string or a number"),
        ("sync-bn = 1", "pyproject.toml: .* has sync-bn = 1, but --sync-bn takes true or false"),
        ("seed = 0.5", "argument --seed: '0.5' is not an integer"),
        ("= 3", "pyproject.toml is no valid TOML"),
    ],
)
def test_a_wrong_key_or_value_is_an_error(table, said):
    write(table)
    with pytest.raises(UsageError, match=said):
        plan("train.py")


def test_a_file_of_options_that_cannot_be_read_is_an_error():
    Path("loop.txt").write_text("@loop.txt")
    with pytest.raises(UsageError, match=r"@loop.txt stands twice on the command line, or names itself"):
        plan("@loop.txt", "train.py")
    with pytest.raises(UsageError, match=r"cannot read options from @none.txt"):
        plan("@none.txt", "train.py")


def test_the_plan_says_what_comes_from_files(tmp_path):
    write("batch = 'global'\nseed = 3\nquiet = false")
    Path("args.txt").write_text("--quiet")
    shown = dict(line.split(maxsplit=1) for line in describe(plan("--seed", "4", "@args.txt", "train.py")).splitlines())

    assert ("--quiet", f"batch=global ({tmp_path / 'pyproject.toml'})") == (shown["@args.txt"], shown["defaults"])


def test_a_refused_command_names_the_file_with_its_defaults(parwrap_run, script):
    write("strategy = 'zero1'")
    status, _, stderr = parwrap_run("--data-parallel", "all", script(""))

    assert 2 == status
    assert "pyproject.toml has defaults for strategy. --no-defaults leaves them out.\n" in stderr
