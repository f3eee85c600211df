"""Local SGD and DiLoCo: ranks train separately and average their weights every few steps. Start with ``local_sgd.py``."""
