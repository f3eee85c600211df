import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")


def test_sft_trainer_evaluates_each_epoch(compared):
    alone, together = compared("trl_sft")

    assert alone.read == [8 * 9 * 8] * 3  # tokens: batches of 8 texts with 9 tokens
    assert together.read == [8 * 9 * 4] * 3
