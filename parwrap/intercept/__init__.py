"""The calls that can be intercepted, as one table, and how a call is patched and restored."""
