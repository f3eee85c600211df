"""Local SGD and DiLoCo: ranks train apart and average their weights now and then. Start with ``local_sgd.py``."""
