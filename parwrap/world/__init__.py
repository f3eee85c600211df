"""Launch variables in, a ``World`` out: which rank this is, on which node, by one table for all launchers.

It imports errors only. Start with ``world.py``; ``launchers.py`` is the table.
"""
