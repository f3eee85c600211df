"""Fully sharded data parallelism: each rank holds a part of every parameter. Start with ``fsdp.py``.

::

    fsdp.py              the strategy
    wrap_policy.py       which modules are sharded
    sharded_model.py     one model, sharded and made plain again
    sharded_state.py     states of sharded models and optimizers, whole for the script
    sharded_tensors.py   operations of a script on sharded tensors
    replicated.py        parameters that stay whole on every rank
"""
