"""Modules that torch differentiates wrongly, or not as the risk, against central differences."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, cond, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.errors import BadModel, ForwardFailed
from flatlens.problem import measuring

STEP = 1e-5


def moved(net: nn.Module, of: Callable[[], Tensor]) -> Tensor:
    """d of / d theta by central differences, a row for each parameter; the network as it comes, outside flatlens."""
    rows = []
    for p in net.parameters():
        for i in range(p.numel()):
            ends = []
            for sign in (1, -1):
                before = p.data.flatten()[i].clone()
                p.data.view(-1)[i] += sign * STEP
                ends.append(of().detach().clone().flatten())
                p.data.view(-1)[i] = before
            rows.append((ends[0] - ends[1]) / (2 * STEP))
    return torch.stack(rows)


def hessian(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the cross-entropy, by differences of the gradient: nothing is differentiated twice."""

    def gradient() -> Tensor:
        rows = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
        return torch.cat([row.flatten() for row in rows])

    return moved(net, gradient)


def jacobians(net: nn.Module, x: Tensor) -> Tensor:
    """(parameters, samples, outputs), by differences of the outputs: nothing is differentiated at all."""
    return moved(net, lambda: net(x)).reshape(-1, len(x), net(x).shape[1])


@pytest.mark.parametrize("where", ["parameter", "module", "before the module"])
def test_hooks_that_change_gradients_for_training_change_no_number(where: str) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    hooked = net[2].weight if where == "parameter" else net[2]
    named = {"parameter": "register_hook", "module": "register_full_backward_hook",
             "before the module": "register_full_backward_pre_hook"}[where]  # fmt: skip
    told: list[object] = []

    def halved(*given: object) -> object:
        told.append(given)
        g = given[-1] if where != "module" else given[1]
        return g * 0.5 if isinstance(g, Tensor) else (g[0] * 0.5,)

    handle = getattr(hooked, named)(halved)
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["mls", "hessian_trace", "sharpness"])
    assert not told
    assert found["mls"].value == pytest.approx(float(torch.linalg.matrix_norm(by_inputs(net, x), 2).mean()), rel=1e-6)
    F.cross_entropy(net(x), y).backward()
    assert told  # the hook is there again
    handle.remove()
    H = hessian(net, x, y)
    assert found["hessian_trace"].value == pytest.approx(float(H.trace()), rel=1e-6)
    assert found["sharpness"].value == pytest.approx(float(torch.linalg.eigvalsh((H + H.mT) / 2)[-1]), rel=1e-3)


def by_inputs(net: nn.Module, x: Tensor) -> Tensor:
    """(samples, outputs, entries of the input), by differences of the outputs."""
    steps = STEP * torch.eye(x.shape[1]).double()
    with torch.no_grad():
        return torch.stack([(net(x + step) - net(x - step)) / (2 * STEP) for step in steps], 2)


def recurrent(wrap: Callable[..., nn.Module]) -> nn.Module:
    return module_of(
        lambda net, x: net.head(net.lstm(x.unflatten(1, (2, 2)))[0][:, -1]),
        lstm=wrap(nn.LSTM(2, 2, batch_first=True), "weight_hh_l0"),
        head=(2, 3),
    )


HOOK, PARAMETRIZED = nn.utils.weight_norm, nn.utils.parametrizations.weight_norm
NETS: dict[str, Callable[[Callable[..., nn.Module]], nn.Module]] = {
    "rows": lambda wrap: nn.Sequential(wrap(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
    "columns": lambda wrap: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), wrap(nn.Linear(5, 3), dim=1)),
    "one norm": lambda wrap: nn.Sequential(wrap(nn.Linear(4, 3), dim=None), nn.Tanh(), nn.Linear(3, 3)),
    "convolution": lambda wrap: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), wrap(nn.Conv2d(1, 3, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)
    ),
    "lstm": recurrent,
}


def normed(name: str, wrap: Callable[..., nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = NETS[name](wrap).double()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)  # so that no norm is the one that it was made with
        return net, torch.randn(6, 4).double(), torch.arange(6) % 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [HOOK, PARAMETRIZED], ids=["hook", "parametrisation"])
