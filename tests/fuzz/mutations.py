"""What is made odd about a setup: types, shapes, values, places, modes, hooks, options, code that fails."""

from __future__ import annotations

from collections.abc import Callable

import misbehaving as bad
import numpy as np
import pandas as pd
import torch
from setups import INPUTS, N, Setup
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
Mutation = Callable[[Setup, int], None]


def floats(s: Setup) -> Tensor:
    """The x to change; a fresh one where the network reads ids."""
    return s.x if isinstance(s.x, Tensor) else torch.randn(N, INPUTS, dtype=torch.float64)


def nothing(s: Setup, pick: int) -> None:
    """As it is."""


def dtype_of_x(s: Setup, pick: int) -> None:
    s.truth = False
    s.set_data(floats(s).to(DTYPES[pick % len(DTYPES)]), s.y)


def dtype_of_y(s: Setup, pick: int) -> None:
    s.truth = False
    s.set_data(s.x, s.y.to(DTYPES[pick % len(DTYPES)]))


def dtype_of_net(s: Setup, pick: int) -> None:
    s.truth = False
    dtype = DTYPES[pick % len(DTYPES)]
    if pick // 11 % 2:
        s.net.to(dtype if dtype.is_floating_point or dtype.is_complex else torch.float32)
    else:
        next(s.net.parameters()).data = next(s.net.parameters()).data.to(dtype)


def shape_of_x(s: Setup, pick: int) -> None:
    s.truth, x = False, floats(s)
    kinds = (x[0], x[None], x[..., None], x[:, :-1], torch.cat([x, x], 1), x[:0], x[:1], x.T, x[:, :0], x[:-1], x[0, 0],
             x.repeat(3, 1), x.expand(2, *x.shape), x[:, None])  # fmt: skip
    s.set_data(kinds[pick % len(kinds)], s.y)


def shape_of_y(s: Setup, pick: int) -> None:
    s.truth, y = False, s.y
    kinds = (y[:-1], y[:0], y[:1], y[..., None], y[None], y[0], y.flatten()[0], torch.cat([y, y]), y.T, y.reshape(-1))
    s.set_data(s.x, kinds[pick % len(kinds)])


def few(s: Setup, pick: int) -> None:
    """One to three samples, or none."""
    s.truth = s.truth and pick % 4 > 0
    s.set_data(s.x[: pick % 4] if isinstance(s.x, Tensor) else tuple(x[: pick % 4] for x in s.x), s.y[: pick % 4])


