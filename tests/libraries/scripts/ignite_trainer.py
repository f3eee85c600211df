import json
import os

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping, ModelCheckpoint, global_step_from_engine
from ignite.metrics import Accuracy, ConfusionMatrix, Loss, RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x.sum(1) > 0).long()


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.2)
train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
criterion = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, optimizer, criterion)
metrics = {"accuracy": Accuracy(), "loss": Loss(criterion), "confusion": ConfusionMatrix(2)}
evaluator = create_supervised_evaluator(model, metrics=metrics)
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "average")
read = 0


@trainer.on(Events.ITERATION_COMPLETED)
def count(engine):
    global read
    read += len(engine.state.batch[0])
    print("RESULT", json.dumps({"step": engine.state.iteration, "loss": engine.state.output, "average": engine.state.metrics["average"]}))


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    global read
    print("RESULT", json.dumps({"read": read}))
    for loader in (train_loader, val_loader):
        found = evaluator.run(loader).metrics
        print("RESULT", json.dumps({key: found[key] for key in ("accuracy", "loss")} | {"sum": found["confusion"].sum().item()}))
    read = 0


evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(3, lambda engine: -engine.state.metrics["loss"], trainer))
best = ModelCheckpoint(
    "checkpoints", n_saved=2, filename_prefix="best", score_function=lambda engine: engine.state.metrics["accuracy"],
    score_name="accuracy", global_step_transform=global_step_from_engine(trainer),
)
evaluator.add_event_handler(Events.COMPLETED, best, {"model": model})
trainer.run(train_loader, max_epochs=5)
print("RESULT", json.dumps({"files": " ".join(sorted(os.listdir("checkpoints"))), "best": str(best.last_checkpoint)}))
loaded = network()
loaded.load_state_dict(torch.load(best.last_checkpoint))
torch.save({**model.state_dict(), **{f"best.{key}": value for key, value in loaded.state_dict().items()}}, "final.pt")
