import json
import random
import sys

import torch
from datasets import Dataset
from sentence_transformers import InputExample, SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers import losses, models
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, BertTokenizerFast

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "red", "green", "blue", "cat", "dog", "bird"]
torch.manual_seed(0)
BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained("pretrained")
config = BertConfig(
    vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
BertModel(config).save_pretrained("pretrained")
model = SentenceTransformer(modules=[models.Transformer("pretrained", max_seq_length=16), models.Pooling(16)], device="cpu")

drawn = random.Random(0)
pairs = [[" ".join(drawn.choices(words[5:], k=4)) for _ in range(2)] for _ in range(48)]
scores = [len(set(a.split()) & set(b.split())) / 4 for a, b in pairs]
evaluator = EmbeddingSimilarityEvaluator(*zip(*pairs[:16]), scores[:16], name="dev")
read = 0


class Counted(losses.CosineSimilarityLoss):
    def forward(self, features, labels):
        global read
        read += len(labels) * torch.is_grad_enabled()
        return super().forward(features, labels)


if sys.argv[1] == "fit":
    examples = [InputExample(texts=pair, label=score) for pair, score in zip(pairs, scores)]
    loader = DataLoader(examples, shuffle=True, batch_size=8)
    model.fit([(loader, Counted(model))], evaluator=evaluator, epochs=3, warmup_steps=2, output_path="best", show_progress_bar=False)
else:
    data = Dataset.from_dict({"sentence1": [a for a, b in pairs], "sentence2": [b for a, b in pairs], "score": scores})
    args = SentenceTransformerTrainingArguments(
        "out", num_train_epochs=3, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="epoch", logging_steps=3,
        load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data.select(range(16)), loss=Counted(model), evaluator=evaluator
    )
    trainer.train()
    for entry in trainer.state.log_history:
        left_out = ("runtime", "per_second", "flos")
        print("RESULT", json.dumps({key: value for key, value in entry.items() if not any(each in key for each in left_out)}))
print("RESULT", json.dumps({"read": read, **evaluator(model), "encoded": model.encode(["cat dog"])[0].tolist()}))
model.save("final")
loaded = SentenceTransformer("final", device="cpu")
print("RESULT", json.dumps({"encoded": loaded.encode(["cat dog"])[0].tolist()}))
torch.save(loaded.state_dict(), "final.pt")
