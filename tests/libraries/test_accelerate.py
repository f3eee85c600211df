import pytest

pytest.importorskip("accelerate")


def test_a_script_with_accelerator(compared):
    alone, together = compared("accelerate_loop")

    assert alone.read == [48] * 4
    assert together.read == [24] * 4
