"""From a command line to running ranks on any machine.

``command/`` turns the command line into a plan, ``elastic/`` carries out the plan on a node, and ``jobs/`` submits it to a cluster. This
room may import all rooms below it. Start with ``command/plan.py``.
"""
