"""From a command line to running ranks on any machine.

``command/`` makes a plan of it, ``elastic/`` carries the plan out, ``jobs/`` hands it to a cluster. It may import all below. Start with
``command/plan.py``.
"""
