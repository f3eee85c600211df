"""ZeRO stage 1: each rank holds a part of the optimizer's state. Start with ``zero1.py``."""
