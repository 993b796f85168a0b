"""The pass: chunks, Gauss-Newton diagonals and columns, memory, and the parameters that no layer explains."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from literal import matrices, parameter_jacobian
from networks import NETWORKS, module_of, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.grams import lay_out, one_pass
from flatlens.grams.weight_jacobians import GramKind, Roots, SharedJacobian, WeightMatrix
from flatlens.measures import MEASURES
from flatlens.measures.lens import Gatherer


@pytest.mark.parametrize("name", ["mlp-gelu", "residual", "attention", "twice-tanh"])
def test_splitting_the_data_changes_nothing(name: str) -> None:
    """1 x 110, 100 + 10 and 11 x 10, class weights and ignored labels included: sums are divided once."""
    net, x, y = network(name, n=110)
    y[::7] = -100
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2]).double())
    lazily = [
        fl.measure(fl.Lens(fl.Problem(net, loss, DataLoader(TensorDataset(x, y), batch_size=b))), "pass")
        for b in (110, 100, 10)
    ]
    small = fl.measure(fl.Lens(fl.Problem(net, loss, (x, y), memory="20KB")), "pass")
    whole = {
        key: e.value
        for key, e in fl.measure(fl.Lens(fl.Problem(net, loss, (x, y))), "pass").items()
        if e.kind != "undefined"
    }
    for report in [*lazily, small]:
        for key, value in whole.items():
            assert report[key].value == pytest.approx(value, rel=1e-11, abs=1e-14), key


def test_the_samples_keep_the_order_of_the_data() -> None:
    net, x, y = network("mlp-tanh", n=9)
    one = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x[7:8], y[7:8]))), ["mls"])["mls"].value
    samples = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y), memory="5KB")), ["mls"])["mls"].samples
    assert samples.shape == (9,)
    assert float(samples[7]) == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("bare",)])
def test_gauss_newton_diagonal_and_column_sums(name: str, loss: str) -> None:
    net, x, y = network(name)
    problem = fl.Problem(net, loss, (x, y))
    J = parameter_jacobian(net, x)
    C = problem.loss.output_hessian(net(x).detach(), y)
    plan = lay_out(problem, net)
    for chunk in one_pass(problem, net, plan):
        for layer, grams in chunk.layers.items():
            if grams.weight is None:
                continue
            parameter, module = matrices(net)[layer]
            weight = module.weight.detach()
            M = J[parameter].reshape(len(x), 3, weight.shape[0], -1)
            diagonal = torch.einsum("nkdm,nkl,nldm->dm", M, C, M)
            ours = grams.weight.diagonal()
            assert torch.allclose(ours, diagonal, rtol=1e-10, atol=1e-13)
            g = getattr(module, "groups", 1)
            W = weight.reshape(g, weight.shape[0] // g, -1)
            column = torch.einsum("nkgdm,gdm->nkgm", M.reshape(*M.shape[:2], *W.shape), W).flatten(2)
            sums = torch.einsum("nka,nkl,nla->na", column, C, column)
            ours = grams.weight.columns()
            assert torch.allclose(ours, sums, rtol=1e-10, atol=1e-13)


def shared(
    P: int, scale: bool, wanted: frozenset[GramKind] = frozenset({"K", "R"})
) -> tuple[SharedJacobian, Tensor | None]:
    gen = torch.Generator().manual_seed(P)
    J = torch.randn(3, 2, 2, 4, P, generator=gen).double()
    phi = torch.randn(3, 2, 5, P, generator=gen).double()
    W = torch.randn(2, 4, 5, generator=gen).double()
    C = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double().expand(3, 2, 2)
    jacobian = SharedJacobian(J, lambda piece: phi[piece], WeightMatrix(W), C, wanted)
    return jacobian, torch.rand(2, 5, generator=gen).double() + 0.5 if scale else None


@pytest.mark.parametrize("P", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_a_convex_loss_sums_over_outputs_are_literal(P: int, dtype: torch.dtype) -> None:
    """By squares with a root of C, or in float32 by pairs of positions; C has the null vector of a cross-entropy."""
    jacobian, _ = shared(P, False, frozenset({"K", "R", "diagonal", "columns", "adaptive"}))
    J, W = jacobian.J.to(dtype), jacobian.weight.W
    phi = jacobian.phi(slice(None)).to(dtype)
    C = torch.tensor([0.21, 0.0, 1e-12]).double()[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
    own = replace(jacobian, J=J, phi=lambda piece: phi[piece], C=C, roots=Roots(convex=True))
    M = torch.einsum("nkgdp,ngmp->nkgdm", J.double(), phi.double())
    squares = torch.einsum("nkl,nkgdm,nlgdm->ngdm", C, M, M)
    column = (M * W).sum(3)
    rtol = 1e-11 if dtype == torch.float64 else 1e-4
    assert torch.allclose(own.diagonal(), squares.sum(0).flatten(0, 1), rtol=rtol)
    assert torch.allclose(own.adaptive(), (squares * W.square()).sum((1, 2, 3)), rtol=rtol, atol=0)
    assert torch.allclose(own.columns(), torch.einsum("nkl,nkgm,nlgm->ngm", C, column, column).flatten(1), rtol=rtol)
    assert torch.allclose(own.along(weight=True, bias=False), column.sum((2, 3)), rtol=rtol, atol=rtol)
    assert torch.allclose(own.gram(), torch.einsum("nkgdm,nlgdm->nkl", M, M), rtol=rtol)


@pytest.mark.parametrize("unit", [1e-30, 1e-15, 1.0, 1e25])
@pytest.mark.parametrize("P", [1, 6])
def test_squares_in_float32_keep_their_digits_in_any_unit(P: int, unit: float) -> None:
    """Squares of vanishing or exploding derivatives, or of a sample beyond doubt beside others, leave float32."""
    gen = torch.Generator().manual_seed(P)
    J, phi = unit * torch.randn(3, 2, 1, 8, P, generator=gen), torch.randn(3, 1, 5, P, generator=gen)
    weight = WeightMatrix(torch.randn(1, 8, 5, generator=gen).double())
    scale = torch.tensor([1.0, 1e-40, 1.0]).double()
    C = scale[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
    own = SharedJacobian(J, lambda piece: phi[piece], weight, C, frozenset({"diagonal", "adaptive"}), Roots(True))
    M = torch.einsum("nkgdp,ngmp->nkgdm", J.double(), phi.double())
    squares = torch.einsum("nkl,nkgdm,nlgdm->ngdm", C, M, M)
    assert torch.allclose(own.diagonal(), squares.sum(0).flatten(0, 1), rtol=1e-4, atol=1e-6 * float(squares.max()))
    assert torch.allclose(own.adaptive(), (squares * weight.squares).sum((1, 2, 3)), rtol=1e-4, atol=0)


CHEAPEST = SharedJacobian.__dict__["cheapest"].func


def by_way(narrow: bool) -> property:
    """M for Gram matrices is formed from the features' factor, or from the features, whatever takes less."""
    return property(lambda self: CHEAPEST(self) | {"grams": "factor" if narrow else "features"})


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("P", [1, 2, 40])
def test_all_ways_to_the_gram_of_a_shared_weight_are_literal(
    P: int, tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From features or their factor, stored by tokens or by features, with the Jacobian at the input or without."""
    for scaled in (False, True):
        jacobian, scale = shared(P, scaled)
        J, W = jacobian.J, jacobian.weight.W
        if tokens:
            J, W = J[:, :, :1].mT.contiguous().mT, W[:1]
        phi = jacobian.phi(slice(None))[:, : len(W)]
        units = torch.ones(W.shape[0], W.shape[2]).double() if scale is None else scale[: len(W)]
        M = torch.einsum("nkgdp,ngmp->nkgdm", J, phi)
        V = torch.einsum("gdm,nkgdo->nkgmo", W * units[:, None], M / units[:, None])
        at_x = torch.einsum("gdm,nkgdp->nkgmp", W, J)
        own = replace(jacobian, J=J, phi=phi.__getitem__, weight=WeightMatrix(W))
        for narrow in (True, False):
            monkeypatch.setattr(SharedJacobian, "cheapest", by_way(narrow))
            for given in (None, at_x):
                own = replace(own, at_x=given)
                assert torch.allclose(own.gram(), torch.einsum("nkgdm,nlgdm->nkl", M, M), rtol=1e-11)
                relative = own.relative_gram(None if scale is None else units)
                assert torch.allclose(relative, torch.einsum("nkgmo,nlgmo->nkl", V, V), rtol=1e-11)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("bytes_at_once", [1, 2 * 2 * 5 * 8 * 3, 2**23])
def test_a_large_weight_is_treated_in_slices_of_rows(
    bytes_at_once: int, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results do not depend on the scratch memory: it holds one row of a sample's gradient, three rows, or all."""
    monkeypatch.setattr(SharedJacobian, "cheapest", by_way(narrow))
    monkeypatch.setattr("flatlens.grams.weight_jacobians.CACHE_BYTES", bytes_at_once)
    monkeypatch.setattr("flatlens.grams.weight_jacobians.SCRATCH_BYTES", bytes_at_once)
    jacobian, scale = shared(6, True, frozenset(get_args(GramKind)))
    J, phi, W, C = jacobian.J, jacobian.phi(slice(0, 3)), jacobian.weight.W, jacobian.C
    M = torch.einsum("nkgdp,ngmp->nkgdm", J, phi)
    squares = torch.einsum("nkgdm,nkl,nlgdm->ngdm", M, C, M)
    columns = torch.einsum("nkgdm,gdm->nkgm", M, W)
    assert torch.allclose(jacobian.gram(), torch.einsum("nkgdm,nlgdm->nkl", M, M))
    relative = torch.einsum("gdm,nkgdo->nkgmo", W, M)
    assert torch.allclose(jacobian.relative_gram(), torch.einsum("nkgmo,nlgmo->nkl", relative, relative))
    scaled = torch.einsum("gdm,gm,nkgdo,go->nkgmo", W, scale, M, 1 / scale)
    assert torch.allclose(jacobian.relative_gram(scale), torch.einsum("nkgmo,nlgmo->nkl", scaled, scaled))
    assert torch.allclose(jacobian.diagonal(), squares.sum(0).flatten(0, 1))
    assert torch.allclose(jacobian.columns(), torch.einsum("nkgm,nkl,nlgm->ngm", columns, C, columns).flatten(1))
    assert torch.allclose(jacobian.adaptive(), (squares * W.square()).sum((1, 2, 3)))


def test_memory_holds_the_chunk_beside_the_weights() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 100), nn.Linear(100, 4))
    problem = fl.Problem(net, "cross_entropy", (torch.randn(6, 1, 6, 6), torch.zeros(6, dtype=torch.long)))
    plan = lay_out(problem, net)
    entries, factors = 8 * 9 + 128 * 100 + 400, 8 * 8 + 100 * 100 + 4 * 4
    fixed, each = 8 * (entries + factors), plan.bytes_per_sample(4)
    assert plan.samples_at_once(fixed + 3 * each, 4) == 3
    assert plan.samples_at_once(fixed + 3 * each - 1, 4) == 2
    assert plan.samples_at_once(0, 4) == 1
    assert plan.samples_at_once(fixed + 16 * entries + 3 * each, 4, {"G", "diagonal"}) == 3


