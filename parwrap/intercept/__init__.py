"""Intercepting torch calls: one file a call, which only forwards it to a method of an interceptor.

It may import the coordination and all below. Start with ``interceptor.py``, which declares the calls, and ``backward.py``, a small one.
``table.py`` lists them all.
"""
