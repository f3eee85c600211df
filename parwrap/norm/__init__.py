"""Batch normalization over the batches of all ranks: the ``sync_bn`` feature. Start with ``sync_bn.py``."""
