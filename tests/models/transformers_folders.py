"""Folders as transformers leaves them: small networks with an image processor or a tokenizer, made on the spot."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXTS = {"neg": ["a bad film", "no good at all, and far too long"], "pos": ["a good film", "great fun"]}
LABELS = {"pos": 0, "neg": 1}  # not the order of the alphabet


def vision(folder: Path, processor: bool = True) -> transformers.PreTrainedModel:
    """A ViT of 16 x 16 pixels with 4 classes; its images have mean 0.5 and deviation 0.25 taken off."""
    torch.manual_seed(1)
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    network = transformers.ViTForImageClassification(config)
    network.save_pretrained(folder)
    if processor:
        size = {"height": 16, "width": 16}
        transformers.ViTImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained(folder)
    return network


def language(folder: Path, kind: str, weights: bool = True) -> transformers.PreTrainedModel:
    """A "bert" or a "gpt2" of two classes, or a "language model", with a tokenizer; only the first knows padding."""
    torch.manual_seed(2)
    words = [text for texts in TEXTS.values() for text in texts]
    labels = {"num_labels": 2, "label2id": LABELS, "id2label": {i: name for name, i in LABELS.items()}}
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"} if kind == "bert" else {"eos_token": "[END]"}
    inner = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(words, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[END]", "[PAD]"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.save_pretrained(folder)
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
            max_position_embeddings=6, **labels,
        )  # fmt: skip
        network = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.GPT2Config(
            n_embd=12, n_layer=1, n_head=2, vocab_size=30, n_positions=6, bos_token_id=1, eos_token_id=1, **labels
        )
        head = transformers.GPT2LMHeadModel if kind == "language model" else transformers.GPT2ForSequenceClassification
        network = head(config)
    network.save_pretrained(folder)
    if not weights:
        (folder / "model.safetensors").unlink()
    return network


def write_texts(folder: Path) -> None:
    """TEXTS as FOLDER/CLASS/FILE.txt."""
    for name, texts in TEXTS.items():
        (folder / name).mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / name / f"{number}.txt").write_text(text)
