import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_trainer_evaluates_loads_the_best_and_resumes(compared):
    alone, together = compared("transformers_trainer")

    assert alone.read == [64] * 5
    assert together.read == [32, 32, 32, 64, 32]  # from_pretrained() has put the second model in eval mode
