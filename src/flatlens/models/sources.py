"""MODEL on the command line: a network from `file.py:callable`, timm or Hugging Face."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from torch import nn

from flatlens import userfile
from flatlens.errors import BadModel

FORMS = (
    "file.py:NAME (a function that returns the network), the folder of a study's network, timm:NAME, hf:NAME, hf:FOLDER"
)


def load_model(spec: str, *, pretrained: bool = True) -> nn.Module:
    """The network that `spec` names.

    `file.py:NAME` is called without arguments; a ready-made `nn.Module` of that name will do too. `pretrained=False`
    asks timm and transformers for the architecture alone, when the weights come from a file of the user's.

    Raises:
        BadModel: `spec` has no known form, or what it names is no network.
        BadInput: the user's file is missing or raises.
    """
    kind, _, name = spec.partition(":")
    if userfile.is_userfile(spec):
        return _from_file(spec)
    if kind == "timm" and name:
        return _from_timm(name, pretrained)
    if kind == "hf" and name:
        return _from_transformers(name, pretrained)
    hint = f"; there is a file of that name: did you mean {spec}.py:NAME?" if Path(f"{spec}.py").is_file() else ""
    raise BadModel(f"MODEL: {spec!r} is none of: {FORMS}{hint}")


def _from_file(spec: str) -> nn.Module:
    named = userfile.load(spec, "MODEL")
    if isinstance(named, nn.Module):
        return named
    if not callable(named):
        raise BadModel(f"MODEL: {spec} is a {type(named).__name__}; it must be a function that returns the network")
    needed = userfile.needed_arguments(named)
    if needed:
        raise BadModel(
            f"MODEL: {spec} needs the arguments {', '.join(needed)}, and is called without any: give defaults"
        )
    model = userfile.guarded(lambda: named(), f"MODEL: {spec}")
    if not isinstance(model, nn.Module):
        raise BadModel(f"MODEL: {spec} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _from_timm(name: str, pretrained: bool) -> nn.Module:
    timm = _extra("timm", "timm", f"timm:{name}")
    hub = " (with weights from the hub; --weights FILE takes local ones)" if pretrained else ""
    model: nn.Module = userfile.guarded(
        lambda: timm.create_model(name, pretrained=pretrained), f"MODEL: timm:{name}{hub}"
    )
    return model


def _from_transformers(name: str, pretrained: bool) -> nn.Module:
    transformers = _extra("transformers", "hf", f"hf:{name}")
    where = "" if Path(name).is_dir() else " (from the hub; a local folder works too)"
    config = userfile.guarded(lambda: transformers.AutoConfig.from_pretrained(name), f"MODEL: hf:{name}{where}")
    architecture = next(iter(getattr(config, "architectures", None) or []), "")
    if not hasattr(transformers, architecture or "_"):
        raise BadModel(f"MODEL: hf:{name}: transformers knows no architecture {architecture!r} (from its config.json)")
    kind = getattr(transformers, architecture)
    model: nn.Module = userfile.guarded(
        # safetensors alone: a .bin file would be a pickle
        lambda: kind.from_pretrained(name, use_safetensors=True) if pretrained else kind(config),
        f"MODEL: hf:{name}{where}",
    )
    return model


def _extra(package: str, extra: str, spec: str) -> ModuleType:
    try:
        return __import__(package)
    except ImportError as error:
        raise BadModel(f"MODEL: {spec} needs {package}: pip install 'flatlens[{extra}]' ({error})") from error
