"""Networks that were once measured wrong without a word, each by itself: right now, or undefined with the reason."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from builders import normal, seeded
from drawn_layers import Equalised, LowRank, RarelySquaredReLU, Standardised, Standardised2d
from judged import Verdict, changed, judged, snapshot, subject
from networks import SquaredReLU, module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import flatlens as fl
from flatlens.errors import BadData, BadLoss, FlatlensError
from flatlens.grams import LayerGrams
from flatlens.measures import mean
from flatlens.measures.definition import per_sample


def made(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """The same network each time."""

    def anew() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make().double()

    return anew


def verdict(
    make: Callable[[], nn.Module], x: Tensor, second: str = "", outputs: int = 3, chunk: int = 0, seed: int = 0
) -> Verdict:
    y = torch.randint(0, outputs, (len(x),), generator=seeded(1))
    return judged(subject(made(make, seed), x, y, chunk=chunk), second)


def measured(*given: object, names: list[str] | str | None, **options: object) -> fl.Report | str:
    """The report of a problem, or the line in which it is refused."""
    try:
        return fl.measure(fl.Lens(fl.Problem(*given, **options)), names)
    except FlatlensError as error:
        return str(error)


def outlier(n: int, at: int, size: float = 10.0) -> Tensor:
    """Entries below 2.6, but one."""
    x = normal(n, 4)
    x = torch.where(x.abs() > 2.6, x / 3, x)
    x[at, 0] = size
    return x


# 1. the input side


def test_an_input_clamped_at_one_sample() -> None:
    found = verdict(lambda: module_of(lambda s, x: s.a(x.clamp(-3, 3)), a=(4, 3)), outlier(100, 50))
    assert found.faults == []


def test_an_input_all_of_which_is_clamped_at_one_sample() -> None:
    x = outlier(100, 50)
    x[50] = 10
    make = made(lambda: module_of(lambda s, x: s.a(x.clamp(-3, 3)), a=(4, 3)))
    mls = fl.measure(fl.Lens(fl.Problem(make(), "cross_entropy", (x, torch.zeros(100).long()))), "mls")["mls"]
    assert mls.kind == "undefined" or float(mls.samples[50]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_an_input_clamped_on_plain_samples(seed: int) -> None:
    found = verdict(lambda: module_of(lambda s, x: s.a(x.clamp(-3, 3)), a=(4, 3)), normal(300, 4, seed=seed))
    assert found.faults == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heavy", [False, True])
def test_an_input_through_hardtanh(heavy: bool, seed: int) -> None:
    x = normal(300, 4, seed=seed)
    if heavy:  # Student's t with 3 degrees of freedom
        x = x / (normal(300, 1, 3, seed=seed + 9).square().mean(2)).sqrt()
    assert verdict(lambda: nn.Sequential(nn.Hardtanh(-3, 3), nn.Linear(4, 3)), x).faults == []


def routed() -> nn.Module:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        return torch.where(x[:, 3:] == 0, s.e0(x), s.e1(x))

    return module_of(forward, e0=(4, 3), e1=(4, 3))


@pytest.mark.parametrize("seed", range(4))
def test_an_input_routed_to_another_layer_now_and_then(seed: int) -> None:
    x = normal(200, 4)
    x[:, 3] = (torch.rand(200, generator=seeded(seed)) < 0.09).double()
    assert verdict(routed, x).faults == []


def test_a_skip_that_one_outlier_opens() -> None:
    def make() -> nn.Module:
        return module_of(lambda s, x: s.a(x) + s.b(F.softshrink(x, 3)), a=(4, 3), b=(4, 3))

    assert verdict(make, outlier(100, 50)).faults == []


def test_a_layer_called_again_in_a_rare_branch() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        return s.o(torch.where((x > 5).any(1, keepdim=True), s.a(F.relu(s.a(x))), s.a(x)))

    def make() -> nn.Module:
        return module_of(forward, a=(4, 4), o=(4, 3))

    assert verdict(make, outlier(100, 50)).faults == []


# 2. a first layer that is not its weight


def hooked() -> nn.Module:
    layer = nn.Linear(4, 5)
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


FIRST = {"low rank": LowRank, "equalised": Equalised, "standardised": Standardised}


@pytest.mark.parametrize("kind", [*FIRST, "hook"])
def test_a_first_layer_with_a_forward_of_its_own(kind: str) -> None:
    first = hooked if kind == "hook" else lambda: FIRST[kind](4, 5)
    assert verdict(lambda: nn.Sequential(first(), nn.ReLU(), nn.Linear(5, 3)), normal(30, 4), "layers").faults == []


def test_a_first_convolution_with_standardised_weights() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Standardised2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    assert verdict(make, normal(12, 2, 4, 4)).faults == []


# 3. whose weight is it


def test_a_weight_that_also_acts_in_a_rare_branch() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        return s.o(F.relu(s.a(x))) + F.linear(F.relu(s.b(x) - 4), s.a.weight[:3, :4])

    x = outlier(200, 133, 30.0)

    def make() -> nn.Module:
        return module_of(forward, a=(4, 5), b=(4, 4), o=(5, 3))

    active = (made(make)().b(x) > 4).any(1)
    assert active.sum() == 1
    assert verdict(make, x, "layers").faults == []


# 4. where is the network affine


def test_curvature_at_one_sample() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = s.a(x)
        return s.o(F.relu(h) + F.relu(h - 4) ** 2)

    x = outlier(300, 133, 60.0)

    def make() -> nn.Module:
        return module_of(forward, a=(4, 5), o=(5, 3))

    assert (made(make)().a(x) > 4).any(1).sum() == 1
    for second in ("trace", "layers", "product"):
        assert verdict(make, x, second).faults == []


@pytest.mark.parametrize("kind", [SquaredReLU, RarelySquaredReLU])
def test_a_relu_by_name_that_squares(kind: type[nn.Module]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), kind(), nn.Linear(5, 3))

    for second in ("trace", "layers", "product"):
        assert verdict(make, outlier(100, 50, 60.0), second).faults == []


# 5. PReLU where a chunk has as many samples as outputs


@pytest.mark.parametrize(("n", "chunk"), [(10, 0), (26, 16), (20, 10)])
def test_prelu_with_as_many_samples_as_outputs(n: int, chunk: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 10))

    found = verdict(make, normal(n, 4), outputs=10, chunk=chunk)
    assert found.faults == []


class WronglyBatched(torch.autograd.Function):
    """Twice its input; three times where torch.vmap takes several at once: a wrong rule of an extension."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: object, slope: Tensor) -> Tensor:
        return WronglyBatched.apply(slope)

    @staticmethod
    def vmap(info: object, axes: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return 3 * x, axes[0]


def test_a_wrong_rule_for_batches_of_backward_passes() -> None:
    found = verdict(
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), module_of(lambda net, x: WronglyBatched.apply(x)), nn.Linear(6, 3)
        ),
        normal(20, 4),
    )
    assert found.answered
    assert not found.faults


