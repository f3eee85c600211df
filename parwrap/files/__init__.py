"""What ranks do to files: rank 0 writes, the others are its clones, whose effects on files stay their own.

::

    rank_zero.py   actor on rank 0: lets every call act, and announces what becomes of which path
    clone.py       actor above rank 0: lets calls act on the clone's view instead
    view.py        what a clone sees: files as rank 0 has them at the same point of the script, or else its own scratch
    versions.py    how often rank 0 has written a path and when, announced and awaited by way of the store
    places.py      which paths are subject to all this, and under which name
    threads.py     what holds for one thread only
    listing.py     directories as a clone sees them
    handles.py     an open file that tells when it is closed
"""
