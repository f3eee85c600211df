import pytest

pytest.importorskip("stable_baselines3")


@pytest.mark.parametrize("kind", ["PPO", "DQN"])
def test_every_rank_does_the_whole_work(kind, compared):
    _, together = compared("stable_baselines", kind)

    assert "all ranks compute the same losses" in together.errors
    assert "No DataLoader of torch is read there" in together.errors
