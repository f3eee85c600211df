"""Gradient accumulation: one optimizer step for several batches, in a loop that calls ``step()`` after each batch.

It may import the strategies and all rooms below them. Start with ``accumulation.py``.

::

    accumulation.py     which steps are skipped or taken: intercepts backward, clipping, steps and passes over loaders
    window.py           the running window of batches, and the weight of each, also in a smaller last window
    sums.py             the gradients that skipped steps would have used
    applied_window.py   a window that ends without a backward
    over_ranks.py       windows that are open on some ranks only
    by_hand.py          a loop that accumulates by hand: its gradients are averaged once a step
    at_work.py          marks calls that are made here, and are not the user's
"""
