"""One step of every kind of training against the same step written out in float64, from its definition."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev

from flatlens.training import (
    ASAM,
    SAM,
    SGD,
    Augmentation,
    InputJacobian,
    Mixup,
    ParameterJacobian,
    RelativeFlatness,
    Training,
    train,
)
from flatlens.training.batches import Mixup as MixupSettings
from flatlens.training.run import Stepper, stream

N, CLASSES = 12, 3


def network(kind="dense"):
    torch.manual_seed(0)
    if kind == "dense":
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    elif kind == "batchnorm":
        net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, CLASSES))
    else:
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Flatten(),
            nn.Linear(12, CLASSES),
        )  # fmt: skip
    return net.double()


def samples(kind="dense", n=N):
    generator = torch.Generator().manual_seed(1)
    shape = (n, 2, 4, 4) if kind == "conv" else (n, 5)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (n,), generator=generator)


def parameters(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def risk(net, x, targets):
    """theta -> mean cross-entropy on soft targets, written out."""
    net = copy.deepcopy(net)

    def of(theta):
        f = functional_call(net, theta, (x,))
        return -(targets * (f - f.logsumexp(1, keepdim=True))).sum(1).mean()

    return of


def hot(y):
    return torch.eye(CLASSES, dtype=torch.float64)[y]


def moved(net, kind, loss="cross_entropy", **how):
    """The parameters after one step of all samples at lr 0.1."""
    net = copy.deepcopy(net)
    train(net, samples(kind), Training(SGD(0.1), loss=loss, max_steps=1, seed=3, **how))
    return parameters(net)


def require_equal(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def after(theta, slope, lr=0.1):
    return {name: theta[name] - lr * slope[name] for name in theta}


def norm(parts):
    return math.sqrt(sum(float(part.square().sum()) for part in parts.values()))


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_sam(kind):
    net, (x, y) = network(kind), samples(kind)
    of, theta = risk(net, x, hot(y)), parameters(net)
    g = grad(of)(theta)
    worst = {name: theta[name] + 0.3 * g[name] / norm(g) for name in theta}
    require_equal(moved(net, kind, ascent=SAM(0.3)), after(theta, grad(of)(worst)))


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_asam(kind):
    net, (x, y) = network(kind), samples(kind)
    of, theta = risk(net, x, hot(y)), parameters(net)
    g = grad(of)(theta)
    T = {name: p.abs() + 0.02 for name, p in theta.items()}
    length = norm({name: T[name] * g[name] for name in T})
    worst = {name: theta[name] + 0.4 * T[name] ** 2 * g[name] / length for name in theta}
    require_equal(moved(net, kind, ascent=ASAM(0.4, eta=0.02)), after(theta, grad(of)(worst)))


@pytest.mark.parametrize("ascent", [SAM, ASAM])
def test_no_radius_is_plain_descent_bit_for_bit(ascent):
    net = network()
    for name, p in moved(net, "dense", ascent=ascent(rho=0.0)).items():
        assert torch.equal(p, moved(net, "dense")[name])


def test_sam_sees_the_weight_decay_at_the_weights_themselves():
    net, (x, y) = network(), samples()
    of, theta = risk(net, x, hot(y)), parameters(net)
    g = grad(of)(theta)
    worst = {name: theta[name] + 0.3 * g[name] / norm(g) for name in theta}
    slope = {name: s + 0.05 * theta[name] for name, s in grad(of)(worst).items()}
    found = copy.deepcopy(net)
    train(found, (x, y), Training(SGD(0.1, weight_decay=0.05), ascent=SAM(0.3), max_steps=1))
    require_equal(parameters(found), after(theta, slope))


def test_the_worst_place_is_judged_under_the_same_dropout():
    net = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, CLASSES)).double()
    masks = []
    net[1].register_forward_hook(lambda module, args, out: masks.append((out != 0).detach()))
    train(net, samples(), Training(SGD(0.1), ascent=SAM(0.5), max_steps=2, check_every=9))
    first, again, second, once_more = [mask for mask in masks if not mask.all()]
    assert torch.equal(first, again)
    assert torch.equal(second, once_more)
    assert not torch.equal(first, second)


def test_running_statistics_are_those_of_the_network_itself_not_of_the_worst_place():
    net, (x, y) = network("batchnorm"), samples()
    plain, sharp = copy.deepcopy(net), copy.deepcopy(net)
    train(plain, (x, y), Training(SGD(0.1), max_steps=1))
    train(sharp, (x, y), Training(SGD(0.1), ascent=SAM(0.5), max_steps=1))
    assert torch.equal(plain[1].running_mean, sharp[1].running_mean)
    assert torch.equal(plain[1].running_var, sharp[1].running_var)
    assert plain[1].num_batches_tracked == sharp[1].num_batches_tracked == 1
    assert not torch.equal(plain[0].weight, sharp[0].weight)


@pytest.mark.parametrize("ghost", [5, 6])
def test_ghost_batch_descent_is_the_gradient_of_all_normalised_part_by_part(ghost):
    """5 + 5 + 2: parts weigh by their samples, not alike."""
    net, (x, y) = network("batchnorm"), samples()
    theta = parameters(net)

    def of(theta):
        total = 0.0
        for part, wanted in zip(x.split(ghost), hot(y).split(ghost), strict=True):
            z = part @ theta["0.weight"].T + theta["0.bias"]
            z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() * theta["1.weight"] + theta["1.bias"]
            f = z.tanh() @ theta["3.weight"].T + theta["3.bias"]
            total = total - (wanted * (f - f.logsumexp(1, keepdim=True))).sum()
        return total / N

    require_equal(moved(net, "dense", ghost_batch=ghost), after(theta, grad(of)(theta)))


def test_without_batchnorm_ghosts_change_nothing():
    net = network()
    require_equal(moved(net, "dense", ghost_batch=5), moved(net, "dense"))


@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_mixup(beta, loss):
    net, (x, y) = network(), samples()
    draws = stream(3, "mixup")
    theta_mix = MixupSettings(beta).draw(draws)
    other = torch.randperm(N, generator=draws)
    assert (theta_mix in (0.0, 1.0)) == (beta == 0)
    mixed = theta_mix * x + (1 - theta_mix) * x[other]
    targets = theta_mix * hot(y) + (1 - theta_mix) * hot(y)[other]
    theta = parameters(net)

    def squared(theta):
        return 0.5 * (functional_call(net, theta, (mixed,)) - targets).square().sum(1).mean()

    of = risk(net, mixed, targets) if loss == "cross_entropy" else squared
    require_equal(moved(net, "dense", loss, mixup=Mixup(beta)), after(theta, grad(of)(theta)))


def test_label_smoothing():
    net, (x, y) = network(), samples()
    theta = parameters(net)
    of = risk(net, x, 0.4 * hot(y) + 0.6 / CLASSES)
    require_equal(moved(net, "dense", label_smoothing=0.6), after(theta, grad(of)(theta)))


def jacobian(net, theta, x, of):
    """Explicit: df/dx (n, N, ...) of each sample, or a dict of df/dtheta (n, N, ...)."""
    if of == "input":
        return torch.stack([jacrev(lambda one: functional_call(net, theta, (one[None],))[0])(sample) for sample in x])
    return jacrev(lambda theta: functional_call(net, theta, (x,)))(theta)


def regulariser(net, x, penalty, seed=3):
    """theta -> the penalty with its probes drawn as in the first step, from explicit Jacobians."""
    draws = stream(seed, "penalties")
    if penalty.form == "published":
        u = torch.randn((len(x), CLASSES), generator=draws, dtype=torch.float64)
        u = u / u.norm()
    else:
        u = 2.0 * torch.randint(0, 2, (len(x), CLASSES), generator=draws).double() - 1

    def of(theta):
        if isinstance(penalty, InputJacobian):
            rows = torch.einsum("nk,nk...->n...", u, jacobian(net, theta, x, "input"))
            square = rows.square().sum()
        else:
            J = jacobian(net, theta, x, "parameters")
            square = sum(torch.einsum("nk,nk...->...", u, part).square().sum() for part in J.values())
        return square.sqrt() if penalty.form == "published" else square / len(x)

    return of


@pytest.mark.parametrize("form", ["mean_square", "published"])
@pytest.mark.parametrize("kind", [InputJacobian, ParameterJacobian])
@pytest.mark.parametrize("of", ["dense", "conv"])
def test_jacobian_regularisers(kind, form, of):
    net, (x, y) = network(of), samples(of)
    penalty, theta = kind(0.7, form), parameters(net)
    loss, extra = risk(net, x, hot(y)), regulariser(net, x, penalty)
    slope = grad(lambda theta: loss(theta) + 0.7 * extra(theta))(theta)
    require_equal(moved(net, of, penalties=(penalty,)), after(theta, slope))


def relative_flatness(net, x, layers, seed=3):
    """theta -> Definition 3, one random probe: sum_{s,s'} <w_s, w_s'> <M_s, M_s'>, M from explicit Jacobians."""
    u = 2.0 * torch.randint(0, 2, (len(x), CLASSES), generator=stream(seed, "penalties")).double() - 1

    def of(theta):
        p = functional_call(net, theta, (x,)).softmax(1)
        R = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
        v = (R @ u[:, :, None])[:, :, 0]
        J = jacobian(net, theta, x, "parameters")
        total = 0.0
        for layer in layers:
            groups = getattr(net.get_submodule(layer), "groups", 1)
            M = torch.einsum("nk,nk...->n...", v, J[f"{layer}.weight"]).flatten(2)
            W = theta[f"{layer}.weight"].flatten(1)
            for W_g, M_g in zip(W.chunk(groups), M.chunk(groups, 1), strict=True):
                total = total + torch.einsum("sa,ta,nsb,ntb->", W_g, W_g, M_g, M_g)
        return total / len(x)

    return of


@pytest.mark.parametrize(
    ("kind", "layers", "names"),
    [
        ("dense", "last", ["4"]),
        ("dense", "all", ["0", "2", "4"]),
        ("dense", ("0", "4"), ["0", "4"]),
        ("conv", "all", ["0", "2", "5"]),
    ],
)
def test_relative_flatness_regulariser(kind, layers, names):
    net, (x, y) = network(kind), samples(kind)
    theta = parameters(net)
    loss, extra = risk(net, x, hot(y)), relative_flatness(net, x, names)
    slope = grad(lambda theta: loss(theta) + 0.7 * extra(theta))(theta)
    require_equal(moved(net, kind, penalties=(RelativeFlatness(0.7, layers),)), after(theta, slope))


def test_sam_and_penalties_together_take_the_second_gradient_of_the_same_function():
    net, (x, y) = network(), samples()
    theta = parameters(net)
    loss, extra = risk(net, x, hot(y)), relative_flatness(net, x, ["4"])
    slope = grad(lambda theta: loss(theta) + 0.7 * extra(theta))
    g = slope(theta)
    worst = {name: theta[name] + 0.3 * g[name] / norm(g) for name in theta}
    found = moved(net, "dense", penalties=(RelativeFlatness(0.7),), ascent=SAM(0.3))
    require_equal(found, after(theta, slope(worst)))


def test_ghosts_penalties_weigh_by_their_samples():
    """The mean over 5 + 5 + 2 samples, each part with its own draw of the probes."""
    net, (x, y) = network(), samples()
    theta = parameters(net)
    loss = risk(net, x, hot(y))
    draws = stream(3, "penalties")
    u = [2.0 * torch.randint(0, 2, (len(part), CLASSES), generator=draws).double() - 1 for part in x.split(5)]

    def of(theta):
        total = loss(theta)
        for part, probe in zip(x.split(5), u, strict=True):
            rows = torch.einsum("nk,nk...->n...", probe, jacobian(net, theta, part, "input"))
            total = total + 0.7 * rows.square().sum() / N
        return total

    require_equal(moved(net, "dense", ghost_batch=5, penalties=(InputJacobian(0.7),)), after(theta, grad(of)(theta)))


def test_a_coefficient_of_zero_is_plain_descent_bit_for_bit():
    net = network()
    plain = moved(net, "dense")
    for penalty in (InputJacobian(0.0), ParameterJacobian(0.0), RelativeFlatness(0.0)):
        for name, p in moved(net, "dense", penalties=(penalty,)).items():
            assert torch.equal(p, plain[name])


def test_no_noise_moves_another():
    """The mixing coefficients are the same whether images are augmented or not, and whatever is regularised."""
    net = network("conv")
    x, y = samples("conv")
    alone = Stepper(copy.deepcopy(net), Training(SGD(0.1), mixup=Mixup(1.0), max_steps=1))
    many = Stepper(
        copy.deepcopy(net),
        Training(
            SGD(0.1), mixup=Mixup(1.0), augmentation=Augmentation(pad=1), penalties=(InputJacobian(0.1),), max_steps=1
        ),
    )
    for stepper in (alone, many):
        stepper.take(x, hot(y), 1.0)
    assert torch.equal(alone.noise["mixup"].get_state(), many.noise["mixup"].get_state())
