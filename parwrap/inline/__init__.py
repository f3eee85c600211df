"""Launching ranks from a function call: ``parwrap.launch``, notebooks and the workers of Hogwild.

This room starts the processes and copies their changes back to the caller's objects. The caller provides the function. Start with
``launching.py``.

::

    launching.py        runs a function on ranks that this process starts, watches and always ends
    forking.py          starts ranks as forks; spawning.py: as new interpreters
    rank_process.py     the code in a rank's own process
    child_output.py     the output of ranks, shown where this process shows its own
    object_graph.py     the objects that a function reaches
    returned_state.py   what a rank sends back: the result, and the new state of tensors, models and optimizers
    python_changes.py   changes of the caller's other objects, repeated in the caller
"""
