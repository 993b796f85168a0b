"""The preparation of images and texts by a network's makers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from flatlens.errors import BadModel, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
"""The files that show that a folder of transformers has an image processor or a tokenizer."""
NO_CODE = {"trust_remote_code": False}
"""An argument of all that transformers reads: without it, transformers asks on stdin whether to run a folder's code."""


@dataclass(frozen=True, eq=False)
class ImagePreparation:
    """A function that prepares one image as in the network's training."""

    convert: Callable[[Image], Tensor]  #: to (channels, rows, columns)
    description: str
    mode: str = "RGB"  #: Pillow's name of the channels that it reads
    labels: Mapping[str, int] = field(default_factory=dict)  #: the network's own, by the classes' names


@dataclass(frozen=True, eq=False)
class TextPreparation:
    """A function that prepares all texts together: they are padded to one length."""

    encode: Callable[[Sequence[str]], dict[str, Tensor]]  #: the network's arguments, (n, tokens) each
    description: str
    labels: Mapping[str, int] = field(default_factory=dict)
    next_tokens: bool = False  #: the network predicts each token's next one: these are the targets


NetworkPreparation: TypeAlias = ImagePreparation | TextPreparation


def of_timm(timm: ModuleType, network: nn.Module) -> ImagePreparation:
    """Return the evaluation transform that timm makes from `resolve_model_data_config`."""
    settings: dict[str, Any] = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**settings, is_training=False)
    channels, rows, columns = settings["input_size"]
    described = (
        f"timm's own (resolve_model_data_config): to {rows} x {columns} pixels by {settings['interpolation']} "
        f"interpolation, {settings['crop_mode']} crop of {settings['crop_pct']:g}; mean {_numbers(settings['mean'])}, "
        f"standard deviation {_numbers(settings['std'])}"
    )
    return ImagePreparation(transform, described, "L" if channels == 1 else "RGB")


def of_transformers(transformers: ModuleType, name: str, network: nn.Module) -> NetworkPreparation | None:
    """Return the image processor or the tokenizer saved with the network; None if there is none.

    Raises:
        BadModel: it is there and cannot be read.
    """
    reads = getattr(network, "main_input_name", "")
    files = {"pixel_values": IMAGE_FILES, "input_ids": TEXT_FILES}.get(reads, ())
    folder = Path(name)
    if not files or (folder.is_dir() and not any((folder / file).is_file() for file in files)):
        return None
    try:
        labels = {str(k): int(v) for k, v in (getattr(network.config, "label2id", None) or {}).items()}
        if reads == "pixel_values":
            return _of_processor(transformers.AutoImageProcessor.from_pretrained(name, **NO_CODE), network, labels)
        return _of_tokenizer(transformers.AutoTokenizer.from_pretrained(name, **NO_CODE), network, labels)
    except Exception as error:  # wrong types in its files make transformers fail in any way
        if not folder.is_dir() and isinstance(error, OSError | ValueError | ImportError):
            return None  # not every repository has one
        told = one_line(error, 200)
        raise BadModel(f"MODEL: hf:{name}: its preparation ({', '.join(files[:2])}) cannot be read: {told}") from error


def _of_processor(processor: Any, network: nn.Module, labels: Mapping[str, int]) -> ImagePreparation:
    def convert(image: Image) -> Tensor:
        pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels

    facts = processor.to_dict()
    steps = []
    if facts.get("do_resize"):
        size = "x".join(str(v) for v in (facts.get("size") or {}).values() if isinstance(v, int))
        steps.append(f"to {size.replace('x', ' x ')} pixels")
    if facts.get("do_center_crop"):
        steps.append("centre crop")
    if facts.get("do_rescale"):
        steps.append(f"times {facts['rescale_factor']:.4g}")
    if facts.get("do_normalize"):
        mean, deviation = _numbers(facts["image_mean"]), _numbers(facts["image_std"])
        steps.append(f"mean {mean}, standard deviation {deviation}")
    described = f"its own image processor ({type(processor).__name__}): {'; '.join(steps) or 'nothing changed'}"
    mode = "L" if getattr(network.config, "num_channels", 3) == 1 else "RGB"
    return ImagePreparation(convert, described, mode, labels)


def _of_tokenizer(tokenizer: Any, network: nn.Module, labels: Mapping[str, int]) -> TextPreparation:
    config: Any = network.config
    remarks = []
    if tokenizer.pad_token is None:  # such as GPT-2's
        tokenizer.pad_token = tokenizer.eos_token
        remarks.append(f"padded with {tokenizer.eos_token}, because it has no padding token")
    if getattr(config, "pad_token_id", None) is None:  # a classifier on top reads the last token that is none of these
        config.pad_token_id = tokenizer.pad_token_id
    limits = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    longest = min(int(limit) for limit in limits if limit)

    def encode(texts: Sequence[str]) -> dict[str, Tensor]:
        found = tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        return dict(found)

    named = f"its own tokenizer ({type(tokenizer).__name__}): padded to the longest text, cut at {longest} tokens"
    causal = type(network).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    if causal:
        remarks.append("each token's target is the next one")
    return TextPreparation(encode, "; ".join([named, *remarks]), labels, causal)


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.4g}" for value in values) if isinstance(values, list | tuple) else f"{values:.4g}"
