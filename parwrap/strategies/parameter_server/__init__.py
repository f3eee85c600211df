"""A server holds the weights and takes the steps; workers send gradients. Start with ``parameter_server.py``."""
