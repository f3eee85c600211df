"""Reads launch variables into a ``World``: which rank this process is, and on which node. One table covers all launchers.

It imports only ``errors.py``. Start with ``world.py``; ``launchers.py`` is the table.
"""
