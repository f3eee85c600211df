import pytest

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")


@pytest.mark.parametrize("way", ["fit", "trainer"])
def test_both_ways_to_train(compared, way):
    alone, together = compared("sentence_transformers_pairs", way)

    assert alone.read == [3 * 48]
    assert together.read == [24 + 48 + 24]  # the evaluator has put the model in eval mode since the last pass: epoch 2 is whole