def test_a_dense_layer_stores_no_per_sample_gradient() -> None:
    """The largest tensor alive in the pass over a wide layer is far below n N d m entries."""
    net = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 5))
    x, y = torch.randn(64, 300), torch.zeros(64, dtype=torch.long)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    largest = 0

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Spy():
        for chunk in one_pass(problem, net, lay_out(problem, net)):
            for grams in chunk.layers.values():
                _ = grams.G, grams.K, grams.R
    assert largest <= 64 * 5 * 400
    assert largest < 64 * 5 * 300 * 400 / 100


def test_parameters_outside_layers_are_found() -> None:
    net, x, y = network("bare")
    plan = lay_out(fl.Problem(net, "cross_entropy", (x, y)), net)
    assert set(plan.unexplained) == set()
    assert "scale" in plan.small_parameters
    net, x, y = network("attention")
    plan = lay_out(fl.Problem(net, "cross_entropy", (x, y)), net)
    bare = {name for name, weight in plan.weights.items() if not weight.calls}
    assert bare == {"encoder.self_attn.in_proj_weight", "encoder.self_attn.out_proj.weight"}
    assert {"encoder.norm1.weight", "encoder.norm2.bias", "encoder.self_attn.in_proj_bias"} <= set(
        plan.small_parameters
    )
    assert not plan.unexplained


