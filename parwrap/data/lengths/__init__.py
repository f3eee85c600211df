"""Batches of like length on all ranks: bucketing, padding and trimming. Start with ``uniform_length.py``."""
