"""One writer and one speaker: rank 0 writes files and prints, the other ranks run the same code and see what rank 0 sees.

It may import interceptors and the process group. Start with ``writer_files.py`` for rank 0 and ``replica_files.py`` for the
others; ``output.py`` is for what is printed.

::

    writer_files.py        interceptor on rank 0: lets every call run, and announces what becomes of which path
    replica_files.py       interceptor above rank 0: lets calls run on the clone's view instead
    file_overlay.py        what a clone sees: files as rank 0 has them at the same point of the script, or else its own scratch
    file_versions.py       how often rank 0 has written a path and when, announced and awaited by way of the store
    path_rules.py          which paths are subject to all this, and under which name
    per_thread.py          what holds for one thread only
    directory_listing.py   directories as a clone sees them
    open_files.py          an open file that tells when it is closed
"""
