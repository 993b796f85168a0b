"""What Problem accepts, refuses, and leaves as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import flatlens as fl
from flatlens.errors import BadData, BadInput, BadLoss, BadModel, UnknownName
from flatlens.problem import measuring

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])


def net() -> nn.Module:
    return nn.Linear(3, 2)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class Wandering(Dataset):
    """Augments: never the same twice."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return X[i] + self.reads, Y[i]


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[4, 1] = float("nan")
    return x


def broken_weights() -> nn.Module:
    model = net()
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    return model


def problem(
    model: object = None, loss: object = "cross_entropy", data: object = (X, Y), **options: object
) -> fl.Problem:
    return fl.Problem(net() if model is None else model, loss, data, **options)


class Turning(nn.Linear):
    """Real weights and outputs, with a complex buffer between."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(3, 2, dtype=dtype)
        self.register_buffer("turn", torch.tensor(0.6 + 0.8j))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(super().forward(x)) * self.turn)


class CoupledLate(nn.Linear):
    """Samples beyond 9 take off the mean of such samples in their batch, detached: no derivative shows it."""

    def forward(self, x: Tensor) -> Tensor:
        late = (x[:, :1] > 9).to(x)
        mean = (x * late).sum(0) / late.sum().clamp(min=1)
        return super().forward(x - late * mean.detach())


def late(n: int) -> tuple[Tensor, Tensor]:
    """n samples, of which only those beyond the first thousand are coupled."""
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(2)).clamp(-8, 8)
    x[1100:] += 30
    return x, torch.zeros(n, dtype=torch.long)


IDS = torch.tensor([[0, 1], [0, 0]] * 5)


def looked_up() -> nn.Module:
    """Two rows of four are longer than they may be."""
    table = nn.Embedding(4, 2, max_norm=1, _weight=torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.1, 0.0], [1.0, 1.0]]))
    return nn.Sequential(table, nn.Flatten(), nn.Linear(4, 2))


STACKED = nn.Sequential(nn.Linear(3, 2), nn.Unflatten(1, (2, 1)))
COUPLED = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
REFUSED = {
    "NaN in the data": (lambda: problem(data=(with_nan(X), Y)), BadData, r"1 of 10 samples.*index 4"),
    "NaN in held-out data": (lambda: problem(test=(with_nan(X), Y)), BadData, "test="),
    "inf in the weights": (lambda: problem(broken_weights()), BadModel, "'weight' are NaN or inf"),
    "empty data": (lambda: problem(data=(X[:0], Y[:0])), BadData, "empty"),
    "label out of range": (lambda: problem(data=(X, Y + 1)), BadData, "label 2 at sample 1.*0 to 1"),
    "a held-out label": (lambda: problem(test=(X, Y + 1)), BadData, r"test=.*label 2.*samples 0 to 9"),
    "loss of the wrong shape": (lambda: problem(loss=lambda f, y: f[:3, 0]), BadLoss, r"shape \(10,\)"),
    "random in eval mode": (lambda: problem(Noisy(3, 2)), BadModel, r"twice.*\(in bernoulli\) draws random"),
    "outputs with a row a token": (
        lambda: problem(STACKED),
        BadData,
        "have one row per token: expected labels of shape",
    ),
    "samples coupled": (lambda: problem(COUPLED), BadModel, "outputs change with the other samples.*BatchNorm"),
    "samples coupled in a late batch": (
        lambda: problem(CoupledLate(3, 2), data=late(1200)),
        BadModel,
        "outputs change with the other samples of its batch",
    ),
    "augmentation": (lambda: problem(data=Wandering()), BadData, "differs when read again"),
    "x and y disagree": (lambda: problem(data=(X, Y[:5])), BadData, "10 samples and y 5"),
    "unknown parameter": (lambda: problem(parameters=["wieght"]), UnknownName, "weight"),
    "a size that is none": (lambda: problem(memory="lots"), BadInput, "1GiB"),
    "no model": (lambda: problem("net"), BadModel, "got str"),
    "a shape the model cannot take": (lambda: problem(data=(X[:, :2], Y)), BadModel, "forward failed.*shapes"),
    "a loss that cannot take the targets": (
        lambda: problem(loss=nn.BCEWithLogitsLoss()),
        BadLoss,
        r"shape \(10,\) do not fit outputs of shape \(10, 2\)",
    ),
    "a loss that fails": (lambda: problem(loss=lambda f, y: f @ y), BadLoss, "failed on the first batch"),
    "a 0-1 loss": (lambda: problem(loss=lambda f, y: (f.argmax(1) != y).float()), BadLoss, "differentiable"),
    "text for labels": (lambda: problem(data=(X, ["cat"] * 10)), BadData, "cannot read a list"),
    "a dtype by its name": (lambda: problem(dtype="float64"), BadInput, "torch.float64"),
    "no parameters": (lambda: problem(parameters=None), BadInput, "'trainable', 'all'"),
    "a lazy layer": (lambda: problem(nn.LazyLinear(2)), BadModel, "not initialised"),
    "a lens on a model": (lambda: fl.Lens(net()), BadInput, "expected a Problem"),
    "complex weights": (lambda: problem(net().to(torch.complex64)), BadModel, "'weight' is complex.*view_as_real"),
    "complex weights in half": (
        lambda: problem(Turning(torch.half), dtype=torch.float32),
        BadModel,
        "'turn' is complex",
    ),
    "a complex buffer in a copy": (
        lambda: problem(Turning(), dtype=torch.float64),
        BadModel,
        "'turn' is complex.*float64",
    ),
    "long rows": (
        lambda: problem(looked_up(), data=(IDS, Y)),
        BadModel,
        r"2 of 4 rows of '0.weight'.*renorm_\(2, 0, 1\)",
    ),
    "all ignored": (lambda: problem(data=(X, torch.full((10,), -100))), BadData, "every target is ignored"),
}


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_gets_one_clear_line(what: str) -> None:
    make, error, words = REFUSED[what]
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def stateful() -> nn.Module:
    """Counts its calls in a buffer; fails when told to."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        net.calls += 1
        if net.fail:
            raise RuntimeError("as told")
        return net.drop(net.linear(x))

    return module_of(forward, linear=(3, 2), drop=nn.Dropout(0.5), calls=torch.zeros(()), fail=False)


