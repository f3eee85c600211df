"""``python -m parwrap.doctor``: shows what works here, what a launch would do, and each problem with its remedy.

::

    __main__.py    the options, the printed result, and the exit code
    exam.py        gathers facts from the ranks and lets them measure
    gather.py      the facts of this process and its machine
    measure.py     measurements of the self test
    facts.py       the facts as data
    findings.py    from facts to problems, each with its remedy
    report.py      the printed report
"""
