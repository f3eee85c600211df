"""DataParallel: one process divides each batch over several devices. Start with ``data_parallel.py``.

::

    data_parallel.py       intercepts module calls and divides the batch over devices
    scatter_gather.py      cuts arguments into parts and merges outputs
    replicas.py            copies of a module on other devices
    replica_threads.py     replicas that run at the same time
    replica_norm.py        batch normalization over the replicas
    sharded_outputs.py     outputs that stay on their devices, and the losses that take them
    batch_split_check.py   compares a call in parts with the whole call
"""
