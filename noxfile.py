"""The README's test command in a fresh environment for each torch, each Python and an older numpy. ``nox -l`` lists the sessions.

constraints.txt is for one Python. Elsewhere a session takes the newest versions that fit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

TORCHES = ["2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
NUMPYS = ["1.26"]

TORCH, PYTHON = "2.13", "3.11"
"""Those of constraints.txt; each session changes one of them, or numpy."""

LIBRARIES = [
    *("transformers", "accelerate", "datasets", "lightning", "skorch", "scikit-learn", "pytorch-ignite", "sentence-transformers"),
    *("peft", "poutyne", "pytorch-widedeep", "deepctr-torch", "pytorch-accelerated", "pytorch-tabnet", "pytorch-metric-learning"),
    *("torch-geometric", "timm", "schedulefree", "hydra-core", "tensorboard", "mlflow-skinny>=3", "optuna", "pyro-ppl", "fastai"),
    *("stable-baselines3", "trl", "sbi", "scvi-tools", "darts", "gymnasium", "denoising-diffusion-pytorch", "pykeen", "monai"),
    *("botorch", "opacus"),
]
"""Those that ``tests/libraries`` trains with. Nothing else installs them, so there these tests are skipped."""

nox.needs_version = ">=2025.10.14"
nox.options.sessions = [f"python-{PYTHON}", "package"]
nox.options.error_on_missing_interpreters = True
nox.options.download_python = "auto"  # a Python that is missing, with uv or nox[pbs]


def run_tests(session: nox.Session, torch: str = TORCH, numpy: str | None = None) -> None:
    """Install parwrap with these versions and run the README's test command, or the options and tests that follow ``--``."""
    asked = [f"torch=={torch}.*", *([f"numpy=={numpy}.*"] if numpy else [])]
    fits = session.python == PYTHON and not numpy
    session.install(*asked, "-e", ".[test]", *(constraints(session) if fits else []))
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


def constraints(session: nox.Session) -> list[str]:
    """The option for constraints.txt without its torch."""
    lines = Path("constraints.txt").read_text("utf-8").splitlines(keepends=True)
    path = Path(session.create_tmp()) / "constraints.txt"
    path.write_text("".join(line for line in lines if not line.startswith("torch==")), "utf-8")
    return ["-c", str(path)]


def add_session(name: str, python: str = PYTHON, **versions: str) -> None:
    nox.session(name=name, python=python)(lambda session: run_tests(session, **versions))


for version in TORCHES:
    add_session(f"torch-{version}", torch=version)
for version in PYTHONS:
    add_session(f"python-{version}", python=version)
for version in NUMPYS:
    add_session(f"numpy-{version}", numpy=version)


@nox.session(python=PYTHON)
def libraries(session: nox.Session) -> None:
    """Install the libraries of docs/libraries.rst, and run their tests or the options and tests that follow ``--``."""
    session.install(f"torch=={TORCH}.*", "-e", ".[test]", *LIBRARIES, *constraints(session))
    session.install("--no-deps", "d2l")  # it asks for numpy 1.23
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/libraries"]))


@nox.session(python=PYTHON)
def package(session: nox.Session) -> None:
    """Build what would be published, in dist/, and check its metadata."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    session.run("python", "-m", "twine", "check", "--strict", "dist/*")


@nox.session(python=PYTHON)
def pyright(session: nox.Session) -> None:
    """Let pyright check code as users write it. It downloads node if there is none."""
    session.install(f"torch=={TORCH}.*", "-e", ".[test]", "pyright", *constraints(session))
    session.run("python", "-m", "pytest", "--full", "tests/decorators/test_signatures.py")


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the site in build/site, and open it in a browser unless ``-- --no-open`` is given."""
    session.install(f"torch=={TORCH}.*", "-e", ".[docs]", *constraints(session))
    session.run("python", "-m", "sphinx", "-W", "-n", "--keep-going", "docs", "build/site")
    if "--no-open" not in session.posargs:
        session.run("python", "-m", "webbrowser", Path("build/site/index.html").resolve().as_uri())
