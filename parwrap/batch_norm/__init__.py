"""Batch normalization over the batches of all ranks: the ``sync_bn`` feature.

It may import the data rooms and all rooms below them. Start with ``sync_bn.py``.

::

    sync_bn.py               intercepts the layers: which calls are shared, and by which ranks
    forward_backward.py      the formulas: what each rank computes, sends and receives
    statistics_exchange.py   how ranks that share a layer's batch exchange its statistics
    kernels.py               torch's kernels for one rank's part, and the merged statistics
    compiled_norm.py         the same inside of torch.compile
"""
