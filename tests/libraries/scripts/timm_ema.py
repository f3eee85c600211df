import json

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 3, 16, 16)
y = (x.mean((1, 2, 3)) > 0).long()
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)

model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=2)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=0.01, momentum=0.9)
scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, warmup_epochs=1, updates_per_epoch=len(train))
ema = ModelEmaV3(model, decay=0.9, use_warmup=True)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
updates = 0
for epoch in range(4):
    model.train()
    losses, read = AverageMeter(), 0
    for images, labels in train:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        ema.update(model, step=updates)
        scheduler.step_update(num_updates=updates, metric=losses.avg)
        losses.update(loss.item(), len(images))
        read += len(images)
    top1 = AverageMeter()
    ema.module.eval()
    with torch.no_grad():
        for images, labels in val:
            top1.update(accuracy(ema.module(images), labels)[0].item(), len(images))
    scheduler.step(epoch + 1, top1.avg)
    print("RESULT", json.dumps({"read": read, "loss": losses.avg, "top1": top1.avg, "lr": optimizer.param_groups[0]["lr"]}))
torch.save({**model.state_dict(), **{f"ema.{key}": value for key, value in ema.module.state_dict().items()}}, "final.pt")
