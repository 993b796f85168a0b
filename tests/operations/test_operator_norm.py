"""The norm of a layer's map, against the matrix written out."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from builders import redrawn
from torch import Tensor, nn

from flatlens.operations.layers import LinearLayer, layer_of
from flatlens.operations.operator_norm import blocks_norm, operator_norm


def kernel_norm(layer: LinearLayer) -> float:
    return blocks_norm(layer_of(layer).matrix(layer.weight).detach().double()).value


def written_out(layer: LinearLayer, size: tuple[int, ...]) -> Tensor:
    """The columns A e_j = layer(e_j) - layer(0), in float64."""
    layer = copy.deepcopy(layer).double()
    n = math.prod(size)
    with torch.no_grad():
        units = torch.eye(n, dtype=torch.float64).reshape(n, *size)
        return (layer(units) - layer(torch.zeros(1, *size, dtype=torch.float64))).reshape(n, -1).T


CASES: list[tuple[LinearLayer, tuple[int, ...]]] = [
    (nn.Linear(7, 5), (7,)),
    (nn.Linear(7, 5), (3, 7)),
    (nn.Conv1d(3, 4, 3), (3, 5)),  # tiny: a matrix
    (nn.Conv1d(3, 4, 3), (3, 50)),
    (nn.Conv1d(8, 2, 5, stride=3, padding=2), (8, 40)),
    (nn.Conv1d(4, 8, 4, padding="same", groups=2), (4, 30)),
    (nn.Conv1d(4, 4, 3, padding=4, dilation=3, padding_mode="circular"), (4, 30)),
    (nn.Conv2d(3, 5, 3), (3, 9, 9)),
    (nn.Conv2d(3, 5, 3, padding=1, stride=2), (3, 10, 9)),
    (nn.Conv2d(3, 5, 1, stride=2), (3, 10, 10)),  # pixels that no window sees
    (nn.Conv2d(3, 5, (3, 5), padding="same"), (3, 9, 8)),
    (nn.Conv2d(3, 5, (2, 4), padding="same", dilation=(1, 3)), (3, 9, 12)),
    (nn.Conv2d(3, 5, 3, padding="valid"), (3, 9, 8)),
    (nn.Conv2d(6, 9, 3, padding=1, groups=3), (6, 7, 7)),
    (nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 7, 7)),  # depthwise
    (nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (3, 8, 8)),
    (nn.Conv2d(3, 5, 3, padding=2, padding_mode="reflect"), (3, 8, 7)),
    (nn.Conv2d(3, 5, 5, padding=(2, 1), padding_mode="replicate"), (3, 8, 7)),
    (nn.Conv2d(3, 5, 3, padding="same", padding_mode="reflect"), (3, 8, 7)),
    (nn.Conv2d(3, 5, 3, padding=2, dilation=2, stride=(2, 1)), (3, 9, 8)),
    (nn.Conv2d(16, 2, 8), (16, 8, 8)),  # many inputs, two outputs
    (nn.Conv3d(2, 3, 2, padding=1), (2, 4, 5, 4)),
    (nn.Conv3d(2, 4, 3, stride=2, padding=1, groups=2, padding_mode="replicate"), (2, 5, 6, 5)),
]


@pytest.mark.parametrize(("layer", "size"), CASES, ids=lambda case: str(case).replace(" ", ""))
def test_it_is_the_largest_singular_value(layer: LinearLayer, size: tuple[int, ...]) -> None:
    redrawn(layer)
    truth = float(torch.linalg.matrix_norm(written_out(layer, size), 2))
    assert operator_norm(layer, size).value == pytest.approx(truth, rel=1e-9, abs=0)
    assert operator_norm(layer, size).value <= truth * (1 + 1e-13)


LARGE: list[tuple[LinearLayer, tuple[int, ...]]] = [
    (nn.Conv2d(90, 90, 3, padding=1), (90, 4, 4)),
    (nn.Conv2d(80, 100, 3, padding=1, stride=2), (80, 5, 5)),
    (nn.Conv2d(150, 150, 3, padding=1, groups=2), (150, 3, 3)),
    (nn.Conv2d(90, 100, 3, padding=1), (90, 1, 1)),  # the kernel's centre alone: a matrix
    (nn.Conv2d(90, 100, 3, padding=1, padding_mode="circular"), (90, 2, 2)),  # a pixel is read at several places
    (nn.Conv1d(150, 151, 3, padding=1), (150, 9)),
]


@pytest.mark.parametrize(("layer", "size"), LARGE, ids=lambda case: str(case).replace(" ", ""))
@pytest.mark.parametrize("alike", [False, True])
def test_a_search_in_float32_ends_in_float64(layer: LinearLayer, size: tuple[int, ...], alike: bool) -> None:
    """Also where the largest singular values nearly coincide: channels of one kernel each, apart by a millionth."""
    redrawn(layer)
    assert layer.weight.numel() > 2**16
    if alike:
        with torch.no_grad():
            layer.weight *= 1e-3
            for channel in range(min(layer.weight.shape[:2])):
                layer.weight[channel, channel].flatten()[-2 if layer.weight.ndim == 3 else 4] += 1 - 1e-6 * channel
    truth = float(torch.linalg.matrix_norm(written_out(layer, size), 2))
    assert operator_norm(layer, size).value == pytest.approx(truth, rel=1e-9, abs=0)
    assert operator_norm(layer, size).value <= truth * (1 + 1e-13)


@pytest.mark.parametrize("shape", [(600, 700), (1030, 1100)])
@pytest.mark.parametrize("gap", [1.0, 1e-6, 0.0])
def test_the_norm_of_a_large_matrix(shape: tuple[int, int], gap: float) -> None:
    """From its Gram matrix in float32, and without it; the two largest singular values may nearly coincide."""
    layer = nn.Linear(*shape, bias=False).double()
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(k, 9, generator=generator).double()).Q for k in reversed(shape))
    sizes = torch.tensor([3 + gap, 3.0, *[1.0] * 7], dtype=torch.float64)
    layer.weight.data = 1e-3 * (left * sizes) @ right.T
    assert kernel_norm(layer) == pytest.approx(1e-3 * (3 + gap), rel=1e-10)


def test_a_norm_says_that_its_search_stopped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = redrawn(nn.Conv1d(1, 1, 3, padding=1))
    whole = operator_norm(layer, (1, 500))
    assert whole.converged
    monkeypatch.setattr("flatlens.operations.operator_norm._MOST", 15)
    part = operator_norm(layer, (1, 500))
    assert not part.converged
    assert part.value < whole.value


@pytest.mark.parametrize("groups", [1, 3])
def test_the_kernels_norm_is_that_of_one_window(groups: int) -> None:
    """A convolution whose window is the whole input is its kernel as a block-diagonal matrix."""
    layer = redrawn(nn.Conv2d(6, 9, 3, groups=groups))
    assert kernel_norm(layer) == pytest.approx(operator_norm(layer, (6, 3, 3)).value, rel=1e-12)
    assert kernel_norm(layer) < operator_norm(layer, (6, 9, 9)).value
    blocks = layer.weight.detach().double().reshape(groups, 9 // groups, -1)
    assert kernel_norm(layer) == pytest.approx(float(torch.linalg.svdvals(torch.block_diag(*blocks))[0]), rel=1e-12)


def test_a_circular_convolution_by_its_fourier_transform() -> None:
    layer = redrawn(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"))
    W = torch.fft.fft2(layer.weight.detach().double(), s=(32, 32))
    truth = float(torch.linalg.svdvals(W.permute(2, 3, 0, 1)).max())
    assert operator_norm(layer, (4, 32, 32)).value == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scale(scale: float) -> None:
    layer = redrawn(nn.Conv1d(3, 4, 3).double())
    norm = operator_norm(layer, (3, 50)).value
    layer.weight.data *= scale
    assert operator_norm(layer, (3, 50)).value / scale == pytest.approx(norm, rel=1e-12)


def test_zero_maps() -> None:
    layer = nn.Conv2d(3, 5, 3)
    nn.init.zeros_(layer.weight)
    assert operator_norm(layer, (3, 9, 9)).value == 0.0
    assert kernel_norm(layer) == 0.0
    unmet = redrawn(nn.Conv2d(100, 100, 3, padding=1))
    unmet.weight.data[:, :, 1, 1] = 0  # of a single pixel a padded window sees the centre alone
    assert operator_norm(unmet, (100, 1, 1)).value == 0.0
    assert kernel_norm(unmet) > 0


def test_the_layer_and_the_random_state_are_left_alone() -> None:
    layer = redrawn(nn.Conv2d(3, 5, 3, padding=1))
    layer.register_forward_hook(lambda *_: pytest.fail("the module itself was called"))
    before, state = layer.weight.detach().clone(), torch.get_rng_state()
    with torch.no_grad():
        norm = operator_norm(layer, (3, 9, 9)).value
    with torch.inference_mode():
        assert operator_norm(layer, (3, 9, 9)).value == norm
    assert operator_norm(layer, torch.Size((3, 9, 9))).value == norm
    assert layer.weight.dtype == torch.float32
    assert layer.weight.requires_grad
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
