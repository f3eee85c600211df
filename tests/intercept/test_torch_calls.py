"""Calls of torch that reach interceptors."""

from __future__ import annotations

import threading

from torch import nn

from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import intercepting


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def train(self, mode=True):
        super().train(mode)
        self.inside.set()
        self.go_on.wait(10)
        return self


class Modes(Interceptor):
    def __init__(self):
        self.set = []

    def set_mode(self, module, training):
        self.set.append((module, training))


def test_a_mode_is_noted_while_another_thread_sets_one():
    slow, other = nn.Sequential(Waits()), nn.Linear(1, 1)
    with intercepting([modes := Modes()]):
        thread = threading.Thread(target=slow.train)
        thread.start()
        slow[0].inside.wait(10)
        other.eval()
        slow[0].go_on.set()
        thread.join()

    assert modes.set == [(other, False), (slow, True)]
