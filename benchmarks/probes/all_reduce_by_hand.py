"""A script for torchrun: says when its rank's first all-reduce is done, and stays until the file ``PROBE_STAYS`` is gone."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os.write(1, f"reduced at {time.monotonic()}\n".encode())
while os.path.exists(os.environ["PROBE_STAYS"]):
    time.sleep(0.02)
dist.destroy_process_group()
