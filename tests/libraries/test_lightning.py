import pytest

pytest.importorskip("lightning")


def test_trainer_validates_stops_early_and_tests_the_best(compared):
    alone, together = compared("lightning_trainer")

    assert alone.read == [64] * 6
    assert together.read == [32, 64, 32, 32, 32, 32]  # lightning asks for the second iterator elsewhere than for the first


def test_its_own_ddp_leaves_no_process(tmp_path):
    """Each rank runs the script as one process would: with a process of lightning beside it."""
    psutil = pytest.importorskip("psutil")
    import sys

    from conftest import SCRIPTS, run

    command = [sys.executable, "-m", "parwrap", "run", "--nproc-per-node", "2", str(SCRIPTS / "lightning_ddp.py")]
    ended = run(command, tmp_path / "together")

    assert ended.results[0] == {"size": 2, "steps": 8}
    assert "calls init_process_group itself" in ended.errors
    running = [each for each in psutil.process_iter(["cmdline"]) if str(SCRIPTS / "lightning_ddp.py") in (each.info["cmdline"] or [])]
    assert running == psutil.wait_procs(running, timeout=20)[0]
