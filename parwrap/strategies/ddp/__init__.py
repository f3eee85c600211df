"""Data parallelism: every rank holds the model, and each backward leaves the average gradient. Start with ``ddp.py``.

::

    ddp.py                    the regular step: what a backward reaches, the sync point, the backward, the check
    gradient_averager.py      averages the gradients of one set of parameters, in torch's buckets
    averagers.py              the averagers in use, numbered alike on all ranks
    call_sites.py             ranks agree on what a new call site of backward reaches
    recovery.py               a rank has reported something, or takes part without a backward of its own
    unexpected_gradients.py   gradients outside of the set
    empty_gradients.py        parameters that this rank's loss does not reach
    unaveraged.py             gradients that no averaged backward has left
    following.py              weights that a script changes differently on each rank
    bypasses.py               what goes around backward, and is refused
    compression.py            gradients sent as bf16, fp16 or PowerSGD; sparse_gradients.py: sparse ones
    one_thread.py             the error of a second thread that trains
"""
