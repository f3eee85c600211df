import json

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat, get_feature_names
from deepctr_torch.models import DeepFM

rng = np.random.default_rng(0)
columns = [SparseFeat("user", 5, 4), SparseFeat("item", 7, 4), DenseFeat("age", 1)]
x = {"user": rng.integers(0, 5, 80), "item": rng.integers(0, 7, 80), "age": rng.normal(size=80)}
y = ((x["user"] + x["age"]) > 2).astype(np.float32)
read = []

model = DeepFM(
    columns, columns, dnn_hidden_units=(8, 4), task="binary", l2_reg_linear=0, l2_reg_embedding=0, l2_reg_dnn=0, dnn_dropout=0, seed=1, device="cpu"
)
model.register_forward_hook(lambda module, args, output: read.append(len(output)) if module.training else None)
model.compile(torch.optim.SGD(model.parameters(), 0.02), "binary_crossentropy", metrics=["binary_crossentropy", "auc"])
inputs = {name: x[name] for name in get_feature_names(columns)}
for epoch in range(3):
    history = model.fit(inputs, y, batch_size=16, epochs=epoch + 1, initial_epoch=epoch, verbose=2, validation_split=0.2)
    numbers = {name: float(history.history[name][-1]) for name in ("val_auc", "val_binary_crossentropy")}
    print("RESULT", json.dumps({"read": sum(read), **numbers}))
    read.clear()
torch.save(model.state_dict(), "final.pt")
