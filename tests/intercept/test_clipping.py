"""Every way to clip ends in the interceptor, which may leave it out or do it later for others."""

import pytest
import torch
from torch import nn

from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.table import intercepting


class Noting(Interceptor):
    def __init__(self):
        self.clips = []

    @intercepts
    def clip(self, clip):
        self.clips.append(clip)
        return clip.norm()


def weight(gradient):
    w = nn.Parameter(torch.zeros(2))
    w.grad = torch.tensor(gradient)
    return w


CALLS = {
    "norm": lambda w: nn.utils.clip_grad_norm_(iter([w]), 1.0),
    "norm of its module": lambda w: torch.nn.utils.clip_grad.clip_grad_norm_(w, max_norm=1.0, norm_type="inf"),
    "value": lambda w: nn.utils.clip_grad_value_([w], clip_value=0.5),
    "with a norm": lambda w: nn.utils.clip_grads_with_norm_([w], 1.0, total_norm=nn.utils.get_total_norm([w.grad])),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_clip_is_left_out_and_done_later_for_other_gradients(name):
    interceptor, w, other, expected = Noting(), weight([3.0, 4.0]), weight([6.0, 8.0]), weight([6.0, 8.0])
    with intercepting([interceptor]):
        returned = CALLS[name](w)
    (clip,) = interceptor.clips
    clip.replayed([other])
    CALLS[name](expected)

    assert {"norm": 5.0, "norm of its module": 4.0}.get(name) == returned
    assert [3.0, 4.0] == w.grad.tolist()
    assert expected.grad.tolist() == other.grad.tolist()
    assert [w] == clip.parameters
