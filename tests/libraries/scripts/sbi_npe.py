import json
import shutil

import torch
from sbi.inference import NPE
from sbi.neural_nets import posterior_nn
from sbi.utils import BoxUniform
from torch.utils.data import default_collate

torch.manual_seed(0)
prior = BoxUniform(low=-2 * torch.ones(3), high=2 * torch.ones(3))
theta = prior.sample((250,))
x = theta + 1.0 + torch.randn_like(theta) * 0.1

inference = NPE(prior=prior, density_estimator=posterior_nn("maf", hidden_features=16, num_transforms=2), show_progress_bars=False)
inference.append_simulations(theta, x)
read = 0


def collate(samples):
    global read
    read += len(samples) if torch.is_grad_enabled() else 0
    return default_collate(samples)


estimator = inference.train(
    training_batch_size=24, max_num_epochs=6, stop_after_epochs=3, dataloader_kwargs={"collate_fn": collate}
)
print("RESULT", json.dumps({"read": read}))
print("RESULT", json.dumps({"validation": [float(each) for each in inference.summary["validation_loss"]]}))
posterior = inference.build_posterior()
samples = posterior.sample((50,), x=torch.tensor([0.5, 1.0, 1.5]), show_progress_bars=False)
print("RESULT", json.dumps({"log_prob": posterior.log_prob(samples, x=torch.tensor([0.5, 1.0, 1.5])).mean().item()}))
shutil.rmtree("sbi-logs")
torch.save(estimator.state_dict(), "final.pt")
