import pytest

pytest.importorskip("sbi")


def test_npe_trains_and_validates(compared):
    alone, together = compared("sbi_npe")

    assert alone.read == [7 * 216]  # of 225 samples: it drops the last batch
    assert together.read == [7 * 108]