def values_of_x(s: Setup, pick: int) -> None:
    s.truth, x = False, floats(s).clone()
    values = (float("nan"), float("inf"), -float("inf"), 1e30, 1e300, 1e-300, 0.0, 1e38)
    where = (slice(None), slice(2, 3), (2, 1))[pick // 8 % 3]
    if x.is_floating_point():
        x[where if x.ndim > 1 else slice(None)] = values[pick % 8]
    else:
        x[where] = (99, -1, 0, 6, 7, 2**40, -(2**40), 1)[pick % 8]
    s.set_data(x, s.y)


def values_of_y(s: Setup, pick: int) -> None:
    s.truth, y = False, s.y.clone()
    where = slice(None) if pick // 9 % 2 else slice(3, 4)
    if y.is_floating_point():
        y[where] = (float("nan"), float("inf"), 1e30, 1e300, 0.0, -1.0, 1e-300, 1e20, 1e5)[pick % 9]
    else:
        y[where] = (-100, -1, 2, 99, 2**40, 1, 0, -(2**40), -101)[pick % 9]
    s.set_data(s.x, y)


def values_of_net(s: Setup, pick: int) -> None:
    s.truth = False
    values = (float("nan"), float("inf"), 0.0, 1e20, 1e30, 1e38, 1e300, 1e-30, 1e-300, 1e10)
    tensors = [t for t in [*s.net.parameters(), *s.net.buffers()] if t.is_floating_point()]
    chosen = tensors if pick // 10 % 2 else [tensors[pick // 20 % len(tensors)]]
    with torch.no_grad():
        for t in chosen:
            t.fill_(values[pick % 10])


def sized_net(s: Setup, pick: int) -> None:
    s.truth = False
    with torch.no_grad():
        for p in s.net.parameters():
            p.mul_((1e-20, 1e-8, 1e3, 1e8, 1e15, 1e30, 0.0)[pick % 7])


def nowhere(s: Setup, pick: int) -> None:
    """On the meta device, sparse, nested, quantised, in inference mode."""
    s.truth, x = False, floats(s)

    def parameter(to: Callable[[Tensor], Tensor]) -> None:
        module = next(m for m in s.net.modules() if m._parameters)
        name, p = next(iter(module._parameters.items()))
        module._parameters[name] = nn.Parameter(to(p.data), requires_grad=pick % 2 == 0)

    def inferred() -> Tensor:
        with torch.inference_mode():
            return x * 2

    kinds: tuple[Callable[[], object], ...] = (
        lambda: s.net.to("meta"), lambda: parameter(lambda t: t.to("meta")), lambda: s.set_data(x.to("meta"), s.y),
        lambda: s.set_data(x, s.y.to("meta")), lambda: s.net.register_buffer("buf", torch.ones(2, device="meta")),
        lambda: s.set_data(x.to_sparse(), s.y), lambda: s.set_data(x, s.y.to_sparse()),
        lambda: parameter(lambda t: t.to_sparse()),
        lambda: s.net.register_buffer("buf", torch.eye(3).to_sparse()),
        lambda: s.set_data(x.to_sparse_csr() if x.ndim == 2 else x, s.y),
        lambda: s.set_data(torch.nested.nested_tensor(list(x.double())), s.y), lambda: s.set_data(inferred(), s.y),
        lambda: s.set_data(torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), s.y),
        lambda: parameter(lambda t: t[..., :0]),
        lambda: s.net.register_parameter("more", nn.parameter.UninitializedParameter()),
        lambda: parameter(lambda t: t[..., None]),
        lambda: s.net.register_buffer("buf", nn.parameter.UninitializedBuffer()),
        lambda: parameter(lambda t: t.to(torch.complex64)),
        lambda: s.net.register_parameter("more", None), lambda: s.net.register_parameter("more",
        nn.Parameter(torch.ones(0))),
        lambda: s.net.register_buffer("buf", torch.tensor(float("nan"))), lambda: s.net.register_buffer("buf",
        torch.ones(3).bool()),
        lambda: s.net.register_parameter("n", nn.Parameter(torch.ones(2).long(), requires_grad=False)),
    )  # fmt: skip
    kinds[pick % len(kinds)]()


def frozen(s: Setup, pick: int) -> None:
    parameters = list(s.net.parameters())
    for p in (parameters, parameters[:1], parameters[-1:], parameters[1:])[pick % 4]:
        p.requires_grad_(False)
    s.truth = s.truth and pick % 4 > 0 and not hasattr(s.net, "embed") and any(p.requires_grad for p in parameters)
    if pick // 4 % 3 == 0:
        s.options["parameters"] = "all"
        s.truth = False


def moded(s: Setup, pick: int) -> None:
    """Train and eval mode mixed, gradients there already."""
    for number, module in enumerate(s.net.modules()):
        module.training = bool(pick >> number % 8 & 1)
    for p in s.net.parameters():
        p.grad = torch.full_like(p, 2.0) if pick % 3 else None


def laid_out(s: Setup, pick: int) -> None:
    """The same numbers in another layout, or asking for gradients."""
    x = floats(s)
    if x is not s.x or not x.is_floating_point():
        return
    kinds = (x.T.contiguous().T, x[::2].repeat_interleave(2, 0)[: len(x)], x.clone().requires_grad_(),
        x.detach().numpy(),
             torch.stack([x, x], 2)[..., 0])  # fmt: skip
    kind = kinds[pick % len(kinds)]
    s.truth = s.truth and pick % len(kinds) != 1
    s.data = (kind, s.y.numpy() if pick % 2 else s.y)


def hooked(s: Setup, pick: int) -> None:
    s.truth = False
    bad.hook(s.net, pick)


