import json

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
config = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
BertForSequenceClassification(config).save_pretrained("pretrained")
base = BertForSequenceClassification.from_pretrained("pretrained")
lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"])
model = get_peft_model(base, lora)
x = torch.randint(5, 50, (64, 8))
y = (x.float().mean(1) > 27).long()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)
train = DataLoader(TensorDataset(x[:48], y[:48]), 8, shuffle=True)
val = DataLoader(TensorDataset(x[48:], y[48:]), 8)
for epoch in range(3):
    model.train()
    read = total = right = 0
    for ids, labels in train:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        read += len(ids)
        total += loss.item()
    model.eval()
    with torch.no_grad():
        for ids, labels in val:
            right += (model(input_ids=ids).logits.argmax(-1) == labels).sum().item()
    print("RESULT", json.dumps({"read": read, "loss": total / len(train), "right": right}))
    model.save_pretrained(f"adapter{epoch}")
again = PeftModel.from_pretrained(BertForSequenceClassification.from_pretrained("pretrained"), "adapter2")
torch.save(again.merge_and_unload().state_dict(), "final.pt")
