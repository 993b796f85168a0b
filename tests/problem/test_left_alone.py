"""What forward() writes where it must not, and global state of torch: put back, or refused with all as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import flatlens as fl
from flatlens.errors import BadInput, BadModel
from flatlens.problem import measuring

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 2
ROWS = torch.zeros(8, dtype=torch.long)


def writing(way: str) -> nn.Module:
    """Does something to itself in each forward()."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        WAYS[way](net, x.detach())
        return net.linear(x)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {"linear": nn.Linear(3, 2), "norm": nn.BatchNorm1d(3), "table": nn.Embedding(3, 2)}
        return module_of(forward, **parts, count=torch.zeros(3))


def _through_grad(net: nn.Module, x: Tensor) -> None:
    with torch.enable_grad():
        net.table(ROWS).sum().backward()


WAYS = {
    "nothing": lambda net, x: None,
    "a running mean, in train mode": lambda net, x: net.norm.train()(x),
    "a running mean, by its function": lambda net, x: F.batch_norm(
        x, net.norm.running_mean, net.norm.running_var, training=True
    ),
    "a buffer in place": lambda net, x: net.count.add_(1),
    "a buffer through .data": lambda net, x: net.count.data.add_(1),
    "a buffer's .data itself": lambda net, x: setattr(net.count, "data", net.count.data + 1),
    "a buffer's shape": lambda net, x: net.count.resize_(5),
    "a buffer's place": lambda net, x: setattr(net, "count", net.count + 1),
    "a gradient": lambda net, x: setattr(net.linear.weight, "grad", torch.ones(2, 3)),
    "a gradient, by backward": _through_grad,
    "its mode": lambda net, x: net.train(),
    "a parameter through .data": lambda net, x: net.linear.weight.data.mul_(1.5),
    "a parameter that settles": lambda net, x: net.linear.weight.data.clamp_(-0.1, 0.1),
    "a parameter's .data itself": lambda net, x: setattr(net.linear.weight, "data", net.linear.weight.data * 2),
    "long rows, by a function": lambda net, x: F.embedding(ROWS, net.table.weight, max_norm=0.01),
    "a freezing": lambda net, x: net.linear.weight.requires_grad_(False),
    "a parameter's place": lambda net, x: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.data.clone())),
    "a module more": lambda net, x: setattr(net, "more", nn.Linear(2, 2)),
}
REFUSED = {
    "a parameter through .data": "changes the parameter 'linear.weight' in place",
    "a parameter that settles": "changes the parameter 'linear.weight' in place",
    "a parameter's .data itself": "changes the parameter 'linear.weight' in place",
    "long rows, by a function": "changes the parameter 'table.weight'.*max_norm",
    "a freezing": "changes the parameter 'linear.weight' in place",
    "a parameter's place": "creates the parameter 'linear.weight' or replaces it",
    "a module more": "creates the parameter 'more.weight' or replaces it",
}


def state(net: nn.Module) -> list[object]:
    """All that a network is, as plain values."""
    kept: list[object] = [(name, id(module), module.training) for name, module in net.named_modules()]
    for name, t in [*net.named_parameters(), *net.named_buffers()]:
        grad = None if t.grad is None else t.grad.tolist()
        where = t.data_ptr() if isinstance(t, nn.Parameter) else 0
        kept.append((name, id(t), where, t.tolist(), t.requires_grad, id(t.grad), grad))
    return kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_whatever_forward_writes_to_is_as_it_was(way: str, gradients: bool, batchnorm: str) -> None:
    net = writing(way)
    for p in net.parameters() if gradients else ():
        p.grad = torch.full_like(p, 2.0)
    before = state(net)
    options = {} if batchnorm == "eval" else {"batchnorm": "train", "ghost_batch": 4}
    names = ["hessian_trace(exact=True)"] if options else ["mls", "ggn_trace"]
    if way in REFUSED:
        with pytest.raises(BadModel, match=REFUSED[way]):
            fl.Problem(net, "cross_entropy", (X, Y), **options)
    else:
        plain = fl.measure(fl.Lens(fl.Problem(writing("nothing"), "cross_entropy", (X, Y), **options)), names)
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (X, Y), **options))
        for _ in range(2):  # the second one finds the lens fresh
            found = fl.measure(lens, names)
            assert [e.value for e in found.values()] == [e.value for e in plain.values()]
    assert state(net) == before


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_an_embedding_with_max_norm_is_left_alone(scale: float) -> None:
    """Rows short enough: measured. Longer ones, that a look-up would shorten: refused before any change."""
    net = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight.copy_(scale * torch.ones(5, 3))
    before = state(net)
    if scale > 1:
        with pytest.raises(BadModel, match=r"5 of 5 rows of '0\.weight' exceed max_norm=1"):
            fl.Problem(net, "cross_entropy", (ROWS, Y))
    else:
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (ROWS, Y)))
        assert fl.measure(lens, "pass")["ggn_trace"].kind == fl.measure(lens, "ggn_norm")["ggn_norm"].kind == "exact"
    assert state(net) == before


