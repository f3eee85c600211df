"""The only rank runs a script in its own process: everything about it is as under plain ``python``."""

import json
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parwrap.launching.script import script_traceback

ROOT = Path(__file__).parents[2]
ACCUMULATING = (
    "import sys; from parwrap.launching.plan import Script; from parwrap.launching.script import run_alone; "
    "from parwrap.launching.training_options import Given; "
    "run_alone(Script(sys.argv[1], scope={}, decorators={'accumulate': Given((2,))}))"
)
RUN_ALONE = (
    "import sys; from parwrap.launching.plan import Script; from parwrap.launching.script import run_alone; "
    "run_alone(Script(sys.argv[1], tuple(sys.argv[3:]), sys.argv[2]))"
)


def outcome(*command: str, cwd: Path) -> tuple[int, str, str]:
    environ = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


SCRIPTS = {
    "what it sees": "import sys; print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__, __loader__.path)",
    "its module": "import __main__, sys; print(__main__ is sys.modules['__main__'], vars(__main__) is globals())",
    "its name in spawned processes": "import multiprocessing, sys; print(sys.modules['__mp_main__'] is sys.modules['__main__'])",
    "an exception": "def f():\n    1 / 0\nprint('before')\nf()",
    "a chain of exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('again')",
    "a syntax error": "print('never')\nx = = 1",
    "an exit code": "import sys; sys.exit(3)",
    "an exit message": "import sys; sys.exit('no data')",
    "a good exit": "import sys; sys.exit(0)",
    "its own excepthook": "import sys\nsys.excepthook = lambda *failure: print(failure[:2])\n1 / 0",
    "its end": """
import atexit, __main__
atexit.register(lambda: print('exit', __main__.kept))
kept = 1
file = open('left', 'w')
file.write('open')
""",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "future": "print(1)\ndef f(x: unknown): ...",
}


MODULES = {
    "recipes/__main__.py": "from . import digits\nimport sys; print(sys.argv, __name__, __package__, __file__)",
    "recipes/digits.py": "import sys; print(sys.argv, __name__, __package__)",
}
APP = {"app/__main__.py": "import sys, near; print(sys.argv, __name__, sys.path[0], __file__, __spec__.name)", "app/near.py": ""}

CASES = {
    **{name: ({"scripts/train.py": source}, ("scripts/train.py", ("--lr", "0.1"), "file")) for name, source in SCRIPTS.items()},
    "a package": (MODULES, ("recipes", ("x",), "module")),
    "a module": (MODULES, ("recipes.digits", ("x",), "module")),
    "a package without __main__": ({"recipes/__init__.py": ""}, ("recipes", (), "module")),
    "a module that is not there": ({"recipes/__init__.py": ""}, ("recipes.none", (), "module")),
    "a module that imports one that is not there": (
        {"recipes.py": "import sys; sys.excepthook = lambda *failure: print(failure[:2])\nimport recipes_of_none"},
        ("recipes", (), "module"),
    ),
    "a directory": (APP, ("app", ("x",), "file")),
    "a zip file": (APP, ("app.zip", ("x",), "file")),
    "a zip file without __main__": ({"app/near.py": ""}, ("app.zip", ("x",), "file")),
    "a compiled file": ({"train.pyc": "import sys; print(sys.argv, sys.path[0], __file__, __name__)"}, ("train.pyc", ("x",), "file")),
}
"""The files, and the target, arguments and kind of the script."""

EACH_IN_A_FORK = """
import gc, json, os, sys
from parwrap.launching.plan import Script
from parwrap.launching.script import run_alone
gc.freeze()
cases = json.loads(sys.argv[1])
while cases and (running := os.fork()):
    _, status = os.waitpid(running, 0)
    with open(os.path.join(cases.pop(0)[0], "status"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
if cases:
    folder, (target, arguments, kind) = cases[0]
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    run_alone(Script(target, tuple(arguments), kind))
"""
"""Imports parwrap once, and ends in each fork as an interpreter does: quickly, because what was imported is frozen."""


def test_it_runs_as_under_plain_python(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("alone") for name in CASES}
    for name, (files, script) in CASES.items():
        for path, source in files.items():
            (folders[name] / path).parent.mkdir(exist_ok=True)
            (folders[name] / path).write_text(source)
            if path.endswith(".pyc"):
                py_compile.compile(folders[name] / path, folders[name] / path)
        if script[0] == "app.zip":
            shutil.make_archive(folders[name] / "app", "zip", folders[name] / "app")
    cases = [(str(folders[name]), script) for name, (_, script) in CASES.items()]

    assert (0, "", "") == outcome("-c", EACH_IN_A_FORK, json.dumps(cases), cwd=ROOT)
    for name, (files, (target, arguments, kind)) in CASES.items():
        folder = folders[name]
        ended = int((folder / "status").read_text()), *((folder / stream).read_text() for stream in ("stdout", "stderr"))
        left = (folder / "left").read_text() if (folder / "left").exists() else None

        assert (name, outcome(*["-m"] * (kind == "module"), target, *arguments, cwd=folder)) == (name, ended)
        assert ("open" if "left" in "".join(files.values()) else None) == left


@pytest.mark.slow
def test_ctrl_c_ends_it_with_the_exit_code_of_a_shell(tmp_path):
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    code, _, stderr = outcome("-c", RUN_ALONE, "train.py", "file", cwd=tmp_path)

    assert code == 130
    assert stderr.splitlines()[1:] == [
        f'  File "{tmp_path}/train.py", line 1, in <module>',
        "    raise KeyboardInterrupt",
        "KeyboardInterrupt",
    ]


def test_a_traceback_of_parwraps_own_is_not_cut():
    def deep():
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        deep()

    assert script_traceback(caught.value) is caught.value.__traceback__


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must offer it")
def test_a_process_can_be_tied_to_its_parent():
    child = "from parwrap.ranks.processes import die_with_parent; die_with_parent(); print('tied', flush=True); import time; time.sleep(60)"
    parent = (
        "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE); "
        "child.stdout.readline(); os._exit(0)"
    )
    started = subprocess.run([sys.executable, "-c", parent, child], env={"PYTHONPATH": str(ROOT)}, timeout=10, capture_output=True)

    assert started.returncode == 0


def test_an_accumulate_of_the_script_that_differs_names_the_option_of_the_command(tmp_path):
    (tmp_path / "train.py").write_text("import parwrap\nwith parwrap.accumulate(3):\n    pass\n")
    _, _, stderr = outcome("-c", ACCUMULATING, "train.py", cwd=tmp_path)

    assert stderr.endswith(
        "UsageError: parwrap.accumulate(3) cannot be opened inside --accumulate 2 of the command, because each batch counts for one step "
        "only. Use the same number for both, or remove one of the two.\n"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("import os; os.environ['RANK']", True),
        ("import os; os.environ['LOCAL_RANK']", True),
        ("import torch; torch.distributed.init_process_group('gloo')", True),
        ("{}['RANK']", False),
        ("import os; os.environ['HOME_OF_DATA']", False),
    ],
)
def test_a_script_that_looks_for_a_launcher_is_sent_to_plain(source, hint, tmp_path):
    (tmp_path / "train.py").write_text(source)
    _, _, stderr = outcome("-m", "parwrap.run", "train.py", cwd=tmp_path)
    last = stderr.splitlines()[-1]

    assert hint == last.startswith("parwrap: `parwrap run` hides ")
    assert hint == ("add --plain" in last)
