"""One file for each way to train in parallel; each is an actor."""
