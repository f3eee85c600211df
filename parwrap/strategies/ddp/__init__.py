"""Data parallelism: every rank holds the model, and each backward leaves the average gradient. Start with ``ddp.py``."""
