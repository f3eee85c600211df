"""Gradient accumulation: an optimizer step for several batches, in a loop that asks for one after each.

It may import the strategies and all below. Start with ``accumulation.py``.
"""
