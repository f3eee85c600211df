"""Options of ``parwrap run`` stand before the script; what follows is the script's own and arrives unchanged."""

import json
import os
import re
import string
import subprocess
import sys
import sysconfig
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

import parwrap
from parwrap.launching.command_line import split_at_script
from parwrap.launching.plan import command_parser, plan_launch
from parwrap.launching.training_options import SCOPE_OPTIONS
from parwrap.options import Options
from planning import plan

PARSER = command_parser()
OURS = sorted(PARSER._option_string_actions)
roots = st.sampled_from(OURS).flatmap(lambda option: st.integers(2, len(option)).map(lambda length: option[:length]))
words = st.one_of(roots, st.text(string.printable, max_size=8), st.sampled_from(["--", "-", "", "-1", "--=", "train.py"]))
command_lines = st.lists(st.one_of(words, st.tuples(roots, words).map("=".join)), max_size=6)
search = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])

NASTY = [
    *("--data", "x", "--l", "--n", "--out", "--log", "--max", "--all", "--local", "--start", "--use", "--pad", "--dry", "--run", "--no"),
    *(
        "--rd",
        "--e",
        "--b",
        "--out=3",
        "--",
        "--amp",
        "--nnodes=9",
        "--help",
        "--version",
        "-h",
        "-m",
        "-1",
        "",
        "a b",
        "--launcher",
        "slurm",
    ),
]
"""Looks like options of parwrap run, and is the script's."""

PRINTS_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:])); sys.stderr.write('the script\\n')"


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("before", ["train.py", "--plain train.py", "-m recipes.digits", "--nproc 2 --seed 3 train.py", "-- train.py"])
@search
@given(arguments=command_lines)
def test_what_follows_the_script_arrives_unchanged(before, arguments):
    assert tuple(arguments) == plan_launch([*before.split(), *arguments], {}, 0, 8).script.args


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--nproc-per-node", "2", "--all-ranks"],
        pytest.param(["--nproc-per-node", "2", "--plain"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("target", [["train.py"], pytest.param(["-m", "train"], marks=pytest.mark.slow)])
def test_a_script_gets_arguments_that_look_like_ours_after_a_notice_of_one_rank(script, parwrap_run, options, target):
    script(PRINTS_ARGUMENTS)
    status, stdout, stderr = parwrap_run(*options, *target, *NASTY)

    assert 0 == status
    if not options:
        assert stderr.startswith(f"parwrap run: 1 rank runs: --nnodes=9 follows {target[-1]}")
        assert stderr.endswith("\nthe script\n")
    assert {json.dumps(NASTY)} == {line.removeprefix("[rank 0] ").removeprefix("[rank 1] ") for line in stdout.splitlines()}


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--nproc", "2"], ["--nproc-per-node", "2"]),
        (["--nproc_per=2"], ["--nproc-per-node=2"]),
        (["--bucket-cap", "5"], ["--bucket-cap-mb", "5"]),
        (["--master_a", "there"], ["--master-addr", "there"]),
        (["--seed", "-1"], ["--seed=-1"]),
        (["--strat", "none"], ["--strategy", "none"]),
        (["-t3", "-r=1"], ["-t=3", "-r=1"]),
    ],
)
def test_an_option_is_written_in_full_or_as_a_prefix_that_no_other_has(argv, options):
    assert (options, ["train.py", "--x"]) == split_at_script(PARSER, [*argv, "train.py", "--x"])


@pytest.mark.parametrize(
    ("argv", "notice"),
    [
        (
            ["train.py", "--nproc-per-node", "2"],
            "1 rank runs: --nproc-per-node follows train.py, so it is an option of the script. To start several ranks, put it before "
            "train.py.",
        ),
        (
            ["-m", "recipes.digits", "--epochs", "3", "--nnodes=2"],
            "1 rank runs: --nnodes=2 follows recipes.digits, so it is an option of the script. To start several ranks, put it before -m.",
        ),
        (["--nproc-per-node", "1", "train.py", "--nproc-per-node", "2"], ""),
        (["--nproc-per-node", "2", "train.py", "--nproc-per-node", "2"], ""),
        (["train.py", "--nproc", "2"], ""),
    ],
)
@pytest.mark.usefixtures("scripts")
def test_an_option_for_several_ranks_that_stands_after_the_script_is_noticed(argv, notice):
    assert notice == plan(*argv).notice


