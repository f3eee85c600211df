"""``python -m parwrap.doctor``: what runs here, what a launch would do, and what is wrong, each problem with its remedy."""
