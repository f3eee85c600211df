import json

import numpy as np
import torch
from darts import TimeSeries
from darts.dataprocessing.transformers import Scaler
from darts.metrics import mae
from darts.models import NBEATSModel
from pytorch_lightning.callbacks import EarlyStopping

steps = np.arange(160)
series = TimeSeries.from_values((np.sin(steps / 4) + steps / 100).astype(np.float32))
scaler = Scaler()
train, val = series.split_before(104)
train, val = scaler.fit_transform(train), scaler.transform(val)


model = NBEATSModel(
    input_chunk_length=12, output_chunk_length=4, num_stacks=2, num_blocks=1, layer_widths=16, n_epochs=5, batch_size=12, random_state=0,
    optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.01},
    pl_trainer_kwargs={"accelerator": "cpu", "callbacks": [EarlyStopping("val_loss", patience=3)], "enable_progress_bar": False},
    save_checkpoints=True, force_reset=True, work_dir="darts", model_name="nbeats",
)
model.fit(train, val_series=val)
predicted = model.predict(n=8, series=train)
print("RESULT", json.dumps({"predicted": predicted.values().ravel().tolist(), "mae": float(mae(val, predicted))}))
best = NBEATSModel.load_from_checkpoint("nbeats", work_dir="darts", best=True)
print("RESULT", json.dumps({"best": best.predict(n=8, series=train).values().ravel().tolist()}))
torch.save(model.model.state_dict(), "final.pt")
