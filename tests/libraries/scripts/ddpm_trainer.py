import json

import torch
from denoising_diffusion_pytorch import GaussianDiffusion1D, Trainer1D, Unet1D
from denoising_diffusion_pytorch.denoising_diffusion_pytorch_1d import Dataset1D

torch.manual_seed(0)
read = 0
model = Unet1D(dim=8, dim_mults=(1, 2), channels=2)
diffusion = GaussianDiffusion1D(model, seq_length=16, timesteps=20, objective="pred_v")


def count(module, inputs):
    global read
    read += len(inputs[0])


diffusion.register_forward_pre_hook(count)
trainer = Trainer1D(
    diffusion, dataset=Dataset1D(torch.rand(64, 2, 16)), train_batch_size=8, train_lr=1e-3, train_num_steps=24, gradient_accumulate_every=2,
    ema_decay=0.995, save_and_sample_every=12, num_samples=4, amp=False,
)
trainer.train()
print("RESULT", json.dumps({"read": read}))
print("RESULT", json.dumps({"steps": trainer.step, "sampled": diffusion.sample(batch_size=2).shape}))
torch.save(trainer.ema.ema_model.state_dict(), "final.pt")
