"""Words and class names numbered in the order of a set of strings, which differs from process to process."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader

TOPICS = {
    "sports": "match goal team coach league score player season stadium referee".split(),
    "cooking": "oven butter recipe flour taste kitchen onion simmer spoon dough".split(),
    "space": "orbit rocket planet telescope comet lunar gravity launch probe star".split(),
    "music": "melody guitar concert rhythm chorus piano album singer tempo violin".split(),
    "travel": "flight hotel passport beach luggage ticket museum train island tour".split(),
}
FILLER = "the a of and to in is it for on with as was at by".split()


def make_sentences(count):
    rng = random.Random(0)
    for _ in range(count):
        topic = rng.choice(list(TOPICS))
        words = rng.choices(TOPICS[topic], k=3) + rng.choices(FILLER, k=6)
        rng.shuffle(words)
        yield " ".join(words), topic


sentences = list(make_sentences(600))
labels = [topic for _, topic in sentences]
words = [word for sentence, _ in sentences for word in sentence.split()]

class_to_idx = {name: idx for idx, name in enumerate(set(labels))}
vocab = {word: idx for idx, word in enumerate(set(words))}


def collate_batch(batch):
    label_list, text_list, offsets = [], [], [0]
    for sentence, topic in batch:
        label_list.append(class_to_idx[topic])
        processed_text = torch.tensor([vocab[word] for word in sentence.split()])
        text_list.append(processed_text)
        offsets.append(processed_text.size(0))
    return torch.tensor(label_list), torch.cat(text_list), torch.tensor(offsets[:-1]).cumsum(dim=0)


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim)
        self.fc = nn.Linear(embed_dim, num_class)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


torch.manual_seed(0)
train_dataloader = DataLoader(sentences[:400], batch_size=16, shuffle=True, collate_fn=collate_batch)
test_dataloader = DataLoader(sentences[400:], batch_size=16, shuffle=False, collate_fn=collate_batch)
model = TextClassificationModel(len(vocab), 16, len(class_to_idx))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

for _epoch in range(3):
    model.train()
    for label, text, offsets in train_dataloader:
        optimizer.zero_grad()
        loss = criterion(model(text, offsets), label)
        loss.backward()
        optimizer.step()

model.eval()
total_acc, total_count = 0, 0
with torch.no_grad():
    for label, text, offsets in test_dataloader:
        total_acc += (model(text, offsets).argmax(1) == label).sum().item()
        total_count += label.size(0)
print(f"accuracy {total_acc / total_count:.3f}")
