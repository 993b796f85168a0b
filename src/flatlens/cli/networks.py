"""The commands on trained networks: `flatlens measure`, `bounds`, `invariance`, `compress` and `compare`.

Each reads its inputs, announces what the work will cost, runs it, and shows a screen, JSON or a page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from flatlens.cli import terminal
from flatlens.cli.inputs import How, Inputs, Names, all_names, generator_of, require_trust, split_names
from flatlens.cli.terminal import Flag, Json, Whole, or_cost, show, show_json, stdout_to_stderr
from flatlens.errors import BadInput, UnknownName
from flatlens.files import require_writable
from flatlens.progress import Bar

if TYPE_CHECKING:
    from flatlens.problem import Problem


@contextmanager
def reading(models: Sequence[str], how: How, page: Path | None) -> Iterator[Bar]:
    """Refuse what cannot work before anything is read, and show the progress of what follows."""
    terminal.require_page(page)
    require_trust(models, how.trust)
    with stdout_to_stderr(), Bar(stage="reading the network and the data") as bar:
        yield bar


@or_cost
def measure(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    measures: Names = (),
    outputs: str | None = None,
    attention_heads: Annotated[bool, Flag] = False,
    layers: str | None = None,
    page: Path | None = None,
    save: Path | None = None,
    after: Path | None = None,
    seed: Whole = 0,
    as_json: Json = False,
) -> int:
    """Measure one network, and show which numbers are invariant under rescaling of the weights.

    For example:

        flatlens measure net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens measure net.py:build --weights 9.pt --data net.py:samples --loss mse --measures sharpness --after pairs
        flatlens measure runs/digits/networks/0123456789ab --measures mls --measures "local_volume(top_k=3)"
        torchrun --nproc-per-node=2 -m flatlens measure timm:resnet18 --data photos/ --loss cross_entropy

    Under torchrun the processes share the samples; --memory holds for each, and the result is that of one process.
    With `--ranks` so do processes that another program started, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        model: `file.py:NAME` or `package.module:NAME`, a function without arguments that returns the network; the
            folder of a study's network (OUT/networks/KEY); `timm:NAME`; `hf:NAME` or `hf:FOLDER`.
        inputs: The network's data, loss and weights, and how to measure.
        measures: The measures, separated by commas, or repeat the option; `flatlens list measures` has the names. Or a
            preset: `summary`, 8 to 14 numbers; `pass`, all that one pass over the data gives; `all`; `family:NAME`,
            such as `family:flatness`. Without it: `summary`.
        outputs: `exact`, a backward pass for each of the network's outputs, or a number of random combinations that
            replace them: traces are then estimates, spectral norms lower bounds. Without it: exact up to 128 outputs,
            16 combinations for more.
        attention_heads: Give measures of weights for the projections and heads of attention, too: `attn.qkv/query`
            are the queries' rows in the weight of `attn.qkv`, `attn.qkv/query/0` the rows of the first head.
        layers: Show every value of the layers whose names contain this, such as `blocks.3.`; curvature
            products that are taken layer by layer are taken for these alone.
        page: Write an HTML page: a map of layers by measures, every number, and the layers by block, with a search.
        save: Save the report with its per-sample values in this file; `flatlens.Report.load` reads it.
        after: Searches for eigenvectors start from those that an earlier measurement of the network left in this file,
            if it is there, and leave theirs in it: fewer products for checkpoint after checkpoint.
        seed: Seed of the random numbers of estimates; exact measures use none.
        as_json: Print JSON.
    """
    terminal.require_own(save, "--save")
    if after is not None:
        require_writable(after, f"--after {after}")
    with reading([model], inputs.how, page) as bar:
        import flatlens as fl
        from flatlens.measures.leading_eigenvalues import Searches
        from flatlens.report.measure import measure_screen, write_measure_page

        earlier = None if after is None or not after.exists() else Searches.load(after).pairs
        problem = inputs.problem(model)
        names = all_names(measures, "--measures")
        # a mistyped layer is refused before hours of work
        known = [name for name, _ in (*problem.model.named_modules(), *problem.model.named_parameters()) if name]
        if layers is not None and not any(layers in name for name in known):
            raise UnknownName.among("layer", layers, known, argument="--layers", call="")
        combinations: Literal["exact"] | int | None = None if outputs is None else "exact"
        if outputs not in (None, "exact"):
            if not outputs.isdecimal() or len(outputs) > 9:
                raise BadInput(f"--outputs {outputs}: expected 'exact' or a number of combinations, such as 16")
            combinations = int(outputs)
        lens = fl.Lens(problem, outputs=combinations, after=earlier, attention_heads=attention_heads)
        generator = generator_of(seed)
        work = partial(fl.measure, measures=names or None, layers=layers)
        inputs.how.announced(bar, lens, work)
        found = work(lens, anyway=inputs.how.anyway, generator=generator, progress=bar)
        if problem.ranks.rank:  # only the first process writes and prints
            return 0
        # files that later commands need come first; the numbers are shown also if one cannot be written
        kept = terminal.saved(found, save, "report")
        if after is not None:
            searches = Searches(lens.remembered, {"model": found.about["model"], "origin": found.about["origin"]})
            kept &= terminal.written("--after", lambda: searches.save(after))
        terminal.page_beside(page, bar, partial(write_measure_page, found, fl.catalogue()))
    if as_json:
        about = {name: value for name, value in found.about.items() if name != "seconds"}
        rows = found.frame()
        seconds = {**found.about["seconds"], **rows[rows["seconds"] > 0].set_index("measure")["seconds"].to_dict()}
        estimates = rows.drop(columns="seconds").to_dict("records")
        show_json({"answer": found.answer, "about": about, "estimates": estimates, "seconds": seconds})
    else:
        show(measure_screen(found, fl.catalogue(), layers or ""))
    return 0 if kept else 2


@or_cost
def bounds(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    bounds: Names = (),
    assume: Names = (),
    delta: float | None = None,
    distribution: Literal["cube", "sphere"] | None = None,
    page: Path | None = None,
    seed: Whole = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Check the inequalities between flatness, compression and generalisation on one network.

    For example:

        flatlens bounds net.py:build --weights net.pt --data net.py:samples --loss half_squared_error --page bounds.html

    Args:
        model: As for `flatlens measure`.
        inputs: The network's data, loss and weights, and how to measure.
        bounds: The bounds to check, separated by commas, or repeat the option; `flatlens list bounds` has the names.
            Without it: all that one pass over the data can check.
        assume: Assumptions that samples cannot check and that you declare to hold, such as `convex_support`; shown as
            declared.
        delta: A radius, in the input's units, within which the samples cover the data's support.
        distribution: The distribution that the data was drawn from: uniform on the unit cube or on the unit sphere, in
            the dimension of the input. Other distributions, and a target function: in Python.
        page: Write an HTML page, with a picture of the chain from sensitivity to sharpness.
        seed: Seed of the random numbers.
        strict: Exit with 1 if a bound is violated.
        as_json: Print JSON.
    """
    with reading([model], inputs.how, page) as bar:
        from torch import Tensor

        import flatlens as fl
        from flatlens.distributions import Cube, Sphere
        from flatlens.report.bounds import bounds_screen, write_bounds_page

        problem = inputs.problem(model)
        lens, generator = fl.Lens(problem, outputs="exact"), generator_of(seed)
        asked, declared, law = all_names(bounds, "--bounds") or None, all_names(assume, "--assume"), None
        if distribution is not None:
            batch = next(problem.data.chunks(1))
            x = batch[0] if isinstance(batch, tuple) else batch
            if not isinstance(x, Tensor):
                raise BadInput(f"--distribution {distribution}: expected one tensor of inputs")
            M = x[0].numel()
            law = Cube(M) if distribution == "cube" else Sphere(M - 1)
        check = partial(fl.check_bounds, bounds=asked, assume=declared, distribution=law, delta=delta)
        inputs.how.announced(bar, lens, check)
        found = check(lens, anyway=inputs.how.anyway, generator=generator, progress=bar)
        terminal.page_beside(page, bar, partial(write_bounds_page, found))
    if as_json:
        show_json({"answer": found.answer, "about": found.about, "bounds": found.frame().to_dict("records")})
    else:
        show(bounds_screen(found))
    return 1 if strict and found.violated else 0