def loaded(s: Setup, pick: int) -> None:
    """The same numbers through a loader."""
    if isinstance(s.x, Tensor):
        s.data = DataLoader(TensorDataset(s.x, s.y), batch_size=1 + pick % 7, shuffle=pick // 7 % 2 == 1)


def cut(s: Setup, pick: int) -> None:
    """The same numbers in small pieces, with held-out data."""
    s.options |= {"memory": 1 + pick % 3 * 2000}
    if pick // 3 % 2:
        s.options["test"] = s.data


def broken_data(s: Setup, pick: int) -> None:
    s.truth = False
    s.data = bad.loader(floats(s), s.y, pick)
    if pick % 5 == 0:
        s.options["test"], s.data = s.data, (s.x, s.y)


def odd_data(s: Setup, pick: int) -> None:
    s.truth, x, y = False, floats(s), s.y
    kinds: tuple[object, ...] = (
        None, 5, "digits", (), (x,), (x, y, y), [x, y], (x, None), (None, y), (x.tolist(), y.tolist()), ({}, y),
        {"x": x}, {},
        ({"input": x}, y), ({1: x}, y), (x, "a"), (x, ["a"] * N), (object(), y), iter([(x, y)]), [(x, y)], ((), ()),
        ((x,), (y,)),
        np.array([["a", 1]], dtype=object), (np.array([object()] * N), y), (pd.DataFrame(x.numpy()),
        pd.Series(range(N))), x,
        (pd.DataFrame({"a": ["x"] * N}), y), DataLoader([]), DataLoader([1]), DataLoader([(x[0], 0)] * 4,
        batch_size=None),
        DataLoader([{"x": x[0]}] * 4), DataLoader([None]), DataLoader([(x[0], "a")]), TensorDataset(x),
        TensorDataset(), (x, {}),
        TensorDataset(x, y, y), {"x": x, "y": y[:2]}, ({"a": x, "b": x[:2]}, y), (x, (y, y)), (x, [y, y[:2]]), (x,
        {"a": None}),
        (x.numpy().astype("datetime64[s]"), y), (np.ma.masked_array(x.numpy()), y), (x.numpy()[::-1], y), (b"abc", y),
        {1, 2},
        fl.measure, nn.Linear, (nn.Linear(1, 1), y), (x, 3), (3, 3), (x, True), [[x, y], [x, y]], ((x, (x, {"k": x})),
        y),
    )  # fmt: skip
    s.data = kinds[pick % len(kinds)]


def odd_options(s: Setup, pick: int) -> None:
    s.truth = False
    x, y = s.x, s.y
    kinds: tuple[dict[str, object], ...] = (
        {"ranks": None}, {"ranks": 3}, {"parameters": [5]}, {"parameters": [None]}, {"parameters": 5},
        {"parameters": [["a"]]},
        {"parameters": []}, {"parameters": "nope"}, {"parameters": ["nope"]}, {"parameters": None}, {"forward": 3},
        {"memory": 0},
        {"forward": lambda m, b: None}, {"forward": lambda m, b: (1,)}, {"forward": lambda m, b: m(b[0])},
        {"memory": -1},
        {"forward": lambda m, b: (m(b[0]), b[1], 1, 2)}, {"forward": lambda m: m}, {"forward": bad.error},
        {"memory": None},
        {"dtype": "float32"}, {"dtype": torch.int8}, {"dtype": torch.float16}, {"dtype": torch.float32},
        {"dtype": torch.float64},
        {"memory": "x"}, {"memory": True}, {"memory": []}, {"memory": float("nan")}, {"memory": 10**400},
        {"memory": "9" * 400},
        {"memory": "1.5.5GiB"}, {"memory": "\u0663GiB"}, {"arithmetic": None}, {"arithmetic": []},
        {"arithmetic": "tf32"},
        {"arithmetic": "bfloat16"}, {"batchnorm": None}, {"batchnorm": []}, {"batchnorm": "train"}, {"ghost_batch": 3},
        {"batchnorm": "train", "ghost_batch": 2}, {"batchnorm": "train", "ghost_batch": 4}, {"batchnorm": "train",
        "ghost_batch": 1},
        {"batchnorm": "train", "ghost_batch": 10**30}, {"batchnorm": "train", "ghost_batch": True}, {"test": 3},
        {"test": ()},
        {"batchnorm": "train", "ghost_batch": 5}, {"test": (x, y[:2])}, {"test": (x,)}, {"test": (x, None)},
        {"parameters": "all"},
        {"test": (x, y + 9)}, {"test": (y, x)}, {"parameters": ["weight", "weight"]}, {"forward": lambda m,
        b: (m(b[0]), None)},
    )  # fmt: skip
    s.options |= kinds[pick % len(kinds)]


def odd_model(s: Setup, pick: int) -> None:
    s.truth, net = False, s.net
    kinds: tuple[Callable[[], object], ...] = (
        lambda: None, lambda: "net", lambda: nn.Linear, lambda: net.state_dict(), lambda: net.forward,
        lambda: nn.Sequential(),
        lambda: nn.Identity(), lambda: nn.LazyLinear(2), lambda: nn.ReLU(), lambda: nn.ModuleList([net]),
        lambda: nn.Linear(4, 0),
        lambda: nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)), lambda: nn.Module(), lambda: nn.DataParallel(net),
        lambda: [net],
        lambda: torch.jit.trace(nn.Linear(3, 2), torch.ones(2, 3)), lambda: torch.jit.script(nn.Linear(3, 2)),
        lambda: nn.Flatten(),
        lambda: nn.LSTM(3, 2), lambda: nn.Transformer(4, 1, 1, 1, 4), lambda: nn.Bilinear(3, 3, 2),
        lambda: nn.Linear(3, 2, False),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(0)), lambda: nn.Sequential(net, nn.BatchNorm1d(2,
        affine=False)),
        lambda: nn.Sequential(net, nn.BatchNorm1d(2, track_running_stats=False)), lambda: nn.Embedding(3, 2,
        max_norm=0.1),
        lambda: nn.Sequential(nn.Linear(3, 200)), lambda: nn.Sequential(net, nn.Hardtanh(inplace=True)),
        lambda: nn.Conv2d(1, 1, 1),
        lambda: nn.Sequential(net, nn.RReLU()), lambda: nn.Sequential(net, nn.LogSoftmax(1)),
        lambda: nn.ParameterList([torch.ones(2)]),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.MaxPool1d(2)), lambda: torch.func.functional_call,
        lambda: nn.Dropout(0.5),
        lambda: nn.Sequential(net, nn.Hardshrink()), lambda: nn.Sequential(net, nn.Threshold(0.1, 20)),
        lambda: nn.AlphaDropout(0.9),
    )  # fmt: skip
    s.model = kinds[pick % len(kinds)]()


