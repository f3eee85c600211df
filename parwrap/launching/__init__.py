"""From a command line to running ranks on a node.

::

    plan.py               from a command line to a launch plan, without side effects; start here
    command_line.py       splits the command line at the script
    training_options.py   the scopes around the script, as options of the command
    agent.py              carries out a plan on a node with torch's elastic agent
    fork_server.py        forks the ranks from a process that has loaded torch
    script.py             what a rank does: runs the script inside the scope
    output.py             forwards what ranks write to the terminal and to log files
    failures.py           how a rank's failure reaches the terminal
    signals.py            signals reach each rank once, and ``finally`` blocks run
    routes.py             how this machine reaches the first node
    nodes.py              what the launchers of several nodes tell each other
    waiting.py            what a node prints while it waits for others
    jobs.py               from a command line with --launcher to a job on other machines
    job_launchers.py      which launchers there are, and which options each has
    slurm.py, kubeflow.py, ray.py   submit or print such a job
"""
