"""The variation of the input-output Jacobian in a ball around every sample: a lower bound by search, and a certificate.

The certified upper bound: the Jacobian of a chain f = W_L a(... a(W_1 x + b_1)) + b_L is W_L D_{L-1} ... D_1 W_1, D_l
= diag(a'(z_l)). Intervals over a ball are carried through the chain: first of z_l, then of the activations' slopes,
then of each entry of dz_l/dx and df/dh_l. They are in float64, and each is widened by `MARGIN` times the absolute sum
of the terms added: enough for the rounding of sums of about 10^5 terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from flatlens.errors import one_line
from flatlens.estimate import Progress
from flatlens.grams.data_pass import random_signs
from flatlens.operations.table import ARITHMETIC, Activation, Trace, hooked
from flatlens.perturbation.inputs import ROUNDINGS, Inputs, Refused, in_float64, inputs_of, require_seen
from flatlens.problem import Problem
from flatlens.problem.ranks import ALONE

POOL = 128  #: points drawn in a ball; all their pairs are compared
FEW, COVERING = 3, 512  #: up to FEW dimensions, COVERING points come near every kink
MANY, SPARSE = 256, 16  #: above MANY dimensions random pairs differ alike: SPARSE points, as moving them finds far more
INSIDE = 1 - 1e-6  #: a kink that only touches the ball's boundary does not count
AROUND = 4  #: pairs of points near each end of a pair that show the rounding error of its Jacobian
NUDGE = 4  #: their distance, in roundings of the input; as a share of the ball's radius at most NUDGE / ROUNDINGS
SHORTEST = 1e-3  #: step, in units of the ball's radius, below which a search starts again with long steps


def found_variation(
    problem: Problem,
    model: nn.Module,
    delta: float,
    *,
    restarts: int,
    steps: int,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Tensor:
    """Return lower bounds of sup ||Jf(u) - Jf(v)||_2 over the balls of radius `delta` around the samples, (n,) float64.

    sharpening Eq. (5), for the Jacobian, in output / input; `delta` is in the input's units. The random points with the
    most different Jacobians make `restarts` disjoint pairs, and each pair is moved uphill `steps` times. The rounding
    error of its Jacobians is taken off the difference. Raises `Refused`.
    """
    parts: list[Tensor] = []
    with problem.measuring(model):
        most = partial(pool_size, restarts=restarts)
        for inputs in inputs_of(problem, model, most, lambda k: k, what="local variation", progress=progress):
            norm = float(inputs.x.norm(dim=1).max())
            if norm > 0:
                require_seen(f"delta={delta!r}", delta / norm, problem.dtype)
            parts.append(_Pairs(inputs, delta, restarts, generator).climb(steps).cpu())
    return torch.cat(parts)


@final
class _Pairs:
    """Pairs of points in each sample's ball, in units of its radius, moved so that their Jacobians differ more."""

    def __init__(self, inputs: Inputs, delta: float, restarts: int, generator: torch.Generator) -> None:
        self.inputs, self.restarts, self.generator = inputs, restarts, generator
        rounding = torch.finfo(inputs.x.dtype).eps / 2 * (inputs.x.to(torch.float64).norm(dim=1) + delta)
        self.delta: Tensor = (delta * INSIDE - rounding)[:, None, None]  #: rounded points stay in the ball
        # random points of the unit ball in opposite pairs, half of them on its rim, (n, pool, M)
        n, width, pairs = *inputs.x.shape, pool_size(inputs.x.shape[1], restarts) // 2
        directions = unit(torch.randn(n, pairs, width, generator=generator, dtype=torch.float64))[1]
        radii = torch.rand(n, pairs, 1, generator=generator, dtype=torch.float64)
        radii[:, ::2] = 1.0
        pool = torch.cat([radii * directions, -radii * directions], 1).to(inputs.x.device)
        J = inputs.jacobians(self._at(pool)).reshape(*pool.shape[:2], -1, pool.shape[2])
        self.scale = J.flatten(2).norm(dim=2).max(1, keepdim=True).values
        self.rounding = ROUNDINGS * torch.finfo(inputs.x.dtype).eps * self.scale
        ends = farthest_pairs(J.flatten(2), restarts, self.rounding)
        rows = torch.arange(len(pool), device=pool.device)[:, None]
        self.w = [pool[rows, end] for end in ends]  # (n, restarts, M) each
        self.J = [J[rows, end] for end in ends]
        self.top = largest_singular(self.J[0] - self.J[1])
        self.length = [torch.ones_like(self.top[0]) for _ in ends]
        self.stuck = [torch.zeros_like(self.top[0], dtype=torch.bool) for _ in ends]

    def climb(self, steps: int) -> Tensor:
        """Return the largest norm found, less its rounding error, (n,)."""
        for _ in range(steps):
            for end in (0, 1):
                self._move(end)
        found = torch.where(self.top[0] > self.rounding, self.top[0], 0.0)
        return (found - self._lost()).clamp(min=0).max(1).values

    def _lost(self) -> Tensor:
        """Return the rounding error of each pair's difference, (n, restarts).

        That of a Jacobian is at least one rounding of its length. It is larger where derivatives cancel inside the
        network. Two things show it: second differences over the shortest moves, as there is no room for a curvature,
        and J^T u from one backward pass beside that from the rows of J, as in the certificate of `grams`.
        """
        eps, generator = torch.finfo(self.inputs.x.dtype).eps, torch.Generator().manual_seed(0)
        J = torch.cat(self.J, 1)
        points = self._at(torch.cat(self.w, 1))
        error = eps * J.flatten(2).norm(dim=2)
        for _ in range(AROUND):
            d = NUDGE * eps * points.abs() * random_signs(points.shape, points, generator)
            ahead, behind = (self.inputs.jacobians(points + s * d).reshape(J.shape) for s in (1, -1))
            error = torch.maximum(error, ((ahead + behind) / 2 - J).flatten(2).norm(dim=2))
            u = torch.randn(J.shape[:3], generator=generator).to(J)  # of float32, which the network's dtype holds
            pulled = self.inputs.pulled_back(points, u.flatten(0, 1)).reshape(*J.shape[:2], -1)
            apart = ((u[:, :, None] @ J)[:, :, 0] - pulled).norm(dim=2)
            error = torch.maximum(error, apart.amax(1, keepdim=True))  # of all ends: it sees no kinks between points
        ends = torch.stack(error.chunk(2, 1))
        return 2 * ends.sum(0)  # the largest of many differences has the largest rounding, too

    def _move(self, end: int) -> None:
        """Move one end of each pair if the norm grows; steps grow after success and shrink after failure."""
        sign, other, w = 1 - 2 * end, self.J[1 - end], self.w[end]
        # uphill; in a random direction if no slope shows or the last uphill step failed, from the ball's diameter down
        norm, uphill = unit(sign * self._slope(end))
        informed = (norm > self.rounding) & ~self.stuck[end]
        directions = unit(torch.randn(w.shape, generator=self.generator, dtype=torch.float64))[1]
        lengths = 2 * 4.0 ** (-4 * torch.rand(*w.shape[:2], 1, generator=self.generator, dtype=torch.float64))
        step = torch.where(informed[..., None], self.length[end][..., None] * uphill, (lengths * directions).to(w))
        w = w + step
        w = w / w.norm(dim=2, keepdim=True).clamp(min=1)
        # kept where the difference of the Jacobians is larger there
        J = self.inputs.jacobians(self._at(w)).reshape(other.shape)
        top = largest_singular(sign * (J - other))
        better = top[0] > self.top[0] + self.rounding
        self.w[end], self.J[end] = _chosen(better, w, self.w[end]), _chosen(better, J, self.J[end])
        self.top = tuple(_chosen(better, new, old) for new, old in zip(top, self.top, strict=True))
        length = self.length[end] * torch.where(informed, torch.where(better, 1.5, 0.5), 1.0)
        self.length[end] = torch.where(length < SHORTEST, 1.0, length.clamp(max=1))
        self.stuck[end] = informed & ~better

    def _slope(self, end: int) -> Tensor:
        """Return the gradient of s^T J t at one end, (n, restarts, M), up to a factor > 0.

        s and t are the top singular vectors. The derivative of s^T J t is that of J^T s along t. It is taken as a
        difference over part of the next step. This sees the kinks of piecewise linear networks, whose second derivative
        is 0 elsewhere.
        """
        _, s, t = self.top
        apart = self.length[end][..., None] * t / 4
        points = torch.cat([self.w[end] + apart, self.w[end] - apart], 1)
        ahead, behind = self.inputs.pulled_back(self._at(points), s.repeat(1, 2, 1).flatten(0, 1)).reshape(
            len(s), 2, *t.shape[1:]).unbind(1)  # fmt: skip
        return ahead - behind

    def _at(self, w: Tensor) -> Tensor:
        """Return the inputs at (n, k, M) in units of the ball, (n k, M)."""
        points = self.inputs.x[:, None].to(torch.float64) + self.delta * w
        return points.flatten(0, 1).to(self.inputs.x.dtype)


