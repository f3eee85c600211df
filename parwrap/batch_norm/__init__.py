"""Batch normalization over the batches of all ranks: the ``sync_bn`` feature.

It may import the data rooms and all below. Start with ``sync_bn.py``, which intercepts the layers; ``batch_norm.py`` has the formulas.
"""
