"""From a command line to running ranks on a node."""
