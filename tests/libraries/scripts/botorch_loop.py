import json

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)


def measured(x):
    return 1 - (x - 0.4).norm(dim=-1, keepdim=True)


x = torch.rand(8, 2, dtype=torch.double)
y = measured(x)
for _ in range(2):
    gp = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp))
    candidate, _ = optimize_acqf(LogExpectedImprovement(gp, best_f=y.max()), bounds=bounds, q=1, num_restarts=3, raw_samples=16)
    x, y = torch.cat([x, candidate]), torch.cat([y, measured(candidate)])
    print("RESULT", json.dumps({"candidate": candidate[0].tolist(), "best": y.max().item()}))
torch.save({"x": x, "y": y, **gp.state_dict()}, "final.pt")