def cast(net: nn.Module, way: str) -> nn.Module:
    """A network under an autocast of its own, entered in one of the ways that trainers enter one."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        if way == "wrapped":  # accelerate makes the context once
            return net.made_before(net.net.forward)(x).float()
        with torch.autocast("cpu", torch.float16 if way == "half" else torch.bfloat16):
            if way == "off in a part":
                with torch.autocast("cpu", enabled=False):
                    x = net.net[0](x)
                return net.net[1:](x).float()
            return net.net(x.bfloat16() if way == "cast" else x).float()

    return module_of(forward, net=net, made_before=torch.autocast("cpu", torch.bfloat16))


def moved(net: nn.Module, x: Tensor, lr: float = 0.1) -> dict[str, float]:
    """Measures that move weights, and others."""
    asked = ["loss", "ggn_trace", "hessian_trace", "sharpness", "critical_sharpness", "directional_sharpness",
             "average_sharpness(probes=2)", "worst_sharpness(restarts=1, steps=2)", "mls"]  # fmt: skip
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, Y)), optimiser=torch.optim.SGD(net.parameters(), lr))
    return {name: estimate.value for name, estimate in zip(asked, fl.measure(lens, asked).values(), strict=False)}


def drawn(kind: str) -> tuple[nn.Module, Tensor]:
    x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        mlp = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        if kind == "mlp":
            return mlp, x[:, 0]
        if kind == "own autocast":
            return cast(mlp, "block"), x[:, 0]
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
            return nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(20, 2)), x
        first, last = nn.utils.parametrizations.weight_norm(mlp[0]), nn.utils.parametrizations.spectral_norm(mlp[2])
        return nn.Sequential(first, nn.Tanh(), last).eval(), x[:, 0]


@pytest.mark.parametrize("way", ["block", "wrapped", "half", "off in a part", "cast"])
@pytest.mark.parametrize("around", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("lr", [0.1, 1e-3])
def test_an_autocast_of_the_networks_own_moves_no_number(way: str, around: Callable[[], Any], lr: float) -> None:
    """Its cache of cast weights outlived moves of them, and bfloat16 hid short ones."""
    net, x = drawn("mlp")
    truth, rounding = moved(net, x, lr), 1e-2 if way == "cast" else 1e-6
    with around():
        assert moved(cast(net, way), x, lr) == pytest.approx(truth, rel=rounding, abs=1e-9)
        assert net(x).dtype == (torch.float32 if around is nullcontext else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16


def test_an_autocast_in_another_thread_stays() -> None:
    net, x = drawn("mlp")
    with measuring(net), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: cast(net, "wrapped").made_before(net.forward)(x).dtype).result() == torch.bfloat16
        assert cast(net, "wrapped").made_before(net.forward)(x).dtype == torch.float32


@contextmanager
def switched(get: Callable[[], Any], put: Callable[[Any], Any], value: object) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
        assert get() == value
    finally:
        put(before)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


AMBIENT: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64 by default": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "bfloat16 by default": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "deterministic": lambda: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "products in bfloat16": lambda: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad off": lambda: switched(torch.is_grad_enabled, torch._C._set_grad_enabled, False),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "saved elsewhere": torch.autograd.graph.save_on_cpu,
    "saved copies": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "cached weights": nn.utils.parametrize.cached,
    "a device": lambda: torch.device("cpu"),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "attention's kernel": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION),
    "every operation seen": Seen,
    "forward derivatives": forward_ad.dual_level,
}


@pytest.mark.parametrize("state", AMBIENT)
@pytest.mark.parametrize("kind", ["own autocast", "encoder", "normed"])
def test_torchs_global_state_changes_no_number_and_is_left_as_it_was(state: str, kind: str) -> None:
    net, x = drawn(kind)
    truth, weights = moved(net, x), {name: value.clone() for name, value in net.state_dict().items()}
    with AMBIENT[state]():
        found = moved(net, x)
    assert found == pytest.approx(truth, rel=1e-5, abs=1e-9)
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


def test_where_torch_makes_other_tensors_it_says_so() -> None:
    net, x = drawn("mlp")
    problem = fl.Problem(net, "cross_entropy", (x, Y))
    for around, says in ((lambda: torch.device("meta"), "default device is meta"),
                         (lambda: FakeTensorMode(allow_non_fake_inputs=True), "FakeTensorMode")):  # fmt: skip
        with around():
            for call in (lambda: fl.Problem(net, "cross_entropy", (x, Y)), lambda: fl.measure(fl.Lens(problem), "mls")):
                with pytest.raises(BadInput, match=says):
                    call()
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(BadInput, match=r"outside of vmap or grad"):
            transform(lambda z: moved(net, x)["mls"] * z.sum())(torch.ones(2))
