"""What several ways to train share: the base class, the reducer, the autograd graph, and what ranks hand each other."""
