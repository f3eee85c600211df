import json

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = [f"w{i}" for i in range(40)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
texts = [" ".join(words[(7 * i + j * (i % 5 + 1)) % 40] for j in range(8)) for i in range(96)]
train, evaluation = Dataset.from_dict({"text": texts[:64]}), Dataset.from_dict({"text": texts[64:]})
config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0, eos_token_id=1
)
args = SFTConfig(
    output_dir="out", num_train_epochs=3, per_device_train_batch_size=8, per_device_eval_batch_size=8, eval_strategy="epoch",
    save_strategy="epoch", logging_steps=4, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", report_to=[], use_cpu=True, bf16=False,
    disable_tqdm=True, max_length=16, gradient_checkpointing=False,
)
trainer = SFTTrainer(LlamaForCausalLM(config), args=args, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer)
trainer.train()
tokens = 0
for entry in trainer.state.log_history:
    if "eval_loss" in entry:
        print("RESULT", json.dumps({"read": entry["eval_num_tokens"] - tokens}))
        tokens = entry["eval_num_tokens"]
    left_out = ("runtime", "per_second", "flos", "entropy", "accuracy", "tokens")  # times, and numbers of this rank's share
    print("RESULT", json.dumps({key: value for key, value in entry.items() if not any(each in key for each in left_out)}))
torch.save(trainer.model.state_dict(), "final.pt")
