"""Exact evaluation: each rank reads a part, and the result is that of a single process. Start with ``evaluation.py``.

::

    evaluation.py   which part of a pass this rank reads
    merging.py      one result of all ranks' results
    comparing.py    whether a merged result is that of one process, as the first call of ``@evaluate`` checks
"""
