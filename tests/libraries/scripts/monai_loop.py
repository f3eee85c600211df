import json
import sys

import numpy as np
import torch
from monai.data import DataLoader, Dataset, decollate_batch, list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import (
    Activations, AsDiscrete, Compose, EnsureChannelFirstd, RandCropByPosNegLabeld, RandRotate90d, ScaleIntensityd,
)
from monai.utils import set_determinism

set_determinism(0)
generator = np.random.default_rng(0)


def pictures(count):
    for _ in range(count):
        row, column = generator.integers(6, 26, 2)
        seg = (np.hypot(*np.ogrid[-row:32 - row, -column:32 - column]) < 6).astype(np.float32)
        yield {"img": seg + generator.normal(0, 0.2, (32, 32)).astype(np.float32), "seg": seg}


keys = ["img", "seg"]
crops = RandCropByPosNegLabeld(keys, label_key="seg", spatial_size=[16, 16], pos=1, neg=1, num_samples=4)
train_transforms = Compose([EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd(keys), crops, RandRotate90d(keys, prob=0.5)])
val_transforms = Compose([EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd(keys)])
if sys.argv[1] == "whole":
    train_transforms = val_transforms
train_loader = DataLoader(Dataset(list(pictures(16)), train_transforms), batch_size=4, shuffle=True, collate_fn=list_data_collate)
val_loader = DataLoader(Dataset(list(pictures(6)), val_transforms), batch_size=1, collate_fn=list_data_collate)

model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), num_res_units=1)
loss_function = DiceLoss(sigmoid=True)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
dice_metric = DiceMetric(include_background=True, reduction="mean")
post = Compose([Activations(sigmoid=True), AsDiscrete(threshold=0.5)])
best = -1.0
for epoch in range(3):
    model.train()
    read = 0
    for batch in train_loader:
        inputs, labels = batch["img"], batch["seg"]
        read += len(inputs)
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print("RESULT", json.dumps({"read": read}))
    model.eval()
    with torch.no_grad():
        for batch in val_loader:
            outputs = sliding_window_inference(batch["img"], (16, 16), 4, model)
            dice_metric(y_pred=[post(each) for each in decollate_batch(outputs)], y=decollate_batch(batch["seg"]))
        metric = dice_metric.aggregate().item()
        dice_metric.reset()
    if metric > best:
        best = metric
        torch.save(model.state_dict(), "best.pt")
    print("RESULT", json.dumps({"epoch": epoch} | ({"loss": loss.item(), "dice": metric} if sys.argv[1] == "whole" else {})))
model.load_state_dict(torch.load("best.pt"))
torch.save(model.state_dict(), "final.pt")
