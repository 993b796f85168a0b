"""Networks for small images: LeNet-5, VGG, ResNet-18 and vision transformers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.models.building_blocks import ACTIVATIONS, LAWS, Activation, Drawn, Init, pooled, scaled
from flatlens.settings_json import check, require_setting

Pooling: TypeAlias = Literal["max", "average"]
_POOLINGS: dict[Pooling, type[nn.Module]] = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}


@dataclass(frozen=True)
class LeNet5(Drawn):
    """Convolutions of 6 and 16 kernels of 5 x 5, each pooled by 2, then linear layers 120, 84, `classes`.

    The papers name the network and no more. What is common today is taken: ReLU, max pooling, every kernel of conv2 on
    all six maps, a linear output. In LeCun's own, poolings are averages with trained coefficients (here
    `pooling="average"` has none), the activation is a scaled tanh and the outputs are distances to stored patterns.
    Images of 28 x 28 are padded by 2, as LeCun's digits are, so that either size has the same layers.

    >>> net = LeNet5(channels=3, image=32).build()
    >>> sum(p.numel() for p in net.parameters())
    62006
    >>> [name for name, _ in net.named_children() if not name.startswith("act")]
    ['conv1', 'pool1', 'conv2', 'pool2', 'flatten', 'fc1', 'fc2', 'fc3']
    """

    channels: int = 3
    image: Literal[28, 32] = 32
    classes: int = 10
    activation: Activation = "relu"
    pooling: Pooling = "max"
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        sizes = ("channels", "classes")
        check(self, sizes, image=(28, 32), activation=ACTIVATIONS, pooling=_POOLINGS, init=LAWS)

    def _design(self) -> nn.Sequential:
        activation, pool = ACTIVATIONS[self.activation], _POOLINGS[self.pooling]
        first = nn.Conv2d(self.channels, 6, 5, padding=(32 - self.image) // 2)
        parts = OrderedDict[str, nn.Module](
            conv1=first, act1=activation(), pool1=pool(2),
            conv2=nn.Conv2d(6, 16, 5), act2=activation(), pool2=pool(2), flatten=nn.Flatten(),
            fc1=nn.Linear(16 * 5 * 5, 120), act3=activation(),
            fc2=nn.Linear(120, 84), act4=activation(), fc3=nn.Linear(84, self.classes),
        )  # fmt: skip
        return nn.Sequential(parts)


_Plan: TypeAlias = Sequence[int | Literal["M"]]
VGG11_PLAN: _Plan = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
SMALL_PLAN: _Plan = (16, "M", 16, "M", 32, "M", 64, 64, "M")


@dataclass(frozen=True)
class VGG11(Drawn):
    """Configuration A of Simonyan and Zisserman 2015: eight 3 x 3 convolutions in five stages, then linear layers.

    The form for CIFAR that sharpening B.2 cites: 512-512-`classes` behind the last pooling, where the original has
    4096-4096; its two dropouts are removed, its BatchNorm kept (B.3 trains without it as well). Convolutions have a
    bias beside BatchNorm, as there. Left open by the text: the law of the initial weights, the cited code modified
    "superficially". The default is PyTorch's; `init="vgg"` is the cited code's. Many write a single linear layer,
    which is `hidden=()`.

    >>> sum(p.numel() for p in VGG11().build().parameters())
    9756426
    >>> [name for name, _ in VGG11(width=0.125).build().named_children()][:5]
    ['conv1', 'bn1', 'relu1', 'pool1', 'conv2']
    """

    classes: int = 10
    channels: int = 3
    image: int = 32
    batchnorm: bool = True
    width: float = 1.0  #: multiplies the sizes of all hidden layers
    hidden: tuple[int, ...] = (512, 512)  #: linear layers before the last
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))  # a list, when it comes from JSON
        _check(self, VGG11_PLAN)
        check(self, ("hidden",))
        scaled("VGG11", [*_channels(VGG11_PLAN), *self.hidden], self.width)

    def _design(self) -> nn.Sequential:
        sizes = iter(scaled("VGG11", _channels(VGG11_PLAN), self.width))
        plan: _Plan = [next(sizes) if isinstance(step, int) else step for step in VGG11_PLAN]
        linear = (*scaled("VGG11", self.hidden, self.width), self.classes)
        return _vgg(plan, self.channels, self.image, linear, self.batchnorm)


@dataclass(frozen=True)
class SmallVGG(Drawn):
    """Five 3 x 3 convolutions 16-16-32-64-64, then linear layers 128-`classes`; no BatchNorm.

    The compression paper calls its network VGG-11; the one its authors train has these layers and 97,018 parameters
    at 3 x 32 x 32 and 10 classes. Here images are padded by 1, with a pooling after each stage as in VGG-11, the last
    of two convolutions; their code pads by 2 and pools after each convolution, which gives the same sizes of weights.

    >>> sum(p.numel() for p in SmallVGG().build().parameters())
    97018
    """

    classes: int = 10
    channels: int = 3
    image: int = 32
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        _check(self, SMALL_PLAN)

    def _design(self) -> nn.Sequential:
        return _vgg(SMALL_PLAN, self.channels, self.image, (128, self.classes), batchnorm=False)


def _vgg(plan: _Plan, channels: int, image: int, linear: Sequence[int], batchnorm: bool) -> nn.Sequential:
    """Return conv1, bn1, relu1, pool1, ..., flatten, fc1, relu9, ..., fc3; poolings do not count in the numbers."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    conv = pool = 0
    for step in plan:
        if not isinstance(step, int):
            pool += 1
            parts[f"pool{pool}"] = nn.MaxPool2d(2)
            continue
        conv += 1
        parts[f"conv{conv}"] = nn.Conv2d(channels, step, 3, padding=1)
        if batchnorm:
            parts[f"bn{conv}"] = nn.BatchNorm2d(step)
        parts[f"relu{conv}"] = nn.ReLU()
        channels = step
    parts["flatten"] = nn.Flatten()
    features = channels * pooled("VGG", image, pool) ** 2
    for number, (fan_in, fan_out) in enumerate(pairwise((features, *linear)), start=1):
        parts[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < len(linear):
            parts[f"relu{conv + number}"] = nn.ReLU()
    return nn.Sequential(parts)


def _channels(plan: _Plan) -> list[int]:
    return [step for step in plan if isinstance(step, int)]


def _check(settings: VGG11 | SmallVGG, plan: _Plan) -> None:
    check(settings, ("classes", "channels", "image"), init=LAWS)
    pooled(type(settings).__name__, settings.image, list(plan).count("M"))


STAGES = (64, 128, 256, 512)


@dataclass(frozen=True)
class ResNet18(Drawn):
    """A 3 x 3 convolution, then four stages of two residual blocks, the mean over positions, a linear layer.

    The form for CIFAR that sharpening B.2 cites: stride 1 and no pooling at the entrance, so that 32 x 32 images
    keep their size through the first stage; an image may have any size. The initial weights are PyTorch's, as there.
    The text leaves open what B.3's networks without BatchNorm have in its place: here nothing, and the convolutions
    get the bias that BatchNorm's shift made idle.
    Names are torchvision's, for the weights of others: conv1, layer2.0.bn1, layer2.0.downsample.0, fc.

    >>> sum(p.numel() for p in ResNet18().build().parameters())
    11173962
    """

    classes: int = 10
    channels: int = 3
    batchnorm: bool = True
    width: float = 1.0  #: multiplies the channels
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        check(self, ("classes", "channels"), init=LAWS)
        scaled("ResNet18", STAGES, self.width)

    def _design(self) -> nn.Sequential:
        stages = scaled("ResNet18", STAGES, self.width)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        into = stages[0]
        parts["conv1"] = _conv(self.channels, into, 3, 1, self.batchnorm)
        if self.batchnorm:
            parts["bn1"] = nn.BatchNorm2d(into)
        parts["relu1"] = nn.ReLU()
        for number, out in enumerate(stages, start=1):
            first = Block(into, out, 1 if number == 1 else 2, batchnorm=self.batchnorm)
            parts[f"layer{number}"] = nn.Sequential(first, Block(out, out, 1, batchnorm=self.batchnorm))
            into = out
        parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(into, self.classes)}
        return nn.Sequential(parts)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a skip, which is projected by a 1 x 1 convolution where the shape changes."""

    def __init__(self, into: int, out: int, stride: int, *, batchnorm: bool) -> None:
        super().__init__()
        self.conv1 = _conv(into, out, 3, stride, batchnorm)
        self.bn1 = _norm(out, batchnorm)
        self.relu1 = nn.ReLU()
        self.conv2 = _conv(out, out, 3, 1, batchnorm)
        self.bn2 = _norm(out, batchnorm)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(_conv(into, out, 1, stride, batchnorm), _norm(out, batchnorm))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, into, height, width) to (n, out, height/stride, width/stride)."""
        inner = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(inner)) + self.downsample(x))
        return out


