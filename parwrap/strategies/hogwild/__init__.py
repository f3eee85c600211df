"""Hogwild: workers train one copy of the parameters in shared memory, without locks. Start with ``hogwild.py``."""
