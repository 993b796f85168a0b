"""A data set, a network and checkpoints of a user's own, so small that each training takes a fraction of a second."""

NET = """
import torch
from torch import nn
print("this file prints")

def samples(n=80):
    x = torch.randn(n, 1, 3, 3)
    return x, (x.flatten(1)[:, :2].sum(1) > 0).long()

def held_out():
    return tuple(part[:20] for part in samples(200))

def build(width=6, activation="relu"):
    print("and so does this function")
    act = nn.ReLU() if activation == "relu" else nn.Tanh()
    return nn.Sequential(nn.Flatten(), nn.Linear(9, width), act, nn.Linear(width, 2))

def deep(inputs, outputs, depth):
    return nn.Sequential(nn.Flatten(), *[nn.Linear(inputs, inputs) for _ in range(depth)], nn.Linear(inputs, outputs))

def deeper(inputs, outputs, depth):
    return deep(inputs, outputs, depth + 1)

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
"""


def checkpoints(folder, widths=(4, 6), seeds=2):
    """Write trained networks as lr=..._width=..._seed=....pt below `folder`; return (file, lr, width, seed, loss)."""
    import torch
    from torch import nn

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 3, 3, generator=generator)
    y = (x.flatten(1)[:, :2].sum(1) > 0).long()
    rows = []
    for lr in (0.1, 0.3):
        for width in widths:
            for seed in range(seeds):
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    net = nn.Sequential(nn.Flatten(), nn.Linear(9, width), nn.ReLU(), nn.Linear(width, 2))
                optimiser = torch.optim.SGD(net.parameters(), lr=lr)
                for _ in range(60):
                    optimiser.zero_grad()
                    loss = nn.functional.cross_entropy(net(x), y)
                    loss.backward()
                    optimiser.step()
                file = folder / f"lr={lr}_width={width}_seed={seed}.pt"
                torch.save(net.state_dict(), file)
                rows.append((file, lr, width, seed, float(loss.detach())))
    return rows