def _conv(into: int, out: int, kernel: int, stride: int, batchnorm: bool) -> nn.Conv2d:
    return nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=not batchnorm)


def _norm(channels: int, batchnorm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if batchnorm else nn.Identity()


STD = 0.02  #: standard deviation of the initial weights and tokens


@dataclass(frozen=True)
class ViT:
    """Patches, a class token, positions, `depth` blocks with the norms first, and a linear output.

    Weights, positions and the class token are drawn from N(0, 0.02^2), biases are 0, as in most public code.
    `sigmoid` puts its outputs between 0 and 1.

    >>> net = ViT(image=32, patch=8, width=32, depth=2, heads=2).build()
    >>> sum(p.numel() for p in net.parameters())
    32554
    >>> net(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    classes: int = 10
    channels: int = 3
    image: int = 32
    patch: int = 4
    width: int = 64
    depth: int = 4
    heads: int = 4
    mlp: float = 4.0  #: the hidden width of a block, in units of `width`
    pooling: Literal["class", "mean"] = "class"
    activation: Literal["gelu", "relu", "tanh"] = "gelu"
    sigmoid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("classes", "channels", "image", "patch", "width", "depth", "heads")
        check(self, sizes, pooling=("class", "mean"), activation=("gelu", "relu", "tanh"))
        for name, whole, part in (("image", self.image, self.patch), ("width", self.width, self.heads)):
            of = "patches" if name == "image" else "heads"
            require_setting(self, name, whole % part == 0, f"it must be a multiple of {part}, for whole {of}")
        require_setting(self, "mlp", round(self.width * self.mlp) >= 1, "no hidden unit would be left")

    def build(self) -> nn.Module:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        with torch.device("meta"):  # draws nothing
            network = VisionTransformer(self)
        network.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, STD, generator=generator)
                else:
                    parameter.fill_(float("norm" in name and name.endswith("weight")))
        return network


class VisionTransformer(nn.Module):
    """The network that `ViT` describes."""

    def __init__(self, settings: ViT) -> None:
        super().__init__()
        s = settings
        tokens = (s.image // s.patch) ** 2 + (s.pooling == "class")
        self.embedding = nn.Conv2d(s.channels, s.width, s.patch, stride=s.patch)
        self.token = nn.Parameter(torch.empty(1, 1, s.width)) if s.pooling == "class" else None
        self.positions = nn.Parameter(torch.empty(1, tokens, s.width))
        self.blocks = nn.ModuleList(TransformerBlock(s) for _ in range(s.depth))
        self.norm = nn.LayerNorm(s.width)
        self.head = nn.Linear(s.width, s.classes)
        self.output = nn.Sigmoid() if s.sigmoid else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, image, image) to outputs (n, classes)."""
        x = self.embedding(images).flatten(2).transpose(1, 2)  # (n, patches, width)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        outputs: Tensor = self.output(self.head(x.mean(1) if self.token is None else x[:, 0]))
        return outputs


class TransformerBlock(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self, settings: ViT) -> None:
        super().__init__()
        width, hidden = settings.width, round(settings.width * settings.mlp)
        self.heads = settings.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU() if settings.activation == "gelu" else ACTIVATIONS[settings.activation]()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (n, tokens, width) to tokens."""
        looked = x + self.attend(self.norm1(x))
        added: Tensor = self.fc2(self.act(self.fc1(self.norm2(looked))))
        return looked + added

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention of every token to all others, for each head."""
        n, tokens, width = x.shape
        qkv = self.qkv(x).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*qkv)  # (n, heads, tokens, width / heads)
        projected: Tensor = self.projection(seen.transpose(1, 2).reshape(n, tokens, width))
        return projected
