import pytest

pytest.importorskip("monai")


def test_a_loop_over_whole_pictures(compared):
    alone, together = compared("monai_loop", "whole")

    assert alone.read == [16] * 3
    assert together.read == [8] * 3


def test_a_loop_over_random_crops(compared):
    alone, together = compared("monai_loop", "crops", draws=True)

    assert alone.read == [16 * 4] * 3
    assert together.read == [8 * 4] * 3
    assert "read 8 of 16 samples" in together.errors
