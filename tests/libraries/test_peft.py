import pytest

pytest.importorskip("peft")


def test_lora_in_a_plain_loop(compared):
    alone, together = compared("peft_lora")

    assert alone.read == [48] * 3
    assert together.read == [24] * 3
