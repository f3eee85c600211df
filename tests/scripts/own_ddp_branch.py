"""A script with a DDP branch of its own, which it takes when it sees RANK."""

# To run on one process:          python own_ddp_branch.py
# To run with DDP on 2 processes:  torchrun --standalone --nproc_per_node=2 own_ddp_branch.py

import os

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# -----------------------------------------------------------------------------
max_epochs = 3
batch_size = 25
learning_rate = 1e-2
device = "cuda" if torch.cuda.is_available() else "cpu"
# -----------------------------------------------------------------------------

ddp = int(os.environ.get("RANK", -1)) != -1  # is this a ddp run?
if ddp:
    init_process_group(backend="nccl" if device == "cuda" else "gloo")
    ddp_rank = int(os.environ["RANK"])
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
else:
    master_process = True
    seed_offset = 0

g = torch.Generator().manual_seed(1337)
x = torch.randn(800, 8, generator=g)
y = (x[:, :4] + x[:, 4:]).argmax(dim=1)
train_set = TensorDataset(x[:500], y[:500])
x_val, y_val = x[500:].to(device), y[500:].to(device)
sampler = DistributedSampler(train_set) if ddp else None
train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, shuffle=sampler is None)

torch.manual_seed(1337 + seed_offset)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model  # unwrap DDP container if needed


@torch.no_grad()
def estimate_accuracy():
    raw_model.eval()
    accuracy = (raw_model(x_val).argmax(dim=-1) == y_val).float().mean().item()
    raw_model.train()
    return accuracy


for epoch in range(max_epochs):
    if ddp:
        sampler.set_epoch(epoch)
    for xb, yb in train_loader:
        loss = nn.functional.cross_entropy(model(xb.to(device)), yb.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"epoch {epoch}: loss {loss.item():.4f}, val accuracy {estimate_accuracy():.4f}")

if master_process:
    print(f"accuracy {estimate_accuracy():.4f}")
if ddp:
    destroy_process_group()
