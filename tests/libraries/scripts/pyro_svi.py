import json

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam
from torch.utils.data import DataLoader, TensorDataset

pyro.set_rng_seed(0)
x = torch.randn(64, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(64)
read = 0


def model(inputs, targets):
    weight = pyro.param("weight", torch.zeros(3))
    scale = pyro.param("scale", torch.ones(()), constraint=dist.constraints.positive)
    with pyro.plate("data", len(inputs)):
        pyro.sample("obs", dist.Normal(inputs @ weight, scale), obs=targets)


def guide(inputs, targets):
    pass


svi = SVI(model, guide, ClippedAdam({"lr": 0.05}), Trace_ELBO())
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
for epoch in range(4):
    read = 0
    for inputs, targets in loader:
        svi.step(inputs, targets)
        read += len(inputs)
    print("RESULT", json.dumps({"read": read, "elbo": svi.evaluate_loss(x, y)}))
torch.save({name: value.detach() for name, value in pyro.get_param_store().items()}, "final.pt")
