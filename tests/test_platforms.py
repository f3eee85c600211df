"""What works where a system lacks something of Linux: it is hidden from parwrap in processes on Linux, see ``other_systems.py``.

These tests emulate macOS and Windows. parwrap has not been run on either. What takes the same code path on both runs on Windows only, which
lacks more.
"""

import json
import subprocess
import sys
from textwrap import dedent

import pytest

from other_systems import emulated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="emulates other systems on Linux")

SYSTEMS = ("darwin", "win32")
ON_WINDOWS = pytest.mark.parametrize("system", ["win32"], indirect=True)

ALL_MODULES = """
import importlib, pkgutil
import parwrap

for module in pkgutil.walk_packages(parwrap.__path__, "parwrap."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from parwrap.ranks import platform
print(platform.WINDOWS, platform.FORKS, platform.START_METHODS)
"""

TRAINS = """
import json, os, shutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randint(2, (48,))), batch_size=8, shuffle=True, num_workers=WORKERS)
if __name__ == "__main__":
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        os.makedirs("kept/inner", exist_ok=True)
        torch.save(model.state_dict(), "kept/inner/model.pt")
        model.load_state_dict(torch.load("kept/inner/model.pt"))
        os.replace("kept/inner/model.pt", "kept/model.pt")
        shutil.rmtree("kept")
    with open("weights.json", "w") as file:
        json.dump([p.tolist() for p in model.state_dict().values()], file)
    print("trained", os.path.exists("kept"))
"""


@pytest.fixture(params=[system if system == "win32" else pytest.param(system, marks=pytest.mark.slow) for system in SYSTEMS])
def system(request):
    return request.param


@pytest.fixture
def environ(tmp_path_factory, system):
    """The environment of processes in which parwrap sees ``system``, in a folder of a short path, as sockets need."""
    return emulated(tmp_path_factory.mktemp("system"), system)


@pytest.fixture
def python(tmp_path, environ):
    """Runs Python where parwrap sees ``system``."""

    def run(*arguments, rc=0, **variables):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env={**environ, **variables}, capture_output=True, text=True, timeout=120
        )
        assert rc == done.returncode, done.stdout + done.stderr
        return done

    return run


def weights(folder, workers, *options, environ=None):
    (folder / "train.py").write_text(TRAINS.replace("WORKERS", str(workers)))
    command = [sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", "--quiet", "--sync-bn", *options, "train.py"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert (0, "trained False\n") == (done.returncode, done.stdout), done.stderr
    return json.loads((folder / "weights.json").read_text())


@pytest.fixture(scope="module")
def weights_on_linux(tmp_path_factory):
    return weights(tmp_path_factory.mktemp("linux"), 0)


def test_every_module_can_be_imported(python, system):
    known = {"darwin": "False False ('fork', 'spawn', 'forkserver')", "win32": "True False ('spawn',)"}[system]

    assert known == python("-c", ALL_MODULES).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "workers", "options"),
    [
        pytest.param("darwin", 1, [], id="darwin, with workers"),
        pytest.param("win32", 1, [], id="win32, with workers"),
        pytest.param("win32", 0, ["--max-restarts", "1"], id="win32, with restarts"),
    ],
    indirect=["system"],
)
def test_two_ranks_learn_the_weights_of_two_ranks_on_linux(tmp_path, environ, weights_on_linux, workers, options):
    """They share statistics. How the agent that restarts ranks starts them is the same on both systems."""
    assert weights_on_linux == weights(tmp_path, workers, *options, environ=environ)


@pytest.mark.slow
@ON_WINDOWS
def test_a_program_ends_with_its_exit_code(python):
    python("-m", "parwrap.run", "--nproc-per-node", "2", "--plain", "--no-python", "sh", "-c", "exit 3", rc=3)


@pytest.mark.slow
@ON_WINDOWS
@pytest.mark.parametrize("options", [[], ["--lock"]], ids=["at the same time", "one at a time"])
def test_hogwild_shares_weights(python, tmp_path, options):
    (tmp_path / "train.py").write_text(
        dedent(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, TensorDataset

            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            loader = DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=1)
            for x, in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():  # begins once all ranks have trained
                for x, in loader:
                    last = model(x)
            print(round(last.item() * 1e4))
            """
        )
    )
    done = python("-m", "parwrap.run", "--nproc-per-node", "2", "--quiet", "--strategy", "hogwild", *options, "train.py")

    steps = -int(done.stdout)
    assert steps == 40 if options else 20 < steps <= 40


@pytest.mark.slow
def test_a_call_starts_ranks_or_says_that_it_cannot(python, tmp_path, system):
    (tmp_path / "call.py").write_text(
        "import parwrap\n\ndef mean():\n    return float(parwrap.reduce_mean(parwrap.rank()))\n\n"
        "if __name__ == '__main__':\n    print(parwrap.launch(mean, nprocs=2))\n"
    )
    done = python("call.py", rc=1 if system == "win32" else 0)

    if system == "win32":
        assert "watches ranks through pipes, and Windows cannot wait for those" in done.stderr
    else:
        assert done.stdout == "0.5\n"


@pytest.mark.slow
def test_the_output_of_all_ranks_and_the_error_of_one(python, tmp_path, system):
    lines = ("import parwrap", "print('rank', parwrap.rank(), flush=True)", "parwrap.barrier()")
    (tmp_path / "speaks.py").write_text("\n".join([*lines, "if parwrap.rank() == 1:", "    raise ValueError('mine')", ""]))
    command = ("-m", "parwrap.run", "--nproc-per-node", "2", "--quiet")
    done = python(*command, "--all-ranks", "speaks.py", rc=2 if system == "win32" else 1)
    if system == "win32":
        assert "--all-ranks and --log-dir need named pipes" in done.stderr
        done = python(*command, "speaks.py", rc=1, PARWRAP_ALL_RANKS="1")

    assert ["rank 0", "rank 1"] == sorted(line[-6:] for line in done.stdout.splitlines())
    assert "rank 1 of 2 failed:" in done.stderr
    assert "ValueError: mine" in done.stderr


@pytest.mark.slow
def test_start_methods_that_the_system_lacks_are_refused(python, tmp_path, system):
    (tmp_path / "speaks.py").write_text("print('spoke')\n")
    done = python(
        "-m", "parwrap.run", "--nproc-per-node", "2", "--quiet", "--start-method", "fork", "speaks.py", rc=2 * (system == "win32")
    )

    if system == "win32":
        assert "--start-method fork needs a system that can fork, and this one cannot" in done.stderr
    else:
        assert done.stdout == "spoke\n"


@pytest.mark.slow
def test_the_pytest_plugin_runs_tests_on_ranks(python, tmp_path):
    (tmp_path / "test_inner.py").write_text(
        dedent(
            """
            import parwrap
            import pytest

            @pytest.mark.ranks(2)
            def test_mean():
                assert parwrap.reduce_mean(parwrap.rank()) == 0.5

            @pytest.mark.ranks(2)
            def test_fails():
                assert parwrap.rank() == 0
            """
        )
    )
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--assert=plain", "test_inner.py", rc=1)

    assert "1 failed, 1 passed" in done.stdout
    assert "[rank 1]" in done.stdout


@pytest.mark.slow
@ON_WINDOWS
def test_the_doctor_measures_two_ranks(python):
    assert "2 spawned ranks, gloo on cpu: all sums right" in python("-m", "parwrap.doctor").stdout
