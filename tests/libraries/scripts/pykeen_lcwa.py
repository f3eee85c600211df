import json

import torch
from pykeen.pipeline import pipeline
from pykeen.training import TrainingCallback

torch.manual_seed(0)
read = 0


class Report(TrainingCallback):
    def on_batch(self, epoch, batch, batch_loss, **kwargs):
        global read
        read += len(next(iter(batch.values())))

    def post_epoch(self, epoch, epoch_loss, **kwargs):
        global read
        print("RESULT", json.dumps({"read": read}))
        read = 0


result = pipeline(
    dataset="nations", model="TransE", model_kwargs={"embedding_dim": 8}, loss="bceaftersigmoid", optimizer="SGD", optimizer_kwargs={"lr": 0.5},
    training_loop="lcwa", training_kwargs={"num_epochs": 5, "batch_size": 64, "use_tqdm": False, "callbacks": Report()},
    evaluation_kwargs={"use_tqdm": False}, random_seed=0, device="cpu",
)
print("RESULT", json.dumps({"hits@10": result.get_metric("hits@10"), "losses": len(result.losses)}))
torch.save(result.model.state_dict(), "final.pt")