@pytest.mark.parametrize("name", NETS)
def test_curvature_of_weight_normed_networks(name: str, wrap: Callable[..., nn.Module]) -> None:
    net, x, y = normed(name, wrap)
    H = hessian(net, x, y)
    assert torch.allclose(H, H.T, atol=1e-7)
    assert torch.allclose(Hessian(fl.Problem(net, "cross_entropy", (x, y))).matrix(), H, atol=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [HOOK, PARAMETRIZED], ids=["hook", "parametrisation"])
@pytest.mark.parametrize("name", ["rows", "columns", "one norm", "convolution"])
def test_measures_of_weight_normed_networks(name: str, wrap: Callable[..., nn.Module]) -> None:
    net, x, y = normed(name, wrap)
    H = hessian(net, x, y)
    asked = ["hessian_trace(exact=True)", "sharpness(rtol=1e-9)"]
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), asked)
    assert report["hessian_trace(exact=True)"].value == pytest.approx(float(H.trace()), abs=1e-6)
    assert report["sharpness(rtol=1e-09)"].value == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [HOOK, PARAMETRIZED], ids=["hook", "parametrisation"])
def test_layers_of_weight_normed_networks(wrap: Callable[..., nn.Module]) -> None:
    """kappa of the normed weight itself, sum <w_s, w_t> Tr H_st, and lmax of the layer above it."""
    net, x, y = normed("rows", wrap)
    twin = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for ours, theirs in ((twin[0], net[0]), (twin[2], net[2])):
            ours.weight.copy_(wrap_free(theirs))
            ours.bias.copy_(theirs.bias)
    H, W = hessian(twin, x, y), twin[0].weight.detach()
    kappa = torch.einsum("smtm,sk,tk->", H[:20, :20].reshape(5, 4, 5, 4), W, W)
    above = H[25:40, 25:40]
    report = fl.measure(
        fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["relative_flatness", "layer_sharpness(rtol=1e-9)"]
    )
    assert report["relative_flatness", "0"].value == pytest.approx(float(kappa), rel=1e-6)
    assert report["layer_sharpness(rtol=1e-09)", "2"].value == pytest.approx(
        float(torch.linalg.eigvalsh((above + above.T) / 2)[-1]), rel=1e-6
    )


def wrap_free(layer: nn.Module) -> Tensor:
    """The weight that a layer multiplies with, of its parameters as they are now."""
    if hasattr(layer, "weight_v"):
        return layer.weight_v * (layer.weight_g / layer.weight_v.norm(dim=1, keepdim=True))
    return layer.weight


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [HOOK, PARAMETRIZED], ids=["hook", "parametrisation"])
def test_weight_norm_comes_out_as_it_went_in(wrap: Callable[..., nn.Module]) -> None:
    net, x, y = normed("rows", wrap)
    left = net[0].weight if wrap is HOOK else None  # of the parameters before they were multiplied
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    fl.measure(lens, ["sharpness", "relative_flatness"])
    with measuring(net):
        with measuring(net):
            inner = net(x)
        assert "WeightNorm" not in names_of(inner)
        assert "WeightNorm" not in names_of(net(x))  # the outer one is still on
        assert torch.allclose(net[0].weight, wrap_free(net[0]))  # before any forward, too
    assert wrap is not HOOK or net[0].weight is left
    assert "WeightNorm" in names_of(net(x))
    assert torch.allclose(net(x), inner, rtol=1e-14)


