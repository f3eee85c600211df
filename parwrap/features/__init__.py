"""One public decorator a file."""
