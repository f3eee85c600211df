"""Only rank 0 writes files and prints; the other ranks run the same code and see the same files as rank 0.

It may import interceptors and the process group. Start with ``writer_files.py`` for rank 0 and ``replica_files.py`` for the others;
``output.py`` handles printed output.

::

    writer_files.py        interceptor on rank 0: lets every call run, and announces each new version of a path
    replica_files.py       interceptor on the other ranks: redirects calls to the rank's overlay
    rank_files.py          what the two have in common
    file_overlay.py        what a replica sees: rank 0's files at the same point of the script, or its own scratch files
    file_versions.py       how often rank 0 has written a path and when, exchanged in the store
    path_rules.py          which paths follow these rules, and the one name of each
    per_thread.py          settings of one thread
    directory_listing.py   directories as a replica sees them
    open_files.py          an open file that reports its close
    private_files.py       files in a process that is not a rank, such as a parameter server
    child_processes.py     warns of commands that may change files
    output.py              what the ranks print, log and warn
"""
