import pytest

pytest.importorskip("scvi")


def test_scvi_trains_and_validates(compared):
    alone, together = compared("scvi_vae", draws=True)

    assert alone.read == [96 * 5]
    assert together.read == [48 * 5]
