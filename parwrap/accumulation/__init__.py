"""Gradient accumulation: an optimizer step for several batches, in a loop that asks for one after each.

It may import the strategies and all below. Start with ``accumulation.py``.

::

    accumulation.py   which steps are skipped and which are taken: intercepts backward, clipping, steps and passes over loaders
    position.py       where in a window of batches the loop is, and how much each batch counts
    sums.py           the gradients that skipped steps would have used
    open_window.py    a window that ends without a backward
    over_ranks.py     windows that are open on some ranks only
    by_hand.py        a loop that accumulates by hand: its gradients are averaged once a step
    at_work.py        calls that are made here, and are not the user's
"""
