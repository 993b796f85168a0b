"""Small networks on common data, some of them one function written in two ways."""

import copy

import torch
from torch import nn

import flatlens as fl

X, Y = torch.linspace(-1, 1, 80).reshape(20, 4).sin().double(), torch.arange(20) % 3
TEST = (X.roll(1, 0) + 0.3, (Y + (torch.arange(20) > 15)) % 3)


def network(seed, width=8, outputs=3):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, outputs)]
    return nn.Sequential(*layers).double()


def rescaled(net, factor=10.0):
    """The same function, its first two layers out of balance."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        net[0].weight *= factor
        net[0].bias *= factor
        net[2].weight /= factor
    return net


def lens(net, data=(X, Y), loss="cross_entropy", test=None, **options):
    return fl.Lens(fl.Problem(net, loss, data, test=test, **options))
