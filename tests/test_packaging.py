"""What would be published: its files, its metadata, and that it installs beside a torch and runs there."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import parwrap

ROOT = Path(__file__).parents[1]
MADE = shutil.ignore_patterns(".git", ".nox", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "__pycache__", "build", "dist")
"""What is in a checkout and not in a fresh clone."""

FOR_DEVELOPERS = {"test", "examples", "bench", "docs", "dev"}
"""Extras for a clone."""

TRAINING = """
import json
from pathlib import Path

import parwrap
import torch

total = parwrap.reduce_sum(torch.tensor(1.0 + parwrap.rank()))
print(json.dumps([parwrap.world_size(), total.item(), str(Path(parwrap.__file__).resolve().parent)]))
"""


def run(*command, cwd):
    """Run a command of the environment that runs the tests, without what the caller's shell adds to imports. Returns what it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environ["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a clean copy, and the wheel that is built from it."""
    for tool in ("build", "pip", "twine"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: pip install {tool}")
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "checkout", ignore=MADE)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "checkout")
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture
def fresh(tmp_path):
    """A fresh environment with the packages of the one that runs the tests.

    It finds them through a path file. Python does not run the path files that lie there, so an editable parwrap stays out, and pip does not
    change them, because they are outside of this environment.
    """
    venv.create(tmp_path / "fresh", symlinks=os.name != "nt")
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    python = tmp_path / "fresh" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (packages / "packages_of_the_tests.pth").write_text("".join(f"{path}\n" for path in here))
    return python, packages


def below(folder, *names):
    """The files below folders of the checkout, relative to ``folder``, without what Python and benchmarks make."""
    paths = (path for name in names for path in (folder / name).rglob("*"))
    return {path.relative_to(folder).as_posix() for path in paths if path.is_file() and path.suffix not in (".pyc", ".pyo", ".png")}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    info = f"parwrap-{parwrap.__version__}.dist-info"

    assert f"parwrap-{parwrap.__version__}-py3-none-any.whl" == built[1].name
    assert "parwrap/py.typed" in names
    assert below(ROOT, "parwrap") == {name for name in names if not name.startswith(f"{info}/")}
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_sdist_has_what_a_checkout_has(built):
    with tarfile.open(built[0]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    top = {path.name for path in ROOT.iterdir() if path.suffix in (".rst", ".py", ".toml", ".txt", ".cff", ".in")} | {"LICENSE", ".ci/run"}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or name.startswith("parwrap.egg-info/")}

    assert top | below(ROOT, "parwrap", "tests", "docs", "examples", "benchmarks") == names - made


@pytest.mark.slow
def test_the_metadata_is_as_an_index_wants_it(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=built[0].parent)
    with zipfile.ZipFile(built[1]) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"parwrap-{parwrap.__version__}.dist-info/METADATA"))

    assert ("BSD-3-Clause", parwrap.__version__) == (metadata["License-Expression"], metadata["Version"])
    assert "torch>=2.9" in metadata.get_all("Requires-Dist")
    assert declared() == set(metadata.get_all("Provides-Extra"))
    assert [] == re.findall(r"<(?:docs|examples)/|:: docs/", metadata.get_payload())  # links that an index could not follow


USERS = """
import parwrap


@parwrap.distributed(batch="global", seed=0)
def train(epochs: int) -> float:
    return parwrap.total(1.0) * epochs


@parwrap.evaluate(reduce="sum")
def count(number: int) -> int:
    return number


reveal_type(train(3))
reveal_type(count(3))
reveal_type(parwrap.world_size())
parwrap.distributed(no_such_option=1)
"""
"""What a user checks. The last line is an error that a type checker has to find."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_a_type_checker_sees_the_package(how, built, fresh, tmp_path):
    python, _ = fresh
    options = ["--no-index", "--no-build-isolation", "--no-deps"]
    source = built[1] if how == "wheel" else built[0].parents[1] / "checkout"
    run(python, "-m", "pip", "install", *options, *(["-e"] if how == "editable" else []), source, cwd=tmp_path)
    (tmp_path / "user.py").write_text(USERS)
    found = subprocess.run(
        [python, "-m", "mypy", "--strict", "user.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout

    assert ["float", "int", "int"] == re.findall(r'Revealed type is "(?:builtins\.)?(\w+)"', found), found
    assert ["18"] == re.findall(r"user\.py:(\d+): error:", found), found


@pytest.mark.slow
@pytest.mark.parametrize("which", ["sdist", "wheel"])
def test_it_installs_beside_torch_and_trains(which, built, fresh, tmp_path):
    """pip resolves its dependencies, without an index: torch stays as it is, and nothing else comes."""
    archive = built[which == "wheel"]
    python, packages = fresh
    run(python, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--report", tmp_path / "report.json", archive, cwd=tmp_path)
    installed = [each["metadata"]["name"] for each in json.loads((tmp_path / "report.json").read_text())["install"]]
    (tmp_path / "train.py").write_text(TRAINING)
    printed = run(python, "-m", "parwrap.run", "--nproc-per-node", "2", "--quiet", "train.py", cwd=tmp_path)

    assert ["parwrap"] == installed
    assert {"parwrap"} == {path.name for path in packages.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")}
    assert version("torch") == run(python, "-c", "from importlib.metadata import version; print(version('torch'))", cwd=tmp_path).strip()
    assert [2, 3.0, str((packages / "parwrap").resolve())] == json.loads(printed.splitlines()[-1])  # gloo may print before


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {parwrap.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"**{parwrap.__version__}**" in (ROOT / "CHANGES.rst").read_text("utf-8")


def declared():
    """The names of the extras."""
    section = (ROOT / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def test_every_extra_is_in_the_readme_and_in_the_docs_of_its_feature():
    listed = dict(re.findall(r"^``(\w+)``  +(.+)$", (ROOT / "README.rst").read_text("utf-8"), re.MULTILINE))
    pages = {extra: re.findall(r"<(docs/\w+\.rst)>", line) for extra, line in listed.items()}

    assert declared() - FOR_DEVELOPERS - {"all"} == pages.keys()
    for extra, (page,) in pages.items():
        assert f"pip install 'parwrap[{extra}]'" in (ROOT / page).read_text("utf-8"), page