@pytest.mark.parametrize("fail", [False, True])
def test_everything_is_put_back_also_after_an_error(fail: bool) -> None:
    model = stateful()
    problem = fl.Problem(model, "cross_entropy", (X, Y))
    model.train()
    model.drop.eval()
    model.linear(X).sum().backward()
    grad, hooks = model.linear.weight.grad.clone(), len(model.linear._forward_hooks)
    state = torch.random.get_rng_state()
    model.fail = fail
    report = fl.measure(fl.Lens(problem), "pass")
    assert (report["mls"].kind == "undefined") == fail
    assert not fail or "as told" in report["mls"].note
    assert model.training
    assert not model.drop.training
    assert float(model.calls) == 0
    assert torch.equal(model.linear.weight.grad, grad)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(model.linear._forward_hooks) == hooks
    assert not X.requires_grad


@pytest.mark.parametrize("newer", [False, True])
def test_float32_is_not_shortened_while_measuring(newer: bool) -> None:
    """In a process of its own: torch lets no one go back from the newer interface."""
    where, on, off = ("conv.fp32_precision", "'tf32'", "'ieee'") if newer else ("allow_tf32", "True", "False")
    matmul = "fp32_precision" if newer else "allow_tf32"
    program = f"""if True:
        import torch
        from flatlens.problem import measuring
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        cudnn.{where}, matmul.{matmul} = {on}, {on}
        for _ in range(2):
            with measuring(torch.nn.Linear(1, 1)):
                assert (cudnn.{where}, matmul.{matmul}) == ({off}, {off})
                with measuring(torch.nn.Linear(1, 1)):
                    assert (cudnn.{where}, matmul.{matmul}) == ({off}, {off})
            assert (cudnn.{where}, matmul.{matmul}) == ({on}, {on})
    """
    if newer and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("an older torch")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_measuring_leaves_a_nested_mode_alone() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).train()
    model[1].eval()
    with measuring(model):
        assert not model[0].training
    assert model[0].training
    assert not model[1].training


def same(data: object) -> dict[str, float]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    report = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", data)), "pass")
    return {f"{m}/{at}": e.value for (m, at), e in report.items() if e.kind != "undefined"}


