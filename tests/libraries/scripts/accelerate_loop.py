import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(64, 6)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
train = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)
model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
for epoch in range(4):
    model.train()
    read = total = right = 0
    for inputs, targets in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        read += len(inputs)
        total += loss.item()
    model.eval()
    for inputs, targets in val:
        with torch.no_grad():
            predicted = model(inputs).argmax(-1)
        predicted, targets = accelerator.gather_for_metrics((predicted, targets))
        right += (predicted == targets).sum().item()
    if accelerator.is_main_process:
        print("RESULT", json.dumps({"read": read, "loss": total / len(train), "right": right}))
    accelerator.save_state("state")
accelerator.wait_for_everyone()
with torch.no_grad():
    next(accelerator.unwrap_model(model).parameters()).zero_()
accelerator.load_state("state")
accelerator.save_model(model, "model")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "final.pt")
