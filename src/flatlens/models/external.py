"""Networks that others wrote: MODEL on the command line, and architectures of a study.

They come from `file.py:callable`, timm or Hugging Face by name, with their preparation of data.
"""

from __future__ import annotations

import ast
import difflib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from flatlens import user_code
from flatlens.errors import BadInput, BadModel, MissingExtra, UnknownName, needs, one_line
from flatlens.models.weights import IN_A_FOLDER
from flatlens.problem.data import load_seeded, seeded
from flatlens.settings_json import Options, check

if TYPE_CHECKING:
    from PIL.Image import Image


_PATIENCE = 5.0  #: seconds to wait for a connection


def reachable() -> bool:
    """Return whether the hub answers; behind a proxy the download finds out."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_PATIENCE):
            return True
    except OSError:
        return False


@contextmanager
def from_the_hub() -> Iterator[bool]:
    """Yield whether the hub can be reached; inside, files come from it, or from the local cache if it cannot be."""
    from huggingface_hub import constants

    there, before = reachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not there
    try:
        yield there
    finally:
        constants.HF_HUB_OFFLINE = before


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
    """Return the image processor or the tokenizer saved with the network; None if there is none."""
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
        raise BadModel(f"hf:{name}: its preparation ({', '.join(files[:2])}) cannot be read: {told}") from error


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
        return dict(tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt"))

    named = f"its own tokenizer ({type(tokenizer).__name__}): padded to the longest text, cut at {longest} tokens"
    if causal := type(network).__name__.endswith(("LMHeadModel", "ForCausalLM")):
        remarks.append("each token's target is the next one")
    return TextPreparation(encode, "; ".join([named, *remarks]), labels, causal)


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.4g}" for value in values) if isinstance(values, list | tuple) else f"{values:.4g}"


_FORMS = (
    "file.py:NAME or package.module:NAME (a function that returns the network), the folder of a study's network, "
    "timm:NAME, hf:NAME, hf:FOLDER"
)
SEED = 0
RANDOM = f"random (seed {SEED})"

_TRUST = "trust_remote_code"
_NO_CODE = "flatlens never runs code of a folder or of the hub: build the network in a function, file.py:NAME"

MENDS = {
    "trained weights": ": give --weights FILE for a local file, or --weights random to measure the untrained network",
    "settings": ": give hf:FOLDER for a local copy, or --weights random for an untrained network of a "
    "known type, such as hf:gpt2, hf:bert or hf:vit",
}
"""Advice if the hub cannot be reached, by what was looked for."""

WhichWeights: TypeAlias = Literal["trained", "random", "none"]
"""The weights: published, random, or any (others will be loaded)."""


@dataclass(frozen=True, eq=False)
class Named:
    """A network that MODEL names."""

    network: nn.Module
    weights: str  #: their origin, in words
    preparation: NetworkPreparation | None = None  #: preparation of images or texts by its makers
    remark: str = ""  #: remark that the user has to know


def load_model(spec: str, weights: WhichWeights = "trained") -> Named:
    """Return the network that `spec` names.

    `file.py:NAME` is called without arguments; a ready-made `nn.Module` of that name will do too. `timm:NAME` takes
    timm's own options, as in `timm:resnet18(num_classes=10)`. Where a network has no trained weights, it gets random
    ones, and `weights` and `remark` say so; if they exist and cannot be loaded, that is an error.

    Raises:
        BadModel: `spec` has no known form, it names no network, or the weights cannot be loaded.
        UnknownName: timm has no network of that name.
        BadInput: the user's file is missing or raises.
    """
    kind, _, name = spec.partition(":")
    if user_code.is_userfile(spec):
        model = user_code.load(spec, "MODEL")
        if not isinstance(model, nn.Module):
            if not callable(model):
                raise BadModel(f"{spec} is a {type(model).__name__}; it must be a function that returns the network")
            if needed := user_code.needed_arguments(model):
                given = f"needs the arguments {', '.join(needed)}, but is called without arguments"
                raise BadModel(f"{spec} {given}: give defaults")
            model = user_code.guarded(model, f"MODEL: {spec}")
        if not isinstance(model, nn.Module):
            raise BadModel(f"{spec} returned a {type(model).__name__}; it must return a torch.nn.Module")
        return Named(model, f"from {user_code.short(spec)}")
    if kind == "timm" and name:
        return _from_timm(name, weights)
    if kind == "hf" and name:
        return _from_transformers(name, weights)
    hint = ""
    if Path(f"{kind}.py").is_file():
        hint = f"; there is a file of that name: did you mean {kind}.py:{name or 'NAME'}?"
    elif name and "." in kind:
        hint = f"; there is no module {kind} in this folder or among the installed packages"
    if Path(spec).is_file():
        hint = "; a file of weights goes to --weights, beside a function that returns the network"
    raise BadModel(f"{spec!r} is none of: {_FORMS}{hint}")


def _from_timm(written: str, weights: WhichWeights) -> Named:
    spec = f"timm:{written}"
    timm = _extra("timm", "timm", spec)
    name, options = _with_options(written, spec)
    architecture = name.partition(".")[0]
    elsewhere = "/" in name or ":" in name  # a repository, or a folder, as timm spells them
    if not (elsewhere or timm.is_model(architecture)):
        # of more than a thousand names the nearest, or those with the same beginning if none is near
        known = timm.list_models()
        near = difflib.get_close_matches(architecture, known, n=5, cutoff=0.5)
        near = near or [one for one in known if one[:3] == architecture[:3]][:5] or known[:5]
        raise UnknownName.among("network", architecture, near, where="of timm")
    exists = elsewhere or timm.is_model_pretrained(name)
    pretrained = weights == "trained" and exists
    network = _built(lambda: timm.create_model(name, pretrained=pretrained, **options), spec, hub=pretrained)
    remark = f"timm has no trained weights for {name}: they are {RANDOM}" if weights == "trained" and not exists else ""
    return Named(network, "timm's, from the hub" if pretrained else RANDOM, of_timm(timm, network), remark)


def _from_transformers(written: str, weights: WhichWeights) -> Named:
    spec = f"hf:{written}"
    transformers = _extra("transformers", "hf", spec)
    name, options = (written, {}) if Path(written).is_dir() else _with_options(written, spec)
    local = Path(name).is_dir()
    if not local and (name[:1] in "./~" or name.count("/") > 1):  # no repository is called like that
        raise BadModel(f"{spec}: there is no folder {name}")
    with _quiet():
        config, remark = _configured(transformers, name, options, weights, spec)
        # the class of transformers' own networks that the configuration names
        wanted = getattr(config, "architectures", None)
        wanted = wanted[0] if isinstance(wanted, list | tuple) and wanted else wanted or ""
        known = isinstance(wanted, str) and wanted.isidentifier()
        kind: Any = getattr(transformers, wanted, None) if known else None
        ours = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if not ours:
            raise BadModel(f"{spec}: transformers knows no architecture {wanted!r} (from its config.json)")
        # its network, with its weights if there are any
        if weights == "trained" and (not local or any((Path(name) / file).is_file() for file in IN_A_FOLDER)):
            # safetensors alone: a .bin file would be a pickle
            how = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True, **NO_CODE}
            make = partial(kind.from_pretrained, name, config=config, **how)
            network, info = _built(make, spec, hub=not local)
            if unlike := sorted(str(one[0]) for one in info["mismatched_keys"]):
                raise BadModel(f"{spec}: its weights have other shapes than its config.json says: {_some(unlike)}")
            missing = sorted(info["missing_keys"])
            remark = f"{name} has no weights for {_some(missing)}: these are {RANDOM}" if missing else ""
            source = f"of {Path(name).resolve().name if local else name}"
        else:
            network, source = _built(lambda: kind(config), spec), RANDOM
            if weights == "trained":
                remark = f"the folder {name} holds no weights: they are {RANDOM}"
        with from_the_hub():
            preparation = of_transformers(transformers, name, network)
        return Named(network, source, preparation, remark)


def _configured(
    transformers: ModuleType, name: str, options: dict[str, Any], weights: WhichWeights, spec: str
) -> tuple[Any, str]:
    """Return the named configuration (untrained: transformers' default for that kind of network), and a remark."""
    if _TRUST in options:
        raise BadModel(f"{spec}: {_TRUST}: {_NO_CODE}")
    try:
        built = partial(_built, spec=spec, hub=not Path(name).is_dir(), what="settings")
        plain, _ = built(partial(transformers.PretrainedConfig.get_config_dict, name, **options))
        # refuse the content of a config.json that only Python code beside it can read
        if not isinstance(plain, dict):
            raise BadModel(f"{spec}: its config.json is a {type(plain).__name__}, and must be a JSON object")
        kind = plain.get("model_type")
        if "auto_map" in plain and not (isinstance(kind, str) and kind in transformers.CONFIG_MAPPING):
            raise BadModel(f"{spec}: its config.json names Python code of its own (auto_map): {_NO_CODE}")
        return built(partial(transformers.AutoConfig.from_pretrained, name, **NO_CODE, **options)), ""
    except BadModel:
        kinds = transformers.CONFIG_MAPPING
        if weights != "random" or name not in kinds:
            raise
    config = _built(lambda: kinds[name](**options), spec)
    for task in ("IMAGE", "SEQUENCE"):
        heads = getattr(transformers, f"MODEL_FOR_{task}_CLASSIFICATION_MAPPING")
        if type(config) in heads:
            head = heads[type(config)]
            config.architectures = [(head[0] if isinstance(head, tuple) else head).__name__]
            break
    return config, f"the hub cannot be reached: transformers' default configuration of a {name} is taken"


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers print nothing inside, as an error must be one line, and ask nothing on stdin."""
    # Classes of transformers read configurations themselves, such as that of a backbone, without NO_CODE
    from transformers import dynamic_module_utils, utils

    logging: Any = utils.logging
    shown, verbosity, patience = (
        logging.is_progress_bar_enabled(), logging.get_verbosity(), dynamic_module_utils.TIME_OUT_REMOTE_CODE,
    )  # fmt: skip
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = patience
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _built(make: Callable[[], Any], spec: str, *, hub: bool = False, what: str = "trained weights") -> Any:
    """Return the result of `make`, with random numbers from SEED; an unreachable hub becomes one line."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        if not hub:
            return user_code.guarded(make, f"MODEL: {spec}")
        with from_the_hub() as there:
            try:
                return user_code.guarded(make, f"MODEL: {spec} (from the hub; --weights FILE reads a local file)")
            except BadInput as error:
                if there:
                    raise
                told = f"its {what} are not on this machine, and the hub cannot be reached{MENDS[what]}"
                raise BadModel(f"{spec}: {told}") from error


def _with_options(written: str, spec: str) -> tuple[str, dict[str, Any]]:
    """Return a name and its options in brackets: plain values by keyword.

    >>> _with_options("resnet18(num_classes=10)", "timm:resnet18(num_classes=10)")
    ('resnet18', {'num_classes': 10})
    """
    name, bracket, rest = written.partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        return name, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        mend = "write options as NAME=VALUE with plain values, such as timm:resnet18(num_classes=10)"
        raise BadModel(f"{spec}: {mend}") from error


def _extra(package: str, extra: str, spec: str) -> ModuleType:
    try:
        with needs(extra, f"MODEL: {spec}"):
            return import_module(package)
    except MissingExtra as error:  # the package itself, or one that it imports
        lacking = (getattr(error.__cause__, "name", None) or package).partition(".")[0]
        if lacking == package or find_spec(package) is None:
            raise
        fits = f" that fits torch {torch.__version__}" if lacking == "torchvision" else ""
        mend = f"install the {lacking}{fits}"
        raise BadModel(f"{spec}: {package} is installed, but {lacking} is missing, which it imports: {mend}") from error
    except (RuntimeError, OSError) as error:  # a torchvision built for another torch: its operators are not there
        other = "torchvision" in one_line(error)
        mend = f": install the torchvision that fits torch {torch.__version__}" if other else ""
        raise BadModel(f"{spec}: {package} cannot be imported ({one_line(error)}){mend}") from error


@dataclass(frozen=True)
class Published:
    """The network of `timm:NAME` or `hf:NAME`, after a preparation that makes any image in [0, 1] fit it.

    Images are resized (bilinear) to the size that the network was trained on and brought to its mean and standard
    deviation, so that many networks are measured on the same images; `sigmoid` puts the outputs between 0 and 1.

    >>> Published("timm:resnet18", weights="random").weights
    'random'
    """

    name: str  #: "timm:vit_tiny_patch16_224"
    weights: Literal["trained", "random"] = "trained"
    sigmoid: bool = False
    seed: int = 0  #: seed of random weights

    def __post_init__(self) -> None:
        check(self, weights=("trained", "random"))
        if not self.name.startswith(("timm:", "hf:")):
            forms = "expected timm:NAME, hf:NAME or hf:FOLDER"
            raise BadModel(forms, argument="name", value=self.name, call="Published")

    def build(self) -> nn.Module:
        """Return the network on the CPU; its weights come from the hub or from the local cache.

        Raises:
            BadModel: there is no such network, or its weights are not available.
        """
        network = load_model(self.name, self.weights).network.float()
        known = getattr(network, "pretrained_cfg", None) or {}
        return AsTrained(network, known.get("input_size"), known.get("mean"), known.get("std"), self.sigmoid)


class AsTrained(nn.Module):
    """A network after a resizing and a normalisation."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, size: tuple[int, ...] | None, mean: Sequence[float] | None,
        std: Sequence[float] | None, sigmoid: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.network = network
        self.size = None if size is None else tuple(size[1:])
        self.register_buffer("mean", torch.tensor(mean or (0.0,))[:, None, None])
        self.register_buffer("std", torch.tensor(std or (1.0,))[:, None, None])
        self.output = nn.Sigmoid() if sigmoid else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, rows, columns) between 0 and 1 to outputs (n, classes)."""
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = nn.functional.interpolate(images, self.size, mode="bilinear", align_corners=False)
        found = self.network((images - self.mean) / self.std)
        outputs: Tensor = self.output(getattr(found, "logits", found))
        return outputs


_SEED = "seed"


@dataclass(frozen=True)
class UserNetwork:
    """The network that `file.py:NAME` returns: a function, or a class of networks.

    Its arguments are settings of a study, by their names. `seed` seeds the random numbers of torch, NumPy and Python
    while it runs, and is passed to it if it has an argument of that name.
    """

    source: str  #: file.py:NAME, with the file's whole path
    code: str  #: hash of the file, and of those beside it that it imports
    options: Mapping[str, Any] = Options()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", Options(self.options))

    @classmethod
    def of(cls, spec: str, given: Mapping[str, Any] | None = None) -> UserNetwork:
        """Return the network of `file.py:NAME`, with the defaults of its arguments, or the values `given`.

        Raises:
            BadModel: this is not a function that builds networks, or it has no argument of a name that is given.
        """
        function = _function(spec)
        known = {name: default for name, default in user_code.arguments(function).items() if name != _SEED}
        unknown = [name for name in given or {} if name not in (*known, _SEED)]
        if unknown:
            raise BadModel(f"{spec} has no argument {unknown[0]!r}: it has {', '.join(known) or 'none'}", call="")
        file = user_code.file_of(spec).resolve()
        options = Options({**known, **{name: value for name, value in (given or {}).items() if name != _SEED}})
        return cls(user_code.with_folder(spec), user_code.code_of(file), options, int((given or {}).get(_SEED, 0)))

    def __str__(self) -> str:
        """Return the network as a user writes it: net.py:build(width=8)."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{user_code.short(self.source)}{f'({given})' if given else ''}"

    def with_sizes(self, sizes: Mapping[str, int]) -> UserNetwork:
        """Return the network with sizes of the data, such as `inputs`, for arguments without a default or a value."""
        needed = user_code.needed_arguments(_function(self.source))
        filled = {name: sizes[name] for name in needed if self.options.get(name, 0) is None and name in sizes}
        return replace(self, options=Options({**self.options, **filled}))

    def require_complete(self) -> None:
        """Raise BadModel if an argument without a default has no value."""
        needed = [n for n in user_code.needed_arguments(_function(self.source)) if self.options.get(n, 0) is None]
        if needed:
            sizes = "inputs, outputs, channels and image are given by the data"
            mend = f"give defaults, or write --set {needed[0]}=VALUE; {sizes}"
            lacking = f"{user_code.short(self.source)} needs the arguments {', '.join(needed)}"
            raise BadModel(lacking, remedy=mend, call="")

    def build(self) -> nn.Module:
        """Return a new network.

        Raises:
            BadModel: the file is gone or was changed since, or its function returned something else.
            BadInput: the function raised.
        """
        told, function = user_code.short(self.source), _function(self.source)
        if user_code.code_of(user_code.file_of(self.source)) != self.code:
            mend = "put it back, or begin another study with another --out"
            raise BadModel(f"the code of {told} has changed since the study began", remedy=mend, call="")
        takes_seed = _SEED in user_code.arguments(function)
        arguments = {**self.options, **({_SEED: self.seed} if takes_seed else {})}
        with seeded(self.seed):
            network = user_code.guarded(lambda: function(**arguments), f"model: {told}")
        if not isinstance(network, nn.Module):
            raise BadModel(f"{told} returned a {type(network).__name__}; it must return a torch.nn.Module", call="")
        return network


def _function(spec: str) -> Any:
    if not Path(user_code.file_of(spec)).is_file():
        raise BadInput(f"model: there is no file {str(user_code.file_of(spec))!r}")
    found = load_seeded(spec, "model")
    if not user_code.is_current(user_code.file_of(spec)):
        changed = f"the code of {user_code.short(spec)} has changed since this process read it"
        raise BadModel(changed, remedy="start it again", call="")
    if isinstance(found, nn.Module) or not callable(found):
        needed = "a study needs a function that builds a new network each time"
        raise BadModel(f"{spec} is a {type(found).__name__}; {needed}", call="")
    return found
