"""One room for each way to train in parallel, and ``common/`` for what several of them share.

A strategy is an interceptor of backward passes, optimizer steps and similar calls. It may import the data rooms and all below. ``named.py``
lists the strategies by name; ``none.py`` and ``single.py`` average nothing. Start with ``common/strategy.py``, then ``ddp/ddp.py``.
"""
