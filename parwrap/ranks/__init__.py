"""Which rank this is, the process group, and what ranks send to each other outside of the backward pass."""