def pool_size(width: int, restarts: int) -> int:
    """Return the number of points to draw in each ball."""
    return max(COVERING if width <= FEW else SPARSE if width > MANY else POOL, 4 * restarts)


def farthest_pairs(points: Tensor, count: int, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices, (n, count) each, of disjoint far pairs in each set (n, k, D); the first within `rounding`."""
    centred = points - points.mean(1, keepdim=True)  # less cancellation in the distances
    far = torch.cdist(centred, centred, compute_mode="use_mm_for_euclid_dist")
    rows, pairs = torch.arange(len(far), device=far.device), []
    for _ in range(count):
        alike = far.flatten(1) >= far.flatten(1).max(1, keepdim=True).values - rounding
        flat = alike.to(torch.uint8).argmax(1)
        pairs.append((flat // far.shape[1], flat % far.shape[1]))
        for end in pairs[-1]:
            far[rows, end], far[rows, :, end] = -1.0, -1.0
    return torch.stack([a for a, _ in pairs], 1), torch.stack([b for _, b in pairs], 1)


def largest_singular(D: Tensor) -> tuple[Tensor, ...]:
    """Return (sigma, s, t): the largest singular value of matrices (..., N, M) and its vectors, s^T D t = sigma."""
    A = D if D.shape[-2] <= D.shape[-1] else D.mT
    s = torch.linalg.eigh(A @ A.mT).eigenvectors[..., -1]
    sigma, t = unit((s[..., None, :] @ A)[..., 0, :])
    return (sigma, s, t) if A is D else (sigma, t, s)


def unit(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (norms, vectors (..., M) of norm 1); 0 stays 0."""
    norm = v.norm(dim=-1)
    return norm, v / torch.where(norm > 0, norm, 1.0)[..., None]


def _chosen(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the new value where it is better, by pair (n, restarts)."""
    return torch.where(better.reshape(better.shape + (1,) * (new.ndim - 2)), new, old)


AGREEMENT = 1e-7  #: allowed difference of the chain's outputs from the network's, both in float64


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain f(x) = W_L a_{L-1}( ... a_1(W_1 x + b_1) ... ) + b_L of flat x, in float64."""

    maps: list[tuple[Tensor, Tensor]]  #: (W_l (m_l, m_{l-1}), b_l (m_l,))
    activations: list[Activation]  #: one fewer than maps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (n, N) of flat inputs (n, M)."""
        for (W, b), between in zip(self.maps, self.activations, strict=False):
            x = between.value(x @ W.mT + b)
        return x @ self.maps[-1][0].mT + self.maps[-1][1]


def read_chain(problem: Problem, model: nn.Module) -> Chain:
    """Return the network as a chain, from a symbolic trace of a float64 copy, or raise `Refused` with the reason."""
    exact, x = in_float64(problem, model, "a certified variation")
    try:
        chain = _Reader(exact, problem.memory).read(x[:1])
        with torch.no_grad():
            f = exact(x).reshape(len(x), -1)
            apart = float((chain(x.flatten(1)) - f).abs().max())
    except Refused:
        raise
    except Exception as error:  # the network's own forward() may raise anything under tracing
        raise Refused(f"torch.fx cannot read the network ({one_line(error, 120)})") from error
    if apart > AGREEMENT * (1 + float(f.abs().max())):
        raise Refused(f"the chain read from the network gives other outputs (by {apart:.1g})")
    return chain


class _Reader(Trace):
    """A run of the graph that is cut at every activation: its input is kept, and a leaf tensor replaces its output."""

    def __init__(self, model: nn.Module, memory: int) -> None:
        super().__init__(model)
        self.memory = memory
        self.valueless = self.without_values(constants=True)
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.activations: list[Activation] = []
        last: fx.Node | None = None
        for node in self.nodes:
            if node in self.valueless:
                continue
            on = [used for used in node.all_input_nodes if used not in self.valueless]
            if last is not None and (on != [last] or (node.op == "output" and node.args[0] is not last)):
                raise Refused(f"{self.called(node)} joins branches: only a chain of layers is bounded")
            last = node

    def read(self, x: Tensor) -> Chain:
        """Return all matrices, from the derivative of one batch as large as the widest layer: sample k gives row k."""
        self._cut(x)
        widths = [leaf[0].numel() for leaf in self.after], [z[0].numel() for z in self.before]
        numbers = sum(m * d for m, d in zip(*widths, strict=True))
        widest = max(widths[1])
        if 8 * (numbers + 4 * widest * sum(map(sum, widths))) > self.memory // 2:
            raise Refused(f"its maps as matrices, {numbers:.2g} numbers, do not fit in the problem's memory")
        self._cut(torch.zeros_like(x).expand(widest, *x.shape[1:]))
        rows = [z.reshape(widest, -1).diagonal().sum() for z in self.before]
        slopes = torch.autograd.grad(rows, self.after)
        maps = [
            (slope.reshape(widest, -1)[: z[0].numel()], z[0].detach().flatten())
            for slope, z in zip(slopes, self.before, strict=True)
        ]
        return Chain(maps, self.activations)

    def _cut(self, x: Tensor) -> None:
        self.before, self.after, self.activations = [], [x.detach().requires_grad_()], []
        self.before.append(self.run(self.after[0].clone()))
        if any(len(z) != len(x) for z in self.before):
            raise Refused("an operation changes the number of rows: each sample must stay one row")

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation; cut the graph at an activation."""
        if not n.op.startswith("call") or n in self.valueless:
            return super().run_node(n)
        what, found = self.what(n), self.operation(n)
        if found is None and isinstance(what, nn.Module) and hooked(what):
            raise Refused(f"{self.called(n)} has forward hooks: it may give other outputs than its type says")
        arguments, options = self.fetch_args_kwargs_from_env(n)
        known = None if found is None else found.activation_of(what, arguments[1:], options)
        if known is not None:
            self.before.append(arguments[0] if arguments else options["input"])
            self.after.append(torch.zeros_like(self.before[-1]).requires_grad_())
            self.activations.append(known)
            return self.after[-1].clone()
        # an operation is affine in its first argument, arithmetic (without options) in each of its terms or factors
        if found is not None and found.affine:
            carried = [at for at, end in enumerate(n.args) if isinstance(end, fx.Node) and end not in self.valueless]
            arithmetic = found.name in ARITHMETIC
            odd = arithmetic and (len(n.args) != 2 or n.kwargs)  # for example, with rounding_mode
            if not odd and (carried == [0] or (carried == [1] and arithmetic and found.role != "quotient")):
                return super().run_node(n)
        raise Refused(f"{self.called(n)} is neither affine nor an activation whose slopes are bounded here")


MARGIN = 1e-11  #: relative to the sum of the absolute values of a sum's terms


@dataclass(frozen=True, eq=False)
class Box:
    """Matrices (n, r, c) with entries within `radius` of `centre`, and with spectral norms up to `cap`, (n,)."""

    centre: Tensor
    radius: Tensor
    cap: Tensor

    @classmethod
    def of(cls, W: Tensor, n: int) -> Box:
        """Return one matrix, repeated for each of n samples."""
        return cls(W.expand(n, *W.shape), torch.zeros_like(W).expand(n, *W.shape), norms(W[None]).expand(n))

    @property
    def largest(self) -> Tensor:
        """Return an upper bound of each entry's absolute value."""
        return self.centre.abs() + self.radius

    def times(self, low: Tensor, high: Tensor) -> Box:
        """Return the box with row k times a number in [low_k, high_k], (n, r, 1) each; or column k, for (n, 1, c)."""
        middle, spread = (high + low) / 2, (high - low) / 2
        most = torch.maximum(low.abs(), high.abs()).flatten(1).max(1).values
        return Box(self.centre * middle, self.radius * middle.abs() + self.largest * spread, self.cap * most)

    def before(self, W: Tensor) -> Box:
        """Return W times the box."""
        return Box(W @ self.centre, W.abs() @ self._blurred, (1 + MARGIN) * norms(W[None]) * self.norm())

    def after(self, W: Tensor) -> Box:
        """Return the box times W."""
        return Box(self.centre @ W, self._blurred @ W.abs(), (1 + MARGIN) * norms(W[None]) * self.norm())

    @property
    def _blurred(self) -> Tensor:
        """Return the radius, widened by the rounding of a product."""
        return self.radius + MARGIN * self.centre.abs()

    def norm(self) -> Tensor:
        """Return an upper bound of the spectral norms in the box, (n,)."""
        entrywise = torch.minimum(norms(self.centre) + norms(self.radius), norms(self.largest))
        return torch.minimum(entrywise, self.cap)


def certified_variation(
    problem: Problem, model: nn.Module, delta: float, *, progress: Progress | None = None
) -> Tensor:
    """Return upper bounds of sup ||Jf(u) - Jf(v)||_2 over the balls of radius `delta` around the samples, (n,) float64.

    sharpening Eq. (5), for the Jacobian. It is 0 if no activation's slope varies in the ball. Raises `Refused` if the
    network is not a chain of affine maps and activations with known slopes, or if its matrices exceed the memory.
    """
    parts: list[Tensor] = []
    with problem.measuring(model):
        chain = read_chain(problem, model)
        sizes = [len(chain.maps[0][0].mT), *(len(b) for _, b in chain.maps)]
        held = 8 * 8 * sum(a * (sizes[0] + sizes[-1]) for a in sizes)
        most = max(1, min(1024, problem.memory // 2 // held))
        for _, raw in problem.shared(most, ALONE, "certified variation", progress):
            x = problem.place(raw)[0].to(torch.float64).flatten(1)
            with torch.no_grad():
                parts.append(variation_bound(chain, x, delta).cpu())
    return torch.cat(parts)


def variation_bound(chain: Chain, x: Tensor, delta: float) -> Tensor:
    """Return the smallest of three bounds, (n,).

    With s_l the spread of layer l's slopes, B_l = dz_l/dx, A_l = df/dh_l:

        (a)  || high - low ||_2 of the entries of Jf
        (b)  sum_l || A_l s_l^1/2 ||_2 || s_l^1/2 B_l ||_2
        (c)  2 sup || Jf ||_2

    (b) holds because Jf(u) - Jf(v) telescopes into the sum over l of A_l(u) (D_l(u) - D_l(v)) B_l(v).
    """
    # from below: the activations' least and largest slopes, (n, m_l) each, and boxes of dz_l/dx, (n, m_l, M), of
    # which the last is that of Jf; each z_l is bounded twice: by the values of the layer before, and by delta times the
    # norm of each row of dz_l/dx, which is exact for z_1
    slopes: list[tuple[Tensor, Tensor]] = []
    below = [Box.of(chain.maps[0][0], len(x))]
    at, least, most = x, x - delta, x + delta
    for (W, b), (ahead, _), known in zip(chain.maps, chain.maps[1:], chain.activations, strict=False):
        middle, reach = (most + least) / 2, delta * torch.minimum(below[-1].largest.norm(dim=2), below[-1].cap[:, None])
        rounding = MARGIN * (b.abs() + torch.maximum(least.abs(), most.abs()) @ W.abs().mT)
        at, around = at @ W.mT + b, middle @ W.mT + b
        spread = (most - least) / 2 @ W.abs().mT
        low = torch.maximum(at - reach, around - spread) - rounding
        high = torch.minimum(at + reach, around + spread) + rounding
        slopes.append(known.slopes(low, high))
        at, (least, most) = known.value(at), known.values(low, high)
        below.append(below[-1].times(*(end[..., None] for end in slopes[-1])).before(ahead))
    # from above: boxes of df/dh_l, (n, N, m_l), for the output h_l of each activation, the last one first
    above = [Box.of(chain.maps[-1][0], len(x))]
    for (low, high), (W, _) in zip(slopes[:0:-1], chain.maps[-2:0:-1], strict=True):
        above.append(above[-1].times(low[:, None], high[:, None]).after(W))
    # the three bounds
    J = below[-1]
    entrywise, twice = 2 * norms(J.radius), 2 * J.norm()
    telescoped = torch.zeros_like(twice)
    for (low, high), A, B in zip(slopes, reversed(above), below, strict=False):
        root = (high - low).sqrt()
        across, down = root[:, None], root[..., None]
        telescoped = telescoped + A.times(across, across).norm() * B.times(down, down).norm()
    return (1 + MARGIN) * torch.stack([entrywise, telescoped, twice]).min(0).values


def norms(A: Tensor) -> Tensor:
    """Return ||A||_2 of matrices (n, r, c), an upper bound except for rounding."""
    G = A @ A.mT if A.shape[1] <= A.shape[2] else A.mT @ A
    largest: Tensor = torch.linalg.eigvalsh(G)[:, -1]
    return largest.clamp(min=0).sqrt()
