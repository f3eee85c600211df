"""A plain loop: an MLP learns the labels that another MLP gives to random inputs."""

import argparse
import resource
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=8192)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--width", type=int, default=1024)
arguments = parser.parse_args()

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
inputs = torch.randn(arguments.samples + 1024, 256)
with torch.no_grad():
    labels = teacher(inputs).argmax(1)
training = TensorDataset(inputs[:-1024], labels[:-1024])
held_out = DataLoader(TensorDataset(inputs[-1024:], labels[-1024:]), batch_size=256)

width = arguments.width
hidden = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), *hidden, nn.Linear(width, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
seconds, steps = 0.0, 0
for _ in range(arguments.epochs):
    begin = time.perf_counter()
    model.train()
    for x, y in DataLoader(training, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
    seconds += time.perf_counter() - begin
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in held_out) / len(held_out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"steps {steps}  seconds {seconds:.3f}  loss {loss:.4f}  peak {peak:.1f} MiB")