@or_cost
def invariance(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    measures: Names = (),
    transforms: Names = (),
    page: Path | None = None,
    seed: Whole = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Change the weights of one network without changing its function: which of its numbers change?

    For example:

        flatlens invariance net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens invariance runs/digits/networks/0123456789ab --measures relative_flatness,hessian_trace

    Args:
        model: As for `flatlens measure`.
        inputs: The network's data, loss and weights, and how to measure.
        measures: The measures, separated by commas, or repeat the option; `flatlens list measures` has the names. Or a
            preset, as for `flatlens measure`. Without it: `pass`, all that one pass over the data gives.
        transforms: The transforms, in the same form; `flatlens list transforms` has the names. Without it: all that are
            valid in this network.
        page: Write the table, and what each transform did, as an HTML page.
        seed: Seed of random factors and permutations, and of estimates.
        strict: Exit with 1 if a number changes that is declared to stay: an error in flatlens, or in a theorem.
        as_json: Print JSON.
    """
    with reading([model], inputs.how, page) as bar:
        import flatlens as fl
        from flatlens.report.invariance import invariance_screen, write_invariance_page
        from flatlens.transforms.invariance import possible

        problem = inputs.problem(model)
        lens, generator = fl.Lens(problem), generator_of(seed)
        asked, moves = all_names(measures, "--measures") or None, all_names(transforms, "--transforms") or None
        times = 1 + len(possible(lens, moves))
        inputs.how.announced(bar, lens, partial(fl.measure, measures=asked or "pass"), times)
        found = fl.check_invariance(lens, asked, moves, anyway=inputs.how.anyway, generator=generator, progress=bar)
        terminal.page_beside(page, bar, partial(write_invariance_page, found))
    if as_json:
        applied = {name: asdict(one) for name, one in found.moved.items()}
        rows = found.frame().to_dict("records")
        show_json({
            "answer": found.answer, "about": found.about, "transforms": applied, "left_out": found.left_out,
            "cells": rows,
        })  # fmt: skip
    else:
        show(invariance_screen(found))
    return 1 if strict and found.disagreeing else 0


@or_cost
def compress(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    schemes: Names = (),
    budget: float | None = None,
    level: float | None = None,
    trials: int | None = None,
    plan: Path | None = None,
    page: Path | None = None,
    seed: Whole = 0,
    as_json: Json = False,
) -> int:
    """Compress each weight of one network: which layers can go to int4, and what does 30% smaller cost?

    For example:

        flatlens compress net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens compress net.py:build --weights net.pt --data net.py:samples --budget 0.7 --plan plan.json

    The rise of the loss is forecast by gradient and Hessian, and measured beside it. Weights alone: activations stay.

    Args:
        model: As for `flatlens measure`.
        inputs: The network's data, loss and weights, and how to measure.
        schemes: The schemes, separated by commas, or repeat the option: `int8`, `int4`, `float8`, each also with
            `"(by='tensor')"` or by groups, `"(group=32)"`; `"prune(share=0.5)"`, `"low_rank(share=0.5)"`. Without it:
            all of these but groups, and 80% pruned.
        budget: The share of the network's size that may remain, such as 0.7 for 30% smaller.
        level: The tolerated rise of the loss, without a budget. Without it: 1% of the loss of constant outputs.
        trials: With --budget, the number of losses that exchanges of layers may measure. Without it: twelve rounds over
            all layers and schemes.
        plan: Write what each layer becomes as JSON, for torchao and others; nothing is deployed.
        page: Write an HTML page: forecast against measured rise, every layer and scheme, the plan.
        seed: Seed of the random signs for the traces of the baseline.
        as_json: Print JSON.
    """
    terminal.require_plan(plan)
    with reading([model], inputs.how, page) as bar:
        import flatlens as fl
        from flatlens.files import write_whole
        from flatlens.report.compression import compression_screen, write_compression_page

        asked = all_names(schemes, "--schemes") or None
        lens, generator = fl.Lens(inputs.problem(model)), generator_of(seed)
        compressing = partial(fl.compression, schemes=asked, budget=budget, level=level, trials=trials)
        inputs.how.announced(bar, lens, compressing)
        found = compressing(lens, generator=generator, progress=bar)
        kept = True
        if plan is not None:
            text = json.dumps(terminal.plain(found.plan), indent=1) + "\n"
            kept = terminal.written("--plan", lambda: write_whole(plan, text.encode()))
        terminal.page_beside(page, bar, partial(write_compression_page, found))
    if as_json:
        tables = {"layers": found.frame(), "correlations": found.correlations()}
        rows = {name: table.to_dict("records") for name, table in tables.items()}
        show_json({"answer": found.answer, "about": found.about, **rows, "plan": found.plan})
    else:
        show(compression_screen(found))
    return 0 if kept else 2


Files = Annotated[Sequence[Path], Parameter(negative="", show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class Compared:
    """The networks to compare, and their data."""

    data: str | None = None
    """The data, as for `flatlens measure`; the same for all. Networks of studies have their own, which must agree."""

    test: str | None = None
    """Held-out data in the same forms: shows the generalisation gap, and each measure's agreement with it."""

    loss: str | None = None
    """The loss, as for `flatlens measure`; the same for all."""

    weights: Files = ()
    """Weights to load, as for `flatlens measure`: one file for each MODEL, in order, or several for one MODEL;
    separated by commas, or repeat the option."""

    name: Names = ()
    """Names for the networks, in order, separated by commas, or repeat the option. Without it: the parts in which their
    files or folders differ."""

    group: Names = ()
    """A group of networks, as `NAME=FILE,FILE`: weights for the one MODEL, or MODELs where none is given. Repeat the
    option for each group; each is compared with the first one."""

    paired: Annotated[bool, Flag] = False
    """The networks at the same place of each group are a pair: they share a seed."""

    how: How = How()  # noqa: RUF009 (frozen)

    def groups(self, models: Sequence[str]) -> dict[str, list[str]]:
        """Return what each --group names."""
        found: dict[str, list[str]] = {}
        for given in self.group:
            name, equals, networks = given.partition("=")
            if not equals or not name or not split_names(networks):
                raise BadInput(f"--group {given}: expected NAME=FILE,FILE, such as SGD=a.pt,b.pt")
            found[name] = [*found.get(name, []), *split_names(networks)]
        if found and (len(models) > 1 or self.weights or self.name):
            raise BadInput("--group names the networks: give at most one MODEL, and neither --weights nor --name")
        sizes = {len(of) for of in found.values()}
        if len(found) == 1 or (self.paired and len(sizes) != 1):
            raise BadInput("--group: expected at least two groups, and groups of one size with --paired")
        return found

    def problems(self, models: Sequence[str], groups: Mapping[str, Sequence[str]]) -> dict[str, Problem]:
        """Return a problem for every checkpoint, by name; the data is read once."""
        pairs: list[tuple[str, Path | None]]
        if groups:
            labels = [(group, number, network) for group, of in groups.items() for number, network in enumerate(of, 1)]
            names = [f"{group} {number}" for group, number, _ in labels]
            given = [network for _, _, network in labels]
            pairs = [(models[0], Path(one)) for one in given] if models else [(one, None) for one in given]
        else:
            # the files of --weights: one with commas in its name is one; a whole list may be too long for a name
            files: list[Path] = []
            for of in self.weights:
                files += [of] if os.path.exists(of) else map(Path, split_names(str(of)))  # noqa: PTH110
            if len(models) < 2 and not (models and len(files) >= 2):
                got = f"{len(models)} MODEL{'' if len(models) == 1 else 's'} and {len(files)} --weights"
                mend = "name two, or one with several --weights"
                raise BadInput(f"expected at least two networks, got {got}", argument="model", remedy=mend)
            if len(models) > 1 and files and len(files) != len(models):
                read = [model for model in models if Path(model).is_file() and Path(model).suffix not in ("", ".py")]
                mend = f" ({read[0]} was read as a MODEL: repeat --weights before each file)" if read else ""
                what = f"{len(files)} for {len(models)} MODELs: give one for each, in order, or none{mend}"
                raise BadInput(f"--weights: {what}")
            at = models if len(models) > 1 else [*models] * len(files)
            pairs = [(model, files[place] if files else None) for place, model in enumerate(at)]
            names = self._names(pairs)
        found: dict[str, Problem] = {}
        for name, (model, weights) in zip(names, pairs, strict=True):
            inputs = Inputs(self.data, self.test, self.loss, weights, self.how)
            try:
                found[name] = inputs.problem(model, next(iter(found.values()), None))
            except BadInput as error:
                raise error.but(where=f"{error.where} [{name}]".strip()) from error
        return found

    def _names(self, pairs: Sequence[tuple[str, Path | None]]) -> list[str]:
        """Return the given names, or the parts in which the checkpoints' names differ."""
        given = all_names(self.name, "--name")
        if given:
            if len(given) != len(pairs) or len(set(given)) != len(given):
                raise BadInput(f"--name {','.join(given)}: expected {len(pairs)} different names, one for each network")
            return given
        labels = [model if file is None else str(file) for model, file in pairs]
        if len({model for model, _ in pairs}) > 1 and len(set(labels)) < len(pairs):
            labels = [model if file is None else f"{model} {file}" for model, file in pairs]
        return unique(labels)


@or_cost
def compare(
    *models: str,
    compared: Compared = Compared(),
    measures: Names = (),
    page: Path | None = None,
    seed: Whole = 0,
    as_json: Json = False,
) -> None:
    """Compare checkpoints, or groups of checkpoints: which is best, which is flattest, and how certain it is.

    For example:

        flatlens compare net.py:build --weights epoch1.pt --weights epoch9.pt --data net.py:samples --loss cross_entropy
        flatlens compare net.py:build --group SGD=1.pt,2.pt,3.pt --group SAM=4.pt,5.pt,6.pt --paired --data digits
        flatlens compare runs/digits/networks/0123456789ab runs/digits/networks/ba9876543210 --page compared.html

    Args:
        models: Two or more, as for `flatlens measure`; or one, with several --weights or --group.
        compared: The networks to compare, and their data.
        measures: The measures to rank by, separated by commas, or repeat the option; `flatlens list measures` has the
            names. Or a preset, as for `flatlens measure`. Without it: `summary`.
        page: Write an HTML page.
        seed: Seed of the random numbers of estimates, the same for every network.
        as_json: Print JSON.
    """
    groups = compared.groups(models)
    named = [*models, *(network for of in groups.values() for network in of)]
    with reading(named, compared.how, page) as bar:
        import flatlens as fl
        from flatlens.comparing.measuring import require_alike
        from flatlens.report.compare import compare_screen, group_screen, write_compare_page, write_group_page

        problems = compared.problems(models, groups)
        lenses = {name: fl.Lens(problem) for name, problem in problems.items()}
        # networks that cannot be compared are refused before the trial, which tells what the work takes
        require_alike(lenses)
        generator = generator_of(seed)
        names = all_names(measures, "--measures") or None
        compared.how.announced(bar, next(iter(lenses.values())), partial(fl.measure, measures=names), len(lenses))
        anyway, paired = compared.how.anyway, compared.paired
        if groups:
            each = iter(lenses.values())
            of = {group: [next(each) for _ in networks] for group, networks in groups.items()}
            grouped = fl.compare(
                None, names, groups=of, paired=paired, anyway=anyway, generator=generator, progress=bar
            )
            terminal.page_beside(page, bar, partial(write_group_page, grouped))
        else:
            found = fl.compare(lenses, names, anyway=anyway, generator=generator, progress=bar)
            terminal.page_beside(page, bar, partial(write_compare_page, found))
    # JSON has the answer first, as the screen has, then every number
    if not as_json:
        show(group_screen(grouped) if groups else compare_screen(found))
    elif groups:
        show_json({
            "answer": grouped.answer, "not_ranked": [asdict(one) for one in grouped.not_ranked.values()],
            "about": grouped.about, "groups": grouped.groups, "paired": grouped.paired,
            "differences": grouped.frame().to_dict("records"),
            "networks": grouped.networks.networks().to_dict("records"), "notes": grouped.networks.notes,
        })  # fmt: skip
    else:
        agreement = found.agreement()
        rankings = {
            name: {"kendall_w": one.value, "p": one.p, "networks": one.n, "method": one.method, "note": one.note}
            for name, one in (("all", agreement.overall), ("survive_rescalings", agreement.surviving))
        }
        show_json({
            "answer": found.answer, "not_ranked": [asdict(one) for one in found.not_ranked.values()],
            "about": found.about, "ranks": found.frame().to_dict("records"),
            "networks": found.networks().to_dict("records"),
            "agreement": {
                **rankings, "left_out": agreement.left_out, "taus": agreement.taus.to_dict("index"),
                "with_gap": agreement.gap.to_dict("records"), "remarks": agreement.remarks,
            },
            "notes": found.notes,
        })  # fmt: skip


def unique(labels: Sequence[str]) -> list[str]:
    """Return short names that differ, without shared folders and a shared ending; numbered if all are equal.

    >>> unique(["runs/a/epoch1.pt", "runs/a/epoch9.pt"]), unique(["net.py:wide", "net.py:deep"])
    (['epoch1', 'epoch9'], ['wide', 'deep'])
    >>> unique(["a/last.pt", "b/last.pt"]), unique(["net.py:build", "net.py:build"])
    (['a/last', 'b/last'], ['build 1', 'build 2'])
    """
    parts = [label.replace(".py:", "/").rstrip("/").split("/") for label in labels]
    endings = {Path(part[-1]).suffix for part in parts}
    if len(endings) == 1 and "" not in endings and all("." not in ending[1:] for ending in endings):
        parts = [[*part[:-1], Path(part[-1]).stem] for part in parts]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-length:]) for part in parts]
        if len(set(short)) == len(labels):
            return short
    last = [part[-1] for part in parts]
    return [f"{name} {number}" for number, name in enumerate(last, 1)]
