"""Exact evaluation: each rank reads a part, and the result is that of a single process. Start with ``evaluation.py``."""
