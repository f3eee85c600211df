"""A server holds the weights and takes the steps; workers send gradients. Start with ``parameter_server.py``.

::

    parameter_server.py     the strategy
    roles.py                which ranks are workers, and which are servers
    worker.py               pushes gradients and pulls values
    server.py               receives gradients, takes steps and answers
    held_optimizer.py       an optimizer on the server; optimizer_transfer.py: how it gets there
    staleness.py            which workers may continue
    transport.py            messages between workers and servers
    final_state.py          worker 0's state, which all other ranks copy at the end
"""
