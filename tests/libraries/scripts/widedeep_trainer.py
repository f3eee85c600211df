import json

import numpy as np
import pandas as pd
import torch
from pytorch_widedeep import Trainer
from pytorch_widedeep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_widedeep.metrics import Accuracy
from pytorch_widedeep.models import TabMlp, Wide, WideDeep
from pytorch_widedeep.preprocessing import TabPreprocessor, WidePreprocessor

rng = np.random.default_rng(0)
frame = pd.DataFrame({"city": rng.choice(list("abcd"), 96), "job": rng.choice(list("xyz"), 96), "age": rng.normal(size=96), "pay": rng.normal(size=96)})
target = ((frame.age + frame.pay + (frame.city == "a")) > 0).astype(int).to_numpy()
wide = WidePreprocessor(wide_cols=["city", "job"])
tab = TabPreprocessor(cat_embed_cols=["city", "job"], continuous_cols=["age", "pay"])
x_wide, x_tab = wide.fit_transform(frame), tab.fit_transform(frame)
read = 0

torch.manual_seed(0)
deep = TabMlp(
    column_idx=tab.column_idx, cat_embed_input=tab.cat_embed_input, continuous_cols=["age", "pay"], cont_norm_layer=None, mlp_hidden_dims=[8, 4], mlp_dropout=0.0
)
model = WideDeep(wide=Wide(input_dim=int(x_wide.max())), deeptabular=deep)


def count(module, args, output):
    global read
    read += len(output) * module.training


class Report(Callback):
    def on_epoch_end(self, epoch, logs=None, metric=None):
        global read
        print("RESULT", json.dumps({"epoch": epoch, "read": read, "loss": logs["train_loss"], "val": logs["val_loss"], "acc": float(logs["val_acc"])}))
        read = 0


model.register_forward_hook(count)
callbacks = [Report(), EarlyStopping(patience=3), ModelCheckpoint(filepath="best/model", monitor="val_loss", save_best_only=True, max_save=1)]
trainer = Trainer(
    model, objective="binary", optimizers=torch.optim.SGD(model.parameters(), 0.1), metrics=[Accuracy()], callbacks=callbacks, verbose=0, num_workers=0
)
train = {"X_wide": x_wide[:64], "X_tab": x_tab[:64], "target": target[:64]}
trainer.fit(X_train=train, X_val={"X_wide": x_wide[64:], "X_tab": x_tab[64:], "target": target[64:]}, n_epochs=4, batch_size=16)
print("RESULT", json.dumps({"predicted": trainer.predict(X_wide=x_wide[64:], X_tab=x_tab[64:], batch_size=16).tolist()}))
torch.save(model.state_dict(), "final.pt")