AFFINE = {
    "mlp-relu": {"0", "2", "4"},
    "mlp-tanh": {"4"},
    "cnn-relu-inplace": {"0", "2", "6", "8"},
    "residual": {"stem", "left", "right", "head"},
    "twice-relu": {"first", "last"},  # `mid` is used twice: its Hessian is more than its Gauss-Newton part
    "attention": {"head"},
}


@pytest.mark.parametrize("name", AFFINE)
def test_where_the_pass_is_exact_is_found(name: str) -> None:
    net, x, y = network(name)
    plan = lay_out(fl.Problem(net, "cross_entropy", (x, y)), net)
    assert {layer for layer in plan.affine if layer not in ("encoder.linear2",)} == AFFINE[name]


def test_a_curved_function_outside_any_module_is_noticed() -> None:
    net = module_of(lambda net, x: net.b(torch.sin(net.a(x))), a=(6, 4), b=(4, 3)).double()
    x, y = torch.randn(4, 6).double(), torch.zeros(4, dtype=torch.long)
    assert lay_out(fl.Problem(net, "cross_entropy", (x, y)), net).affine == {"b"}


class Waits(TorchDispatchMode):
    """A mode that records operations for which the host waits for the device.

    Not recorded: torch's own check of one-hot labels on a CPU, the comparison of buffers at the end of the pass, and
    what is read on a CPU alone (`Roots`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            mine = [frame for frame in traceback.extract_stack() if "flatlens" in frame.filename][-1]
            if "one_hot(" not in str(mine.line) and mine.name not in ("_put_back", "of"):
                self.seen.append(f"{mine.filename}:{mine.lineno}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mlp-gelu", "residual", "attention", "cnn-tanh", "twice-tanh"])
def test_no_chunk_waits_for_the_device(name: str) -> None:
    """The pass and its measures only queue operations; numbers go to the host when the pass has ended."""
    net, x, y = network(name, n=9)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    measures = [m for m in MEASURES.values() if isinstance(m, fl.measures.PassMeasure)]
    gatherer = Gatherer(lens.problem, lens.model, lens.plan, {}, None)
    with Waits() as waits:
        found = gatherer.by_pass(measures)
    assert found.values
    assert waits.seen == []


class Odd(torch.autograd.Function):
    """A cube, whose derivative torch cannot batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert gradient.ndim == 2
        return gradient * 3 * x**2 if float(gradient.abs().max()) >= 0 else gradient  # looks at a value


