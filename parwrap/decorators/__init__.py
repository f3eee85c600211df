"""One public decorator a file; ``scope.py`` is their base; ``distributed.py`` opens everything."""
