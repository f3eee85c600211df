"""One file for each public decorator; ``scope.py`` has their base class, and ``opened_scope.py`` opens the scope in which ranks train."""
