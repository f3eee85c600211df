"""Carries out a plan on each node: torch's agent, the fork server, output, failures, and messages between nodes.

Start with ``agent.py`` for the launcher's side and with ``script_run.py`` for a rank's.

::

    agent.py                carries out a plan: starts the ranks, watches them, and starts them again after a failure
    fork_server.py          forks the ranks from a process that has loaded torch
    script_run.py           what a rank does: run a script as plain Python would
    rank_output.py          from the ranks to the terminal and to log files
    failure_report.py       the first failure, reported last
    forwarded_signals.py    each signal once to each rank
    node_monitor.py         what the launchers of several nodes tell each other
    waiting_for_nodes.py    how a node waits for the others
    network_route.py        how this machine reaches the rendezvous; network_interfaces.py: the addresses it has
"""
