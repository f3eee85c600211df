"""What several strategies share: the base class, the reducer, the autograd graph, and what ranks send each other."""
