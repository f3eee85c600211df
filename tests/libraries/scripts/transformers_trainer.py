import json

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(0)
read = 0


class Texts(Dataset):
    def __init__(self, count, seed, training=False):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 50, (count, 8), generator=generator)
        self.labels = (self.ids.float().mean(1) > 27).long()
        self.training = training

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        global read
        read += self.training
        return {"input_ids": self.ids[index], "attention_mask": torch.ones(8, dtype=torch.long), "labels": self.labels[index]}


class Count(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        global read
        print("RESULT", json.dumps({"read": read}))
        read = 0


config = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
BertForSequenceClassification(config).save_pretrained("pretrained")


def trainer(epochs):
    args = TrainingArguments(
        output_dir="out", num_train_epochs=epochs, per_device_train_batch_size=8, per_device_eval_batch_size=8, eval_strategy="epoch",
        save_strategy="epoch", logging_steps=4, load_best_model_at_end=True, metric_for_best_model="accuracy", learning_rate=1e-3,
        optim="sgd", lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    return Trainer(
        model=BertForSequenceClassification.from_pretrained("pretrained"),
        args=args,
        train_dataset=Texts(64, 1, training=True),
        eval_dataset=Texts(32, 2),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[Count()],
    )


def report(trainer):
    for entry in trainer.state.log_history:
        left_out = ("runtime", "per_second", "flos")  # times, and operations that each rank has done
        print("RESULT", json.dumps({key: value for key, value in entry.items() if not any(each in key for each in left_out)}))
    print("RESULT", json.dumps({"best": trainer.state.best_model_checkpoint, "loss": trainer.evaluate()["eval_loss"]}))


first = trainer(3)
first.train()
report(first)
more = trainer(5)
more.train(resume_from_checkpoint="out/checkpoint-24")
report(more)
torch.save(more.model.state_dict(), "final.pt")
