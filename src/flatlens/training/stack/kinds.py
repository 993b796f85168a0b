"""The rules for which networks are trained in one stack, and why others are not."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from flatlens.training.ridge import Ridge
from flatlens.training.run import TrainingRun
from flatlens.training.settings import Training
from flatlens.training.stack.chain import LayerChain, NotStackable
from flatlens.training.stack.updates import kind_of as update_kind


def why_alone(model: nn.Module, settings: Training) -> str:
    """Return why a network is trained alone, in a few words; "" if it can be a lane of a stack.

    >>> from flatlens.training import SGD
    >>> how = Training(SGD(0.1), max_steps=1)
    >>> why_alone(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), how)
    ''
    >>> why_alone(nn.Sequential(nn.Conv2d(1, 2, 3)), how)
    'a Conv2d: only linear layers and elementwise activations are stacked'
    """
    if isinstance(settings.optimiser, Ridge):
        return "a ridge head is solved in one step and not stacked"
    changed = {
        "augmentation": settings.augmentation is not None,
        "mixup": settings.mixup is not None,
        "an ascent": settings.ascent is not None,
        "penalties": bool(settings.penalties),
        "ghost batches": settings.ghost_batch is not None,
    }
    if there := [name for name, given in changed.items() if given]:
        return f"{there[0]} cannot be stacked"
    if any(p.device.type != "cpu" for p in model.parameters()):
        return "only networks on the CPU are stacked"
    try:
        LayerChain(model)
    except NotStackable as reason:
        return str(reason)
    return ""


def kind_of(run: TrainingRun) -> Hashable:
    """Return what runs in one stack must share: layers, loss, batch size, samples, kind of optimiser."""
    settings, chain = run.settings, LayerChain(run.model)
    assert not isinstance(settings.optimiser, Ridge)
    layers = tuple((one.inputs, one.outputs, one.bias is None, repr(one.activations)) for one in chain.layers)
    samples = [run.data.x, run.data.targets, *(() if run.test is None else (run.test.x, run.test.targets))]
    return (
        layers,
        settings.loss,
        settings.batch_size,
        update_kind(settings.optimiser),
        tuple((each.shape, each.dtype) for each in [*samples, *run.stepper.parameters]),
        tuple(_memory(each) for each in samples[::2]),
    )


def _memory(x: Tensor) -> int:
    """Return the address of the inputs: lanes share them, and each has its own targets."""
    return int(x.data_ptr())