def wrapped(kind: type[bad.Wrapped]) -> Mutation:
    def wrap(s: Setup, pick: int) -> None:
        s.truth, s.model = False, kind(s.net, pick)

    return wrap


def odd_loss(s: Setup, pick: int) -> None:
    s.truth, s.loss = False, bad.loss(pick)


MUTATIONS: dict[str, tuple[int, Mutation]] = {  #: how often, and the change
    "nothing": (5, nothing), "dtype of x": (2, dtype_of_x), "dtype of y": (2, dtype_of_y), "dtype of net": (2,
    dtype_of_net),
    "shape of x": (3, shape_of_x), "shape of y": (2, shape_of_y), "few": (2, few), "values of x": (3, values_of_x),
    "values of y": (3, values_of_y), "values of net": (3, values_of_net), "sized net": (2, sized_net), "nowhere": (4,
    nowhere),
    "frozen": (3, frozen), "moded": (3, moded), "laid out": (2, laid_out), "hooked": (4, hooked), "loaded": (2, loaded),
    "cut": (3, cut), "broken data": (6, broken_data), "odd data": (4, odd_data), "odd options": (5, odd_options),
    "odd model": (4, odd_model), "fails late": (4, wrapped(bad.FailsLate)), "fails on a sample": (2,
    wrapped(bad.FailsOnSample)),
    "gives": (5, wrapped(bad.Gives)), "writes": (5, wrapped(bad.Writes)), "odd loss": (6, odd_loss),
}  # fmt: skip
HARMLESS = ("nothing", "few", "frozen", "moded", "laid out", "loaded", "cut")  #: whose numbers are known
