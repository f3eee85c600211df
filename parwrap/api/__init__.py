"""What users import: one decorator or function per file, and the mixins.

Each file turns a call of the user into interceptors and passes them to ``session/``; it trains nothing itself. Start with
``distributed.py``.
"""