# 6. complex parameters


def test_complex_parameters_count_whole_or_not_at_all() -> None:
    # The real part of a complex linear map.
    x, y = normal(20, 4), torch.randint(0, 3, (20,), generator=seeded())
    net = module_of(
        lambda net, x: (x @ net.w.T).abs() + net.b,
        w=nn.Parameter(torch.randn(3, 4, dtype=torch.complex128, generator=seeded())),
        b=nn.Parameter(torch.zeros(3, dtype=torch.float64)),
    )
    found = measured(net, "cross_entropy", (x, y), names="interpolation_sharpness")
    if isinstance(found, str):
        assert "complex" in found
        return
    estimate = found["interpolation_sharpness"]
    truth = 3 * (float(x.square().sum(1).mean()) + 1)  # |d|z|/dz| = 1 in the plane, times x, and the bias
    assert estimate.kind == "undefined" or estimate.value == pytest.approx(truth, rel=1e-8)


# 7. weight norm


@pytest.mark.parametrize("second", ["trace", "layers", "product"])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_curvature_through_weight_norm(norm: Callable[[nn.Module], nn.Module], second: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))

    assert verdict(make, normal(20, 4), second).faults == []


# 8. gradients scaled by how often an id is met


def test_an_embedding_scaled_by_frequency_does_not_depend_on_chunks() -> None:
    ids, y = torch.randint(0, 5, (20, 3), generator=seeded()), torch.randint(0, 3, (20,), generator=seeded())
    make = made(lambda: nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 3)))
    names = ["interpolation_sharpness", "hessian_trace(exact=True)"]
    one, other = (measured(make(), "cross_entropy", (ids, y), names=names, memory=memory) for memory in ("1GiB", 1))
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    for name in names:
        assert one[name].kind == other[name].kind
        assert one[name].kind == "undefined" or one[name].value == pytest.approx(other[name].value, rel=1e-10)