def test_every_form_of_the_same_data_gives_the_same_numbers() -> None:
    truth = same((X, Y))
    dataset = TensorDataset(X, Y)
    forms = [
        (X.numpy(), Y.numpy()),
        dataset,
        DataLoader(dataset, batch_size=4, shuffle=True),
        DataLoader(dataset, batch_size=3, drop_last=True),
        DataLoader(dataset, batch_size=4, sampler=SubsetRandomSampler(range(10))),
        DataLoader(
            dataset, batch_size=4, collate_fn=lambda rows: [torch.stack(part) for part in zip(*rows, strict=True)]
        ),
    ]
    for form in forms:
        assert same(form) == pytest.approx(truth, rel=1e-12)


def test_forward_unwraps_what_a_model_is_fed() -> None:
    model = module_of(lambda net, pixels: type("Output", (), {"logits": net.linear(pixels)})(), linear=(3, 2))
    plain = fl.measure(fl.Lens(fl.Problem(model.linear, "cross_entropy", (X, Y))), "pass")
    by_dict = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", ({"pixels": X}, Y))), "pass")
    by_forward = fl.Problem(
        model, "cross_entropy", {"pixels": X, "labels": Y}, forward=lambda m, b: (m(pixels=b["pixels"]), b["labels"])
    )
    for report in (by_dict, fl.measure(fl.Lens(by_forward), "pass")):
        for name in ("mls", "interpolation_sharpness", "loss", "relative_flatness"):
            assert report[name].value == pytest.approx(plain[name].value, rel=1e-6)


def test_parameters_chooses_what_counts() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)

    def S(**options: object) -> float:
        return fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", (X, Y), **options)), "pass")[
            "interpolation_sharpness"
        ].value

    parts = [S(parameters=[name]) for name, _ in model.named_parameters()]
    assert S(parameters="all") == pytest.approx(sum(parts), rel=1e-6)
    assert S() == pytest.approx(sum(parts[1:]), rel=1e-6)


def test_half_types_are_measured_in_a_float32_copy() -> None:
    model = net().to(torch.bfloat16)
    report = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", (X, Y))), "pass")
    twin = net()
    twin.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    assert report["mls"].value == fl.measure(fl.Lens(fl.Problem(twin, "cross_entropy", (X, Y))), "pass")["mls"].value
    assert report.about["dtype"] == "float32"
    assert model.weight.dtype == torch.bfloat16


def test_a_network_that_writes_to_its_input() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    model, before = Doubling(3, 2), X.clone()
    report = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", (X, Y))), "pass")
    assert torch.equal(X, before)
    assert report["mls"].value == pytest.approx(2 * float(torch.linalg.matrix_norm(model.weight.detach(), 2)), rel=1e-6)


def test_attention_runs_on_the_backend_with_two_derivatives_where_two_are_taken():
    allowed = torch.backends.cuda
    before = allowed.flash_sdp_enabled(), allowed.mem_efficient_sdp_enabled(), allowed.math_sdp_enabled()
    seen = []

    def forward(net: nn.Module, x):
        seen.append((allowed.flash_sdp_enabled(), allowed.mem_efficient_sdp_enabled(), allowed.math_sdp_enabled()))
        q = net.first(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]

    net = module_of(forward, first=(3, 4))
    lens = fl.Lens(fl.Problem(net, "mse", (torch.randn(5, 3), torch.zeros(5, 4))))
    fl.measure(lens, "mls")
    seen.clear()
    fl.measure(lens, ["sharpness", "hessian_trace", "average_sharpness"])
    assert set(seen) == {(False, False, True)}
    assert (allowed.flash_sdp_enabled(), allowed.mem_efficient_sdp_enabled(), allowed.math_sdp_enabled()) == before


def test_a_complex_buffer_that_is_not_copied_is_fine() -> None:
    """A turn by an angle, which leaves lengths alone: the network's norm is that of its weight."""
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), Turning(), nn.Flatten())
    report = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", (X, Y))), ["mls"])
    assert report["mls"].value == pytest.approx(float(torch.linalg.matrix_norm(model[1].weight.detach(), 2)), rel=1e-6)


