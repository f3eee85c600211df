"""Who waits for whom: ranks announce where they are, synchronize at sync points, and report which ranks are missing.

It knows nothing about strategies or loaders. Start with ``sync_points.py``; in ``status_board.py`` ranks read each other's state.

::

    sync_points.py      how ranks synchronize: who goes ahead, who waits, who answers without contributing
    status_board.py     where each rank writes which sync point it enters, for all ranks to read
    participant.py      what a coordinator needs from the strategy
    subgroup_sync.py    sync points within a forward or a backward
    rank_positions.py   where every rank is, in words
    hang_report.py      the report when a rank waits for long
    held_signals.py     signal handlers wait while a backward runs
    call_site.py        places in the user's script
"""
