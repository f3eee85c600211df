"""TensorBoard scalars while training, in the default directory."""

import glob
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(5)
data = torch.randn(900, 6)
target = (data[:, 0] * 2 - data[:, 1]).unsqueeze(1)
train_dl = DataLoader(TensorDataset(data[:700], target[:700]), batch_size=25, shuffle=True)

writer = SummaryWriter("runs/experiment")
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.02)
step = 0
for epoch in range(3):
    running = 0.0
    for x, y in train_dl:
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        running += loss.item()
        writer.add_scalar("loss/step", loss.item(), step)
        step += 1
    writer.add_scalar("loss/epoch", running / len(train_dl), epoch)
writer.add_histogram("weights", net[0].weight, epoch)
writer.close()

assert os.path.isdir("runs/experiment")
assert glob.glob("runs/experiment/events.out.tfevents.*")

model = net
with torch.no_grad():
    print("loss", nn.functional.mse_loss(net(data[700:]), target[700:]).item())