def names_of(z: Tensor) -> str:
    seen, waiting = set(), [z.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return " ".join(node.name() for node in seen)


def reader(both: bool = False) -> nn.Module:
    """Words read one after the other, the last outputs through a head."""
    return module_of(
        lambda net, ids: net.head(net.recurrence(net.table(ids))[0][:, -1]),
        table=nn.Embedding(5, 2),
        recurrence=nn.LSTM(2, 3, batch_first=True, bidirectional=both),
        head=(6 if both else 3, 2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("both", [False, True])
def test_weights_of_an_lstm_are_seen_in_every_dtype(both: bool, dtype: torch.dtype) -> None:
    """In these, mkldnn's LSTM is one node of the graph: its weights were left out of the network's numbers."""
    torch.manual_seed(0)
    net, ids, y = reader(both).to(dtype), torch.randint(0, 5, (4, 3)), torch.arange(4) % 2
    asked = ["fisher_rao", "feature_norm", "weight_norm", "normalized_sharpness", "relative_flatness_ggn"]
    ours, truth = (
        fl.measure(fl.Lens(fl.Problem(one, "cross_entropy", (ids, y))), asked)
        for one in (net, copy.deepcopy(net).double())
    )
    assert len(truth.about["layers"]) == (5 if both else 3)
    assert ours.about["layers"] == truth.about["layers"]
    assert {key: ours[key].kind for key in ours} == {key: truth[key].kind for key in truth}
    for key in truth:
        if truth[key].kind != "undefined":
            assert ours[key].value == pytest.approx(truth[key].value, rel=1e-4), key


def test_threads_that_measure_at_the_same_time_put_torch_back() -> None:
    """The first to begin ends first: the second still runs on plain operations, and then nothing is left of either."""
    fast, hardsigmoid = torch._VF.lstm, F.hardsigmoid
    net, compilations = nn.Linear(2, 2), list[int]()

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> object:
        compilations.append(1)
        return graph.forward

    compiled = torch.compile(net, backend=backend)
    begun, ended = threading.Barrier(2, timeout=60), threading.Event()
    still: list[bool] = []

    def first() -> None:
        with measuring(reader()):
            begun.wait()
        ended.set()

    def second() -> None:
        with measuring(reader()):
            begun.wait()
            ended.wait(60)
            still.append(torch._VF.lstm is not fast and F.hardsigmoid is not hardsigmoid)
            still.append(not torch.backends.mha.get_fastpath_enabled())
            compiled(torch.ones(1, 2))
            still.append(not compilations)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert still == [True] * 3
    compiled(torch.ones(1, 2))
    assert compilations
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch._VF.lstm is fast
    assert F.hardsigmoid is hardsigmoid
    assert torch.backends.mkldnn.enabled


def test_a_recurrence_comes_out_as_it_went_in() -> None:
    net, ids = reader(), torch.randint(0, 5, (4, 3))
    before = sorted(names_of(net(ids)).split())
    with measuring(net):
        with measuring(net):
            assert "Mkldnn" not in names_of(net(ids))
        assert "Mkldnn" not in names_of(net(ids))  # the outer one is still on
        with pytest.raises(TypeError):
            torch._VF.lstm(ids)
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled
    assert sorted(names_of(net(ids)).split()) == before


def words(bag: bool, **options: object) -> tuple[nn.Module, Tensor, Tensor]:
    """Words that a batch holds 9, 6, 2 and 1 times."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        table = nn.EmbeddingBag(4, 3, **options) if bag else nn.Embedding(4, 3, **options)
        layers = [table] if bag else [table, nn.Flatten()]
        net = nn.Sequential(*layers, nn.Linear(3 if bag else 9, 2)).double()
        with torch.no_grad():
            table.weight.mul_(0.3)
    ids = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 1], [2, 1, 0], [0, 1, 2], [3, 0, 1]])
    return net, ids, torch.arange(6) % 2


@pytest.mark.parametrize("memory", [1, "1GiB"])
@pytest.mark.parametrize("bag", [False, True])
def test_gradients_are_not_divided_by_how_often_a_word_comes(bag: bool, memory: str | int) -> None:
    net, ids, y = words(bag, scale_grad_by_freq=True)
    S = float(jacobians(net, ids).square().sum()) / len(ids)
    asked = ["interpolation_sharpness"] if bag else ["interpolation_sharpness", "hessian_trace(exact=True)"]
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (ids, y), memory=memory)), asked)
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-7)
    if not bag:  # a bag has one derivative
        net[0].scale_grad_by_freq = False
        trace = float(hessian(net, ids, y).trace())
        net[0].scale_grad_by_freq = True
        assert report["hessian_trace(exact=True)"].value == pytest.approx(trace, rel=1e-6)
    assert net[0].scale_grad_by_freq


@pytest.mark.parametrize("bag", [False, True])
def test_a_largest_norm_that_holds_changes_nothing(bag: bool) -> None:
    """Rows are below it: the numbers are those without it, and no look-up touches the weight."""
    plain, ids, y = words(bag)
    truth = fl.measure(fl.Lens(fl.Problem(plain, "cross_entropy", (ids, y))), ["mls", "interpolation_sharpness"])
    net, _, _ = words(bag, max_norm=2.0)
    version, before = net[0].weight._version, net[0].weight.detach().clone()
    ours = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (ids, y))), ["mls", "interpolation_sharpness"])
    assert ours["interpolation_sharpness"].value == truth["interpolation_sharpness"].value
    assert (net[0].weight._version, net[0].max_norm) == (version, 2.0)
    assert torch.equal(net[0].weight, before)


def test_rows_that_grew_beyond_their_largest_norm_are_refused_and_left() -> None:
    net, ids, y = words(False, max_norm=2.0)
    problem = fl.Problem(net, "cross_entropy", (ids, y))
    with torch.no_grad():
        net[0].weight[1] *= 2.01 / net[0].weight[1].norm()
    before = net[0].weight.detach().clone()
    with pytest.raises(BadModel, match=r"1 of 4 rows of '0.weight' exceed max_norm=2.*renorm_") as told:
        fl.measure(fl.Lens(problem), "pass")
    assert "\n" not in str(told.value)
    assert torch.equal(net[0].weight, before)
    assert net[0].max_norm == 2.0
    net[0].weight.data.renorm_(2, 0, 2.0)  # as it says
    assert fl.measure(fl.Lens(problem), "pass")["mls"].kind != "undefined"


def tokens(norm: nn.Module) -> nn.Module:
    """Pixels of a norm as tokens: the slope that comes back to it has its channels last in memory."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        z = net.norm(net.conv(x)).flatten(2).mT
        return net.head(torch.tanh(z @ torch.eye(4, dtype=z.dtype)).mean(1))

    return module_of(forward, conv=nn.Conv2d(2, 4, 3, padding=1, bias=False), norm=norm, head=(4, 2))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance, tracked": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("memory", [1, "1GiB"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_one_sample_at_a_time(norm: str, memory: str | int) -> None:
    """torch's own derivative is wrong there; that of the same numbers is not to depend on how many are read at once."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = tokens(NORMS[norm]()).double().eval()
        with torch.no_grad():
            for entry in (net.norm.weight, net.norm.running_var):
                _ = None if entry is None else entry.uniform_(0.5, 2)
        x = torch.randn(3, 2, 3, 5).double()
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    for samples in (x, x[:1]):
        S = float(jacobians(net, samples).square().sum()) / len(samples)
        problem = fl.Problem(net, "half_squared_error", (samples, torch.zeros(len(samples), 2)), memory=memory)
        report = fl.measure(fl.Lens(problem), ["interpolation_sharpness", "ggn_norm(rtol=1e-9)"])
        assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-7)
        J = jacobians(net, samples).flatten(1)
        top = float(torch.linalg.eigvalsh(J.T @ J / len(samples))[-1])
        assert report["ggn_norm(rtol=1e-09)"].value == pytest.approx(top, rel=1e-6)
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (2, 3, 4, 1), (1, 3, 2, 4, 5)])
@pytest.mark.parametrize("norm", ["BatchNorm", "InstanceNorm"])
def test_norms_read_any_layout(norm: str, shape: tuple[int, ...]) -> None:
    """Inputs and slopes in every order of axes in memory, with any stride where an axis has length 1."""
    generator = torch.Generator().manual_seed(0)
    net = getattr(nn, f"{norm}{len(shape) - 2}d")(3, affine=True).double().eval()
    x, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))

    def laid(t: Tensor, order: tuple[int, ...]) -> Tensor:
        """The same entries, their axes in this order in memory."""
        whole = t.permute(order).contiguous().permute([order.index(i) for i in range(t.ndim)])
        strides = [1 if n == 1 else s for n, s in zip(shape, whole.stride(), strict=True)]
        return torch.as_strided(whole, shape, strides)

    def gradients(x: Tensor, slope: Tensor) -> list[Tensor]:
        x.requires_grad_()
        with measuring(net):
            return list(torch.autograd.grad(net(x), [x, net.weight, net.bias], slope))

    truth = gradients(x.clone(), slope)
    orders = list(itertools.permutations(range(len(shape))))[:24]
    for one, other in itertools.product(orders[::2], orders[1::3]):
        ours = gradients(laid(x, one), laid(slope, other))
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, truth, strict=True))


class Cut(torch.autograd.Function):
    """The identity, on whose result nothing depends as far as autograd is told."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> None:
        return None


def test_a_norm_may_get_no_slope() -> None:
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    found = []
    for cut in (Cut.apply, torch.detach):
        torch.manual_seed(0)
        net = module_of(
            lambda net, x, cut=cut: net.head((net.a(x) + cut(net.norm(net.a(x)))).mean((2, 3))),
            a=nn.Conv2d(2, 3, 2), norm=nn.InstanceNorm2d(3, affine=True), head=(3, 2),
        ).double()  # fmt: skip
        found.append(fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), ["ggn_trace"])["ggn_trace"])
    assert found[0].value == pytest.approx(found[1].value, rel=1e-12)


def chosen(sign: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return torch.cond(torch.tensor(sign > 0), lambda z: net.a(z).tanh(), lambda z: net.b(z).sin(), (x,))

    return forward


def nested(net: nn.Module, x: Tensor) -> Tensor:
    inner = chosen(-1.0)
    return torch.cond(torch.tensor(True), lambda z: net.b(inner(net, z)), lambda z: z, (x,))


def by_a_name_of_its_own(net: nn.Module, x: Tensor) -> Tensor:
    return cond(torch.tensor([True]), lambda z, w: net.a(z) * w, lambda z, w: z, (x, x.cos()))


def repeated(net: nn.Module, x: Tensor) -> Tensor:
    return while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, net.a(z).tanh()), (torch.tensor(0), x))[1]