def cubed(own: bool) -> nn.Module:
    torch.manual_seed(0)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.first(x)
        found: Tensor = net.second(Odd.apply(h) if own else h**3)
        return found

    return module_of(forward, first=(4, 6), second=(6, 3)).double()


def test_operations_without_batching_rule_are_differentiated_one_by_one() -> None:
    """There are several chunks: the first one finds that batching fails, the others do not try it again."""
    x, y = torch.randn(40, 4).double(), torch.zeros(40).long()
    reports = [
        fl.measure(
            fl.Lens(fl.Problem(cubed(own), "cross_entropy", (x, y), memory="20KB")), ["mls", "ggn_trace", "nmls"]
        )
        for own in (False, True)
    ]
    for key, estimate in reports[0].items():
        assert reports[1][key].value == pytest.approx(estimate.value, rel=1e-12), key


@pytest.mark.parametrize("share", [2**18, 2**30])  # two of three at once, and one by one
def test_outputs_taken_together_are_those_taken_alone(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = network("mlp-tanh", n=9)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    plan = lay_out(problem, net)
    [alone] = list(one_pass(problem, net, plan))
    expected = {name: (g.G.clone(), g.K.clone(), g.R.clone()) for name, g in alone.layers.items()}
    monkeypatch.setattr(sys.modules["flatlens.grams.output_jacobians"], "MEMORY_SHARE", share)
    [chunk] = list(one_pass(problem, net, plan))
    for name, g in chunk.layers.items():
        for found, truth in zip((g.G, g.K, g.R), expected[name], strict=True):
            assert torch.allclose(found, truth, rtol=1e-12, atol=1e-14), name


def attending(x: Tensor, net: nn.Module, kind: str) -> Tensor:
    """Attention of one head: as torch has it, with a learned mask, or with another derivative when it is fused."""
    q, k, v = net.qkv(x)[:, None].chunk(3, -1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=net.mask if kind == "learned mask" else None)
    if kind == "another derivative" and torch.backends.cuda.flash_sdp_enabled():
        mixed = 2 * mixed - mixed.detach()
    return torch.as_tensor(net.head(mixed[:, 0].mean(1)))


@pytest.mark.parametrize("kind", ["as it is", "learned mask", "another derivative"])
def test_attention_runs_fused_only_where_plan_and_derivatives_are_those_of_plain_operations(kind: str) -> None:
    torch.manual_seed(0)
    net = module_of(
        lambda net, x: attending(x, net, kind), qkv=nn.Linear(6, 18), head=nn.Linear(6, 3),
        **({"mask": nn.Parameter(torch.randn(5, 5))} if kind == "learned mask" else {}),
    ).double()  # fmt: skip
    problem = fl.Problem(net, "cross_entropy", (torch.randn(7, 5, 6).double(), torch.arange(7) % 3))
    plan = lay_out(problem, problem.model)
    assert plan.fused == (kind == "as it is")
    alike = {False: replace(plan, fused=False), True: plan}
    for found, plain in zip(*(one_pass(problem, problem.model, alike[fused]) for fused in (True, False)), strict=True):
        for key, grams in found.layers.items():
            assert torch.allclose(grams.G, plain.layers[key].G, rtol=1e-11, atol=1e-15)
            assert torch.allclose(grams.K, plain.layers[key].K, rtol=1e-11, atol=1e-15)
