"""``parwrap doctor``: shows what works here, what a launch would do, and each problem with its remedy."""
