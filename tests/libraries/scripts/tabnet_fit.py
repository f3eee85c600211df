import json

import numpy as np
import torch
from pytorch_tabnet.callbacks import Callback
from pytorch_tabnet.tab_model import TabNetClassifier

rng = np.random.default_rng(0)
x = rng.normal(size=(160, 6)).astype(np.float32)
y = (x[:, 0] + x[:, 1] > 0).astype(int)
read = 0


class Report(Callback):
    def on_batch_end(self, batch, logs=None):
        global read
        read += logs["batch_size"]

    def on_epoch_end(self, epoch, logs=None):
        global read
        print("RESULT", json.dumps({"epoch": epoch, "read": read, "val_auc": float(logs["val_auc"]), "val_logloss": float(logs["val_logloss"])}))
        read = 0


model = TabNetClassifier(
    n_d=4, n_a=4, n_steps=2, seed=0, verbose=0, device_name="cpu", optimizer_fn=torch.optim.SGD, optimizer_params={"lr": 0.05}
)
fit = {"eval_set": [(x[128:], y[128:])], "eval_name": ["val"], "eval_metric": ["auc", "logloss"], "callbacks": [Report()]}
model.fit(x[:128], y[:128], max_epochs=4, patience=3, batch_size=32, virtual_batch_size=32, **fit)
model.save_model("tabnet")
again = TabNetClassifier()
again.load_model("tabnet.zip")
print("RESULT", json.dumps({"probabilities": again.predict_proba(x[128:])[:, 1].tolist()}))
torch.save(model.network.state_dict(), "final.pt")
