"""Mixed precision: autocast, the loss scale of fp16, and float16 models."""
