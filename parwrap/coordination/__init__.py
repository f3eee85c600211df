"""Who waits for whom: ranks announce where they are, meet at sync points, and say who is missing.

It knows no strategy and no loader. Start with ``sync_points.py``; ``status_board.py`` is what ranks read of each other.
"""
