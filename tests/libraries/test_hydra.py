import pytest

pytest.importorskip("hydra")


def test_a_sweep_with_a_directory_a_job(compared):
    alone, together = compared("hydra_main", "-m", "lr=0.1,0.2", "hydra.job.chdir=True", "hydra.sweep.dir=sweep")

    assert alone.read == [48] * 6
    assert together.read == [24] * 6
    assert "sweep/1/.hydra/config.yaml" in together.files
