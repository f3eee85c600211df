"""What is open while a distributed function runs: its process group, loop, strategy and interceptors, from the first line to the last.

It may import all strategies and all rooms below them. Start with ``session.py``; each of the other files has one duty of a session.

::

    session.py             opens and closes everything; the interceptors and their shared state
    feature_scope.py       the base of the decorators that install an interceptor while a function runs
    hidden_launch.py       a plain script does not see that it was launched
    learning_rate.py       lr="linear" and "sqrt": larger steps for larger batches
    start_line.py          the line that is printed when training begins
    fixed_batch_sizes.py   a note on errors that a fixed batch size may have caused
    torchmetrics.py        metrics over loaders that every rank reads whole
"""
