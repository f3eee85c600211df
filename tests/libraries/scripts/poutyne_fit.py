import json

import torch
from poutyne import Callback, EarlyStopping, Model, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x.sum(1) > 0).long()
read = 0


class Counted(TensorDataset):
    def __getitem__(self, index):
        global read
        read += 1
        return super().__getitem__(index)


class Report(Callback):
    def on_epoch_end(self, epoch_number, logs):
        global read
        numbers = {key: float(value) for key, value in logs.items() if key.startswith("val_")}
        print("RESULT", json.dumps({"epoch": epoch_number, "read": read, **numbers}))
        read = 0


network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(network.parameters(), 0.2)
model = Model(network, optimizer, "cross_entropy", batch_metrics=["accuracy"], epoch_metrics=["f1"])
train = DataLoader(Counted(x[:64], y[:64]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
best = ModelCheckpoint("best.pt", monitor="val_loss", save_best_only=True, restore_best=True)
model.fit_generator(train, val, epochs=5, callbacks=[best, EarlyStopping(monitor="val_acc", patience=4), Report()], verbose=False)
loss, (accuracy, f1) = model.evaluate_generator(val, verbose=False)
print("RESULT", json.dumps({"loss": float(loss), "accuracy": float(accuracy), "f1": float(f1)}))
torch.save(network.state_dict(), "final.pt")
