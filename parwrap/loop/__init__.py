"""What the running training loop has done: its passes, draws, optimizers, losses and modules."""
