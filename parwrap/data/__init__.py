"""Which samples of which loader a rank gets to see."""