@pytest.mark.parametrize(("n", "units"), [(7, 25), (13, 3), (33, 3)])
def test_outputs_that_cancel_are_not_taken_for_coupled(n: int, units: int) -> None:
    """Two equal halves of opposite signs: the outputs are rounding, which differs between batches."""
    for seed in range(4):
        torch.manual_seed(seed)
        first, last = nn.Linear(20, 2 * units), nn.Linear(2 * units, 3, bias=False)
        with torch.no_grad():
            first.weight[units:], first.bias[units:] = first.weight[:units], first.bias[:units]
            last.weight[:, units:] = -last.weight[:, :units]
        fl.Problem(nn.Sequential(first, nn.ReLU(), last), "cross_entropy", (torch.randn(n, 20), torch.arange(n) % 3))


def test_coupled_outputs_that_cancel_are_refused() -> None:
    class Coupled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - super().forward(x) + 1e-2 * x.mean()

    with pytest.raises(BadModel, match="change with the other samples"):
        fl.Problem(Coupled(3, 2), "cross_entropy", (torch.randn(10, 3), torch.arange(10) % 2))


def on_nodes(edges: Tensor, mean: bool) -> nn.Module:
    """Each node sees its neighbours: by their indices, or by a matrix of weights between all of them."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(net.one(x))
        if mean:
            return net.two(h + h.mean(0))
        return net.two(h + torch.zeros_like(h).index_add(0, net.edges[1], h[net.edges[0]]))

    return module_of(forward, one=(3, 4), two=(4, 2), edges=edges)


@pytest.mark.parametrize("given_forward", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_nodes_that_see_each_other_are_one_sample(seed: int, mean: bool, given_forward: bool) -> None:
    torch.manual_seed(seed)
    n = int(torch.randint(3, 9, ()))
    x, y, train = torch.randn(n, 3).double(), torch.randint(2, (n,)), torch.rand(n) < 0.7
    train[0] = True
    nodes = on_nodes(torch.cat([torch.arange(n)[None], torch.randperm(n)[None]]), mean).double()
    forward = (lambda model, batch: (model(batch[0]), batch[1])) if given_forward else None
    with pytest.raises(BadModel, match=r"as one sample, x\[None\]") as caught:
        fl.Problem(nodes, "cross_entropy", (x, y), forward=forward)
    assert "\n" not in str(caught.value)

    def graph(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch[0][0])[None], batch[1]

    whole = fl.Problem(nodes, "cross_entropy", (x[None], y.masked_fill(~train, -100)[None]), forward=graph)
    report = fl.measure(fl.Lens(whole), ["loss", "hessian_trace(exact=True)"])
    risk, weights = nn.functional.cross_entropy(nodes(x)[train], y[train]), list(nodes.parameters())
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(risk, weights, create_graph=True)])
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(g, weights, retain_graph=True)]) for g in slope]
    assert report["loss"].value == pytest.approx(risk.item(), rel=1e-12)
    assert report["hessian_trace(exact=True)"].value == pytest.approx(float(torch.stack(rows).trace()), rel=1e-9)


def test_noise_in_forward_is_told_to_be_drawn_beforehand() -> None:
    with pytest.raises(BadModel, match="draw them beforehand, and give them with the data as an input"):
        fl.Problem(Noisy(3, 2), "cross_entropy", (X, Y))


@pytest.mark.parametrize(("n", "most"), [(64, 2.0), (255, 2.0), (1000, 1.5), (1500, 1.5)])
def test_the_data_are_run_once_and_a_half(n: int, most: float) -> None:
    rows = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            return super().forward(x)

    fl.Problem(Counting(3, 2), "cross_entropy", (torch.randn(n, 3), torch.arange(n) % 2))
    assert 1.4 * n <= sum(rows) <= most * n


def test_noise_in_a_rare_sample_is_told_as_noise() -> None:
    """No probe has it: the half that is run alone differs, and not because of the other samples."""

    class RarelyNoisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.where(x[:, :1] > 50, torch.rand(len(x), 1), 0.0)

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(40))
    probes = set(torch.linspace(0, 39, 8).round().long().tolist())
    x[next(i for i in order[:20].tolist() if i not in probes)] = 100.0
    with pytest.raises(BadModel, match="different outputs for the same batch twice"):
        fl.Problem(RarelyNoisy(3, 2), "cross_entropy", (x, torch.arange(40) % 2))
