"""Does one all-reduce and says when; started by ``launch.py``, as a rank of torchrun or inside parwrap's scope."""

import os
import sys
import time

import torch
import torch.distributed as dist

if by_torchrun := sys.argv[1] == "by-hand":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
else:
    import parwrap

    parwrap.reduce_sum(1.0)
os.write(1, f"reduced at {time.monotonic()}\n".encode())
if by_torchrun:
    dist.destroy_process_group()
