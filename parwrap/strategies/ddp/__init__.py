"""Data parallelism: every rank holds the model, and each backward leaves the average gradient. Start with ``ddp.py``.

::

    ddp.py                    the regular step: parameter lookup, sync point, backward, check
    gradient_averager.py      averages the gradients of one set of parameters, in torch's buckets
    averagers.py              the averagers in use, numbered alike on all ranks
    call_sites.py             ranks agree on the parameters of a new call site
    recovery.py               for a rank's report, or a rank without a backward
    unexpected_gradients.py   gradients outside of the set
    empty_gradients.py        parameters that this rank's loss does not reach
    unaveraged.py             gradients that no averaged backward has left
    following.py              weights that a script changes differently on each rank
    bypasses.py               refuses updates that bypass backward
    one_thread.py             the error of a second thread that trains
"""
