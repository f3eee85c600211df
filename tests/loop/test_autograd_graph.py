import inspect

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parwrap.coordination.call_site import call_site, location
from parwrap.loop.autograd_graph import reached


def test_only_leaves_that_would_get_a_gradient_are_reached():
    used, unused, frozen, x = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), False), torch.ones(2)
    loss = (used * frozen * x).sum() + unused.detach().sum()

    assert [id(used)] == [id(leaf) for leaf in reached([loss])]


def test_a_tensor_used_twice_is_reached_once_and_last_layers_come_first():
    first, last = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    assert [id(last), id(first)] == [id(leaf) for leaf in reached([(first.exp().exp() * last).sum() + last.sum()])]


def test_leaves_themselves_gradient_edges_and_constants():
    weight = nn.Parameter(torch.ones(2))

    assert [id(weight)] == [id(leaf) for leaf in reached([weight])]
    assert [id(weight)] == [id(leaf) for leaf in reached([get_gradient_edge(weight.sum())])]
    assert [] == reached([torch.ones(2)])


def test_a_graph_can_be_read_after_its_backward():
    weight = nn.Parameter(torch.ones(2))
    loss = weight.exp().sum()
    loss.backward()

    assert [id(weight)] == [id(leaf) for leaf in reached([loss])]


def helper():
    return call_site()


def test_call_sites_differ_by_the_callers_of_a_helper_and_not_by_the_pass_of_a_loop():
    sites = [{helper() for _ in range(3)}, {helper() for _ in range(3)}]

    assert [1, 1] == [len(site) for site in sites]
    assert not sites[0] & sites[1]


def test_the_location_is_the_users_file_and_line():
    assert f"{__file__}:{inspect.currentframe().f_lineno}" == location()
