"""
Transformers
============

Measure a network of Hugging Face's transformers: a batch with labels, many tokens,
layers by block.
"""

# %%
# A small BERT with random weights stands for yours;
# ``AutoModelForSequenceClassification.from_pretrained`` gives a trained one.

import torch
from transformers import BertConfig, BertForSequenceClassification

import flatlens as fl

torch.manual_seed(0)
settings = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=3,
)
model = BertForSequenceClassification(settings).eval()

# %%
# The batch is the dict that a tokenizer returns, with ``labels``. Padding is hidden by
# its attention mask.

tokens = torch.randint(1, 100, (16, 12))
mask = torch.ones_like(tokens)
mask[8:, 9:] = 0
batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(3, (16,))}
problem = fl.Problem(model, "cross_entropy", batch)
problem

# %%
# One forward and three backward passes give the report below. ``fl.measure(model,
# "cross_entropy", batch)`` is the same in one call, with 8 to 14 numbers by default.

report = fl.measure(fl.Lens(problem), "pass")
frame = report.frame()
frame[frame["layer"].str.contains("layer.0") & (frame["measure"] == "mls")][
    ["layer", "value", "kind"]
]

# %%
# Measures that need second derivatives of smooth activations take products.
# ``layers=`` restricts them, and a measure whose products, searches or draws are
# expected to take more than ten minutes is refused with that time, unless you write
# ``anyway=True``.

head = fl.measure(fl.Lens(problem), ["relative_flatness"], layers="classifier")
head["relative_flatness", "classifier"].value
