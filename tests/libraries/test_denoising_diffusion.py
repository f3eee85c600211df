import pytest

pytest.importorskip("denoising_diffusion_pytorch")


def test_trainer_accumulates_and_samples(compared):
    alone, together = compared("ddpm_trainer", draws=True)

    assert alone.read == [384]
    assert together.read == [192]
