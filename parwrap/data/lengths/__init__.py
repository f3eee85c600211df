"""Batches of similar length on all ranks: bucketing, padding and trimming. Start with ``uniform_length.py``."""