@pytest.mark.usefixtures("scripts")
def test_a_script_that_is_a_launcher_itself_has_such_an_option(tmp_path):
    (tmp_path / "train.py").write_text("parser.add_argument('--nproc_per_node')")

    assert plan("train.py", "--nproc_per_node", "2").notice == ""


@pytest.mark.parametrize("command", ["parwrap", "parwrap.run"])
def test_the_version_is_printed(started, command):
    stdout, stderr = started("-m", command, "--version").communicate(timeout=60)

    assert (f"parwrap {parwrap.__version__}\n", "") == (stdout, stderr)


def test_the_package_says_which_commands_there_are(started):
    stdout, stderr = started("-m", "parwrap").communicate(timeout=60)

    assert "" == stderr
    assert "parwrap run [options] train.py" in stdout
    assert "parwrap doctor" in stdout


def test_an_unknown_command_is_refused_with_the_one_to_write(started):
    process = started("-m", "parwrap", "train.py", "--lr", "3")

    assert ("", "parwrap: there is no command train.py: write `parwrap run train.py --lr 3`.\n") == process.communicate(timeout=60)
    assert 2 == process.returncode


@pytest.mark.parametrize("start", [pytest.param(["-m", "parwrap"], marks=pytest.mark.slow), ["linked"]])
def test_parwrap_run_is_the_command_of_the_module(script, started, tmp_path, start):
    script("import os, sys; print(sys.argv[1:], os.environ['RANK'])")
    (tmp_path / "linked").symlink_to(Path(sysconfig.get_path("scripts"), "parwrap"))  # as pipx installs it
    command = [*start, "run", "--nproc-per-node", "2", "--plain", "--all-ranks", "-m", "train", "--seed"]
    stdout, stderr = started(*command).communicate(timeout=60)

    assert "" == stderr
    assert ["[rank 0] ['--seed'] 0", "[rank 1] ['--seed'] 1"] == sorted(stdout.splitlines())


def test_the_help_has_every_option_of_parwrap_in_one_group_and_three_examples():
    usage, examples, _, *paragraphs = PARSER.format_help().split("\n\n")
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", "\n".join(paragraphs), re.MULTILINE)
    ours = {option for option in OURS if option.startswith("--") and "_" not in option} - {*get_args_parser()._option_string_actions}

    assert usage.startswith("usage: parwrap run [options] train.py")
    assert 3 == examples.count("  parwrap run ")
    assert ["launch", "training", "strategies", "output", "clusters", "help"] == [each.partition(":")[0] for each in paragraphs]
    assert len(options) == len(set(options))
    assert ours <= set(options)


def test_the_help_has_the_default_of_each_option_of_the_scope_in_brackets():
    defaults = {each.name: each.default for each in fields(Options) if each.name in SCOPE_OPTIONS and each.default not in (None, False)}
    helps = {action.dest: action.help for action in PARSER._actions}

    for name, default in defaults.items():
        assert helps[name].endswith(f" [{str(default).replace('_', '-')}]"), name


def test_help_all_lists_the_options_of_torchrun_too(capsys):
    with pytest.raises(SystemExit):
        PARSER.parse_args(["--help-all"])

    shown = capsys.readouterr().out
    assert [] == [option for option in OURS if option.startswith("--") and "_" not in option and option not in shown]


def test_one_rank_reads_stdin_and_stops_at_a_breakpoint(tmp_path, environ):
    (tmp_path / "train.py").write_text("import sys\nprint(input())\nbreakpoint()\nprint(sys.stdin.read())")
    command = [sys.executable, "-m", "parwrap.run", "train.py"]
    ended = subprocess.run(command, input="a\nc\nb", capture_output=True, text=True, cwd=tmp_path, env=environ, check=True)

    assert ended.stdout.startswith("a\n> ")
    assert ended.stdout.endswith("(Pdb) b\n")


def test_a_reader_that_leaves_ends_a_help_text_without_a_traceback(environ):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "parwrap.run", "--help-all"]
    with os.fdopen(write, "w") as gone:
        ended = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, env=environ)

    assert (0, "") == (ended.returncode, ended.stderr)


def test_a_shell_completes_commands_and_options(capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        PARSER.parse_args(["--shell-completion", "bash"])
    typed = 'COMP_WORDS=(parwrap {}); COMP_CWORD={}; _shtab_parwrap; echo "${{COMPREPLY[@]}}"'
    script = "\n".join([capsys.readouterr().out, typed.format("ver", 1), typed.format("run --strat", 2)])
    completed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout

    assert ["verify", "--strategy"] == completed.split()