# 9. losses that couple samples


def balanced(f: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=f.shape[1]).to(f)
    return F.cross_entropy(f, y, reduction="none") / counts[y]


def in_turn(f: Tensor, y: Tensor) -> Tensor:
    return (f - torch.cat([f[:1].detach(), f[:-1]])).square().sum(1)


@pytest.mark.parametrize("loss", [balanced, in_turn])
def test_a_loss_that_couples_samples_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    y = torch.randint(0, 3, (30,), generator=seeded())
    with pytest.raises(BadLoss):
        fl.Problem(nn.Linear(4, 3).double(), loss, (normal(30, 4), y))


# 10. targets that would broadcast


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.SmoothL1Loss(), nn.PoissonNLLLoss(), nn.MSELoss()])
def test_whole_numbers_to_regress_on(loss: nn.Module) -> None:
    net, x = made(lambda: nn.Linear(4, 1))(), normal(12, 4)
    y = torch.randint(0, 4, (12,), generator=seeded())
    found = measured(net, loss, (x, y), names="loss")
    if isinstance(found, str):
        assert "target" in found
        return
    with torch.no_grad():
        truth = sum(float(loss(net(x[i : i + 1]), y[i : i + 1, None].double())) for i in range(12)) / 12
    assert found["loss"].value == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("loss", ["mse", nn.L1Loss()])
def test_a_loader_with_too_few_targets_is_refused(loss: object) -> None:
    loader = torch.utils.data.DataLoader([(normal(6, 4), normal(1))], batch_size=None)
    with pytest.raises((BadData, BadLoss)):
        fl.Problem(made(lambda: nn.Linear(4, 1))(), loss, loader)


# 11. data that end early the second time


def test_a_dataset_that_ends_early_is_refused() -> None:
    class Ending(IterableDataset[tuple[Tensor, Tensor]]):
        """Whole while the problem is made, then a fifth of it."""

        size = 320

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            x = normal(320, 4)
            return iter([(x[i], torch.tensor(i % 3)) for i in range(self.size)])

    data = Ending()
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    problem = fl.Problem(made(lambda: nn.Linear(4, 3))(), "cross_entropy", loader)
    assert problem.n == 320
    data.size = 64
    with pytest.raises(BadData):
        fl.measure(fl.Lens(problem), "loss")


# 12. probabilities below zero


def test_negative_probabilities_are_refused() -> None:
    with pytest.raises((BadData, BadLoss)):
        fl.Problem(made(lambda: nn.Linear(4, 3))(), "cross_entropy", (normal(9, 4), normal(9, 3)))


# 13. overflow


@pytest.mark.parametrize("size", [1e20, 1e29, 1e38])
def test_nothing_that_overflows_is_exact(size: float) -> None:
    x, y = (normal(9, 4) * size).float(), torch.zeros(9, 3)
    net = made(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))().float()
    report = measured(net, "half_squared_error", (x, y), names=None)
    if isinstance(report, str):
        assert "\n" not in report
        return
    for key, estimate in report.items():
        assert estimate.kind == "undefined" or estimate.value == estimate.value, (key, estimate)


# beside these: an error while a pass is under way


def test_a_measure_that_raises_leaves_the_model_as_it_was() -> None:
    @per_sample(id="own", family="compression", symbol="x", source="nowhere", unit="1", reduce=mean, place="input",
                needs={"G"}, answer="input", invariant_under=frozenset())  # fmt: skip
    def raising(g: LayerGrams) -> Tensor:
        """Cannot be had."""
        raise ValueError("no")

    net = made(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))().train()
    before = snapshot(net)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (normal(20, 4), torch.arange(20) % 3), memory=1))
    assert "ValueError: no" in fl.measure(lens, [raising])["raising"].note
    gc.collect()
    assert list(changed(before, snapshot(net))) == []
