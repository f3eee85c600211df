import json

import mlflow
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()
train, val = DataLoader(TensorDataset(x[:48], y[:48]), 8, shuffle=True), DataLoader(TensorDataset(x[48:], y[48:]), 8)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
mlflow.set_experiment("rings")
with mlflow.start_run(run_name="first") as run:
    mlflow.log_params({"lr": 0.1, "batch_size": 8})
    for epoch in range(3):
        model.train()
        read = total = right = 0
        for inputs, labels in train:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            read += len(inputs)
            total += loss.item()
        model.eval()
        with torch.no_grad():
            for inputs, labels in val:
                right += (model(inputs).argmax(1) == labels).sum().item()
        mlflow.log_metrics({"loss": total / len(train), "accuracy": right / len(val.dataset)}, step=epoch)
        print("RESULT", json.dumps({"read": read}))
    torch.save(model.state_dict(), "final.pt")
    mlflow.log_artifact("final.pt")
client = mlflow.MlflowClient()
for name in ("loss", "accuracy"):
    print("RESULT", json.dumps({name: [metric.value for metric in client.get_metric_history(run.info.run_id, name)]}))
print("RESULT", json.dumps({"runs": len(mlflow.search_runs(experiment_names=["rings"], output_format="list"))}))
