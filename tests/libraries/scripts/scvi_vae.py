import json

import anndata
import numpy as np
import scvi
import torch

scvi.settings.seed = 0
generator = np.random.default_rng(0)
counts = generator.poisson(generator.gamma(2, 2, (1, 30)), (128, 30)).astype(np.float32)
adata = anndata.AnnData(counts)
adata.obs["batch"] = np.where(np.arange(128) % 2, "one", "two")
scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
model = scvi.model.SCVI(adata, n_hidden=16, n_latent=4)
read = 0


def count(module, inputs):
    global read
    read += len(inputs[0]["X"]) if module.training else 0


model.module.register_forward_pre_hook(count)
model.train(
    max_epochs=5, train_size=0.75, batch_size=16, accelerator="cpu", check_val_every_n_epoch=1, enable_progress_bar=False,
)
print("RESULT", json.dumps({"read": read}))
for name in ("elbo_validation", "elbo_train"):
    print("RESULT", json.dumps({name: len(model.history[name])}))
print("RESULT", json.dumps({"latent": model.get_latent_representation().shape}))
torch.save(model.module.state_dict(), "final.pt")
