"""The code of paper scale on a few images in the published sets' form: its own studies, with small sizes.

Smoke scale has other networks and other data, so these are the figures that it does not reach: X6 at the two smaller
learning rates (Fig. 7, 8, 10, 11), and the halves on CIFAR-100 of X8 (13, 15, 17, 19), X9 (24 to 27) and X13 (33b).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatlens.data import IMAGE_SETS
from flatlens.data.sources import DataSettings
from flatlens.experiments import Study, StudyResult, run_study
from flatlens.experiments.settings import Axis
from flatlens.models import VGG11, Architecture
from flatlens.papers import EXPERIMENTS
from flatlens.papers.sharpening.descent import descent_plots
from flatlens.papers.sharpening.ends import LOCAL_VARIATION

pytestmark = pytest.mark.thorough

IMAGES = 8
"""Images in each file, of two classes."""


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CIFAR-10 and CIFAR-100 in their binary form, with few images."""
    rng = np.random.default_rng(0)
    for name in ("cifar10", "cifar100"):
        known = IMAGE_SETS[name]
        few = replace(known, train=IMAGES * len(known.train_files), test=IMAGES, md5={})
        monkeypatch.setitem(IMAGE_SETS, name, few)
        folder = tmp_path / few.folder
        folder.mkdir()
        for file in (*few.train_files, *few.test_files):
            labels = np.arange(IMAGES) % 2
            pixels = rng.integers(0, 50, (IMAGES, 3072)) + 150 * labels[:, None]
            rows = np.hstack([*[labels[:, None]] * few.label_bytes, pixels])
            (folder / file).write_bytes(rows.astype(np.uint8).tobytes())
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path))


def small(setting: Any) -> Any:
    """The setting with few images, or few channels; those in a tuple, too."""
    if isinstance(setting, tuple):
        return tuple(map(small, setting))
    if isinstance(setting, DataSettings):
        return replace(setting, train=IMAGES, test=IMAGES)
    if isinstance(setting, Architecture):
        return replace(setting, width=1 / 32 if isinstance(setting, VGG11) else 1 / 16)
    return setting


def tiny(study: Study, axes: Mapping[str, tuple[Any, ...]], **training: Any) -> Study:
    """The study with small settings, these values on its axes (else the first one) and in its training."""
    base = study.base
    followed = base.followed and replace(base.followed, samples=None)
    base = replace(
        base, data=small(base.data), model=small(base.model), samples=2 if base.samples else None, followed=followed,
        training=replace(base.training, **training),
    )  # fmt: skip
    values = {axis.name: axes.get(axis.name, axis.values[:1]) for axis in study.axes}
    return replace(study, base=base, axes=tuple(Axis(name, small(several)) for name, several in values.items()))


def run(study: Study, out: Path) -> StudyResult:
    with ThreadPoolExecutor(1) as executor:  # in this process, where the small sets are known
        return run_study(study, out, executor=executor)


def of(experiment: str) -> Mapping[str, Study]:
    return EXPERIMENTS[experiment].studies("paper")


def numbers(titles: Iterable[str]) -> set[str]:
    """The numbers of the figures that titles name: "Fig. 3, 12: by learning rate" has 3 and 12."""
    return {number for title in titles for number in re.findall(r"\d+", title.partition(":")[0])}


def test_gradient_descent_at_the_smaller_learning_rates_draws_its_figures(published, tmp_path) -> None:
    study = of("X6")["descent"]
    values = {axis.name: axis.values for axis in study.axes}
    axes = {
        "model": values["model"],
        "lr+max_steps+every": tuple((lr, 24, 24) for lr, _, _ in values["lr+max_steps+every"] if lr < 0.08),
        "label_smoothing": (0.0, 0.75),
    }
    descent = run(tiny(study, axes, ghost_batch=4), tmp_path / "out")
    assert numbers(plot.title for plot in descent_plots({"descent": descent})) == {"7", "8", "10", "11"}


def test_learning_rates_and_batch_sizes_on_cifar_100_draw_their_figures(published, tmp_path) -> None:
    results = {}
    for name, study in of("X8").items():
        sets = next(axis for axis in study.axes if axis.name.startswith("data+"))
        assert [(data.name, classes) for data, classes, _ in sets.values] == [("cifar10", 10), ("cifar100", 100)]
        without_stop = tuple((data, classes, None) for data, classes, _ in sets.values)
        ends = {sets.name: without_stop, "lr": (0.1, 0.01), "batch_size": (4, 8)}
        few = tiny(study, ends, max_steps=2, check_every=2)
        # without the search for the local variation, most of the time: it is no part of these figures
        kept = tuple(one for one in few.quantities if one.column != LOCAL_VARIATION)
        measures = tuple(name for name in few.base.measures if name != LOCAL_VARIATION)
        results[name] = run(replace(few, base=replace(few.base, measures=measures), quantities=kept), tmp_path / name)
    titles = [plot.title for plot in EXPERIMENTS["X8"].plots(results) if "cifar100" in plot.title]
    assert numbers(titles) == {"13", "15", "17", "19"}


def test_regularisers_on_cifar_100_draw_their_figures(published, tmp_path) -> None:
    results = {}
    for name, study in of("X9").items():
        network = name.partition(".")[0]
        _, strength, starts = (axis.name for axis in study.axes)
        each = study.axes[2].values
        if network == "vgg11_cifar100" or name == "resnet18_cifar100.sam":  # each network, and each regulariser
            kinds = {strength: study.axes[1].values[:2], starts: (each[0], each[-1])}  # with BatchNorm and without
            results[name] = run(tiny(study, kinds, max_epochs=1, batch_size=4), tmp_path / name)
    assert numbers(plot.title for plot in EXPERIMENTS["X9"].plots(results)) == {"24", "25", "26", "27"}


def test_regularised_jacobians_on_cifar_100_draw_their_figure(published, tmp_path) -> None:
    results = {}
    for name, study in of("X13").items():
        if name.startswith("cifar100"):
            several = {axis.name: axis.values[-2:] for axis in study.axes if axis.name == "coefficient"}
            results[name] = run(tiny(study, several, max_epochs=1, batch_size=4), tmp_path / name)
    (plot,) = EXPERIMENTS["X13"].plots(results)
    assert {panel.rpartition(", ")[2] for panel in plot.data["panel"]} == {"cifar100"}
    assert set(plot.data["line"]) == {"Input", "Param.", "ref 1e-1", "ref 1e-3"}
