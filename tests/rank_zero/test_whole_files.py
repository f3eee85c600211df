"""A saved file appears as a whole or not at all, also on one rank, and what a killed process leaves is removed at the next start."""

import os
import subprocess
import sys

import pytest

SAVES = """
import os, signal, sys, torch

class Kills:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1:] == ["kill"]:
    torch.save([torch.zeros(1000), Kills()], "deep/a.pt")
else:
    print(sorted(os.listdir("deep")))
    torch.save({"x": torch.ones(2)}, "deep/a.pt")
    print(torch.load("deep/a.pt")["x"].sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and flock")
def test_a_save_that_is_killed_leaves_the_old_file_and_nothing_else_after_the_next_start(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.pt").write_text("old")
    (tmp_path / "script.py").write_text(SAVES)
    (tmp_path / "temporary").mkdir()

    def run(*arguments):
        command = [sys.executable, "-m", "parwrap", "run", "--quiet", "--nproc-per-node", "1", "script.py", *arguments]
        environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)

    assert 0 != run("kill").returncode
    assert "old" == (tmp_path / "deep" / "a.pt").read_text()
    left = os.listdir(tmp_path / "deep")
    done = run()

    assert 2 == len(left)
    assert (0, ["['a.pt']", "2.0"]) == (done.returncode, done.stdout.splitlines()), done.stderr
    assert ["a.pt"] == os.listdir(tmp_path / "deep")
