import pytest

pytest.importorskip("pyro")


def test_svi_builds_its_optimizers_in_epoch_1(compared):
    alone, together = compared("pyro_svi", options=["--loss", "sum"])

    assert alone.read == [64] * 4
    assert together.read == [64, 32, 32, 32]