def three_times(net: nn.Module, x: Tensor) -> Tensor:
    return net.a(net.a(net.a(x).tanh()).tanh()).tanh()


@pytest.mark.parametrize(("written", "plain"), [
    (chosen(1.0), lambda net, x: net.a(x).tanh()),
    (chosen(-1.0), lambda net, x: net.b(x).sin()),
    (nested, lambda net, x: net.b(net.b(x).sin())),
    (by_a_name_of_its_own, lambda net, x: net.a(x) * x.cos()),
    (repeated, three_times),
], ids=["true", "false", "nested", "imported", "while"])  # fmt: skip
def test_control_flow_of_torch_is_that_of_python(
    written: Callable[[nn.Module, Tensor], Tensor], plain: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    def made(told: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return module_of(told, a=(3, 3), b=(3, 3)).double()

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = x, torch.arange(6) % 3
    lenses = [fl.Lens(fl.Problem(made(one), "cross_entropy", data)) for one in (written, plain)]
    for names in (None, ["sharpness", "hessian_trace", "ggn_norm"]):
        found, truth = (fl.measure(lens, names) for lens in lenses)
        assert {key: (e.value, e.kind) for key, e in found.items() if e.kind != "undefined"} == {
            key: (e.value, e.kind) for key, e in truth.items() if e.kind != "undefined"
        }
        assert truth.keys() == found.keys()


def test_control_flow_whose_derivative_would_be_lost_is_refused() -> None:
    class Mapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch_map(super().forward, x)

    with pytest.raises(ForwardFailed, match=r"no derivative in the parameters .*: write a loop of Python \(") as told:
        fl.Problem(Mapped(3, 2), "cross_entropy", (torch.randn(5, 3), torch.arange(5) % 2))
    assert "shapes" not in str(told.value)
