"""Turns ``argv`` into a ``LaunchPlan`` with pure functions, which start nothing. Start with ``plan.py``.

::

    plan.py               from a command line to a launch plan
    command_line.py       splits the command line at the script
    training_options.py   the options for training
    script.py             what runs: a script, a module or another program, with the scope around it
    node_options.py       what torchrun's options say about nodes
    outer_launcher.py     options that an outer launcher fills in
    job_launchers.py      the launchers that --launcher knows
    reexec.py             starts the command again in the same process, for variables that an interpreter reads at its start
"""
