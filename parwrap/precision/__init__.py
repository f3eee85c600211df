"""Mixed precision: autocast, the dynamic loss scale, half models. Each file with an interceptor is about one of them.

It may import the loop and all below. Start with ``scaling.py``.
"""
