"""Run a study into a folder, and read it back."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import fields, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import pandas as pd
from torch import nn

from flatlens.errors import BadFolder, BadInput
from flatlens.estimate import Progress
from flatlens.experiments.narrative import answer_of_study, findings, level_sentences
from flatlens.experiments.network import ComputeInto
from flatlens.experiments.quantities import GAP
from flatlens.experiments.result import StudyResult
from flatlens.experiments.runner import run_all
from flatlens.experiments.settings import NetworkSettings, Study, in_words, without_places
from flatlens.experiments.store import Store, clear_errors, digest_of, read_derived, versions, write_derived
from flatlens.experiments.tables import (
    Loaded,
    gap_correlations,
    groupings,
    kinds_of,
    level_differences,
    table_of,
    training_losses,
    unit_column,
    values_table,
    without_seeds,
)
from flatlens.models import Architecture
from flatlens.progress import by_key
from flatlens.statistics import relate_all, relate_within
from flatlens.training.optimisers import SGD, Ridge
from flatlens.training.settings import TrainedElsewhere, Training
from flatlens.training.stack import LANES, why_alone
from flatlens.training.stack.lanes import update_kind

Pack: TypeAlias = tuple[NetworkSettings, ...]


def packs(networks: Sequence[NetworkSettings], *, together: int, hands: int | None, pack: int) -> list[Pack]:
    """Return the networks in packs: of one kind each, in turns, large batches first, for their steps take longest.

    `together` may be trained in a stack (1: none), `hands` packs are worked on at a time (None: not known), and `pack`
    of the networks that no stack takes go to a worker at a time.
    """
    kinds = by_key((None if together == 1 else _kind(one), one) for one in networks)
    alone = kinds.pop(None, [])
    stacked = sum(map(len, kinds.values()))
    # at least three packs for each worker, so that none is idle for long; no small ones, as small stacks gain less; and
    # no large ones, as a lost pack is redone one by one
    size = LANES
    if hands is not None:
        size = min(max(-(-stacked // (3 * hands)), LANES), -(-stacked // hands) or 1, 64)
    batches = [getattr(alike[0].training, "batch_size", None) or math.inf for alike in kinds.values()]
    longest = sorted(zip(batches, kinds.values(), strict=True), key=lambda pair: -pair[0])
    turns = zip_longest(*(list(_pieces(alike, size)) for _, alike in longest))
    return [one for turn in turns for one in turn if one] + list(_pieces(alone, pack))


def _pieces(networks: Sequence[NetworkSettings], size: int) -> Iterator[Pack]:
    """Yield packs of at most `size` networks, as equal in size as possible."""
    count = -(-len(networks) // size)
    for number in range(count):
        yield tuple(networks[len(networks) * number // count : len(networks) * (number + 1) // count])


def _kind(settings: NetworkSettings) -> Hashable:
    """Return what networks in one stack must share; None where no stack takes them."""
    model, training = settings.model, settings.training
    if any(field.name == "seed" for field in fields(model)):
        model = replace(model, seed=0)
    if isinstance(training, TrainedElsewhere) or why_alone(nn.Linear(1, 1), training) or _of_model(model):
        return None
    assert not isinstance(training.optimiser, Ridge)
    return settings.data, model, training.loss, training.batch_size, update_kind(training.optimiser)


@cache
def _of_model(model: Architecture) -> str:
    try:
        return why_alone(model.build(), Training(SGD(1.0), max_steps=1))
    except Exception as error:  # the worker that builds it notes it as the failure of its network
        return type(error).__name__


class RunOptions(TypedDict, total=False):
    """Options for running a study: keyword arguments of `run_study`, and of all that runs studies."""

    workers: int
    executor: Executor | None
    pack: int
    together: int
    retry_failed: bool
    mixed: bool


def run_study(
    study: Study,
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    executor: Executor | None = None,
    pack: int = 1,
    together: int = LANES,
    known: StudyResult | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    mixed: bool = False,
) -> StudyResult:
    """Train and measure every network of the study that `out` does not hold yet, then relate them all.

    Killed and called again it carries on, and ends in the same digits. A study that has all networks of the one in
    `out`, and more, is added to it. Where nothing has changed, nothing is computed again.
    Beside the networks' folders it leaves the tables of `write_tables` in `out`.

    Args:
        study: what to run.
        out: a new or empty folder, or one where this study, or a part of it, was begun.
        workers: processes of one thread each.
        executor: run there instead; its workers must see `out` under the same path.
        pack: number of networks handed out at a time, of networks outside stacks.
        together: maximum number of networks in a stack, where stacks are faster; 1: train each network alone.
        known: the result of an earlier run: networks of the same settings are not trained again, and their rows are
            kept in `out`.
        progress: called with ("networks", done, total), and for each run under way with its settings, steps and most.
        retry_failed: run failed networks again; without it they stay recorded as failed.
        mixed: continue although the finished networks were computed with other versions or on another device.

    Raises:
        BadFolder: `out` holds networks that this study does not have, or other files; it cannot be written, or was
            begun with other versions; or no network could be finished.
    """
    for name, number in (("workers", workers), ("pack", pack), ("together", together)):
        if number < 1:
            raise BadInput(f"run_study({name}={number}): expected at least 1")
    store = Store.create(Path(out).absolute(), study)
    study = study.spelled_as(store.study())  # so that equal settings have equal keys
    todo = {settings.key: settings for settings in study.networks()}
    if known is not None:
        store.keep(known, todo, None if mixed else versions())
    finished = store.finished(todo)
    if len(finished) < len(todo) and not mixed:
        store.refuse_other_versions(finished, versions())
    over = {*finished, *([] if retry_failed else store.failed(todo))}
    run_all(
        [settings for key, settings in todo.items() if key not in over],
        ComputeInto(store, tell=progress is not None, together=together),
        store.write_failure,
        workers=workers,
        executor=executor,
        pack=lambda left: packs(left, together=together, hands=workers if executor is None else None, pack=pack),
        progress=progress,
        done=len(over),
        label=lambda settings: in_words(settings, study.varied),
        in_progress=lambda: store.in_progress(todo),
        count=lambda: len(store.finished(todo)),
    )
    result = load_study(out)
    write_tables(result, out)
    return result


def write_tables(result: StudyResult, out: str | os.PathLike[str]) -> None:
    """Write the networks and their relations as table.csv, relations.csv and gap.csv into the study's folder.

    Differences between the levels of axes of words go to differences.csv, values that were followed in training to
    histories.csv. derived.json keeps what `load_study` need not derive again.
    """
    store = Store.open(Path(out).absolute())
    always = {"table": result.networks, "relations": result.relations, "gap": result.gap_correlations}
    for name, table in (always | {"differences": result.differences, "histories": result.histories}).items():
        if name in always or len(table):
            store.write_table(f"{name}.csv", table)
    with clear_errors(store.out):
        write_derived(store.out / DERIVED, _digest(result), {name: getattr(result, name) for name in _DERIVED})


DERIVED = "derived.json"
_DERIVED = ("relations", "within", "gap_correlations", "differences", "findings", "answer")
"""The fields of a result that are derived from the others."""


def _digest(result: StudyResult) -> str:
    """Return the digest of what these fields are derived from."""
    return digest_of(result.settings, result.networks, result.curves, result.failed, result.unfinished)


def load_study(out: str | os.PathLike[str], *, again: bool = False) -> StudyResult:
    """Read the result of a study from its folders, complete or not.

    Args:
        out: the study's folder.
        again: derive the relations again, also if neither the networks nor flatlens have changed since.

    Raises:
        BadFolder: `out` holds no study, no finished network, or a damaged one.
    """
    store = Store.open(Path(out).absolute())
    study = store.study()
    keys = [settings.key for settings in study.networks()]
    finished = store.finished(keys)
    failed = store.failures(key for key in keys if key not in set(finished))
    if not finished:
        why = f"; the first error: {failed[0][1]}" if failed else ""
        raise BadFolder(f"no network of the study in {str(out)!r} is finished ({len(failed)} failed{why})")
    # the tables of the networks whose folders are here, then of others that an earlier run finished elsewhere
    here = [key for key in finished if store.folder(key).is_dir()]
    found = Loaded.of_records([store.read(key) for key in here], study.varied)
    there = {settings.key: settings for settings in study.networks() if settings.key in set(finished) - set(here)}
    for kept in store.kept():
        mine = [there.pop(key) for key in kept.networks["key"] if key in there]
        found = found.with_others(Loaded.of_result(kept, mine, study.varied), finished)
    # what is derived from the rest is empty yet
    nothing = pd.DataFrame()
    result = StudyResult(
        **vars(replace(found, seconds=round(found.seconds, 1))),
        values=values_table(found.networks, study.quantities),
        relations=nothing,
        within=nothing,
        gap_correlations=nothing,
        findings=[],
        quantities=study.quantities,
        settings=without_places(study.as_json()),
        failed=failed,
        unfinished=len(study.networks()) - len(found.networks) - len(failed),
        varied=study.varied,
    )
    known = None if again else read_derived(store.out / DERIVED, _digest(result))
    return replace(result, **(_derived(study, result) if known is None else known))


def _derived(study: Study, result: StudyResult) -> dict[str, Any]:
    """Return the relations between the quantities of a result, and what they say in words."""
    networks, values = result.networks, result.values
    included = networks[values["included"]].reset_index(drop=True)
    quantities = values.loc[values["included"], [q.name for q in study.quantities]].reset_index(drop=True)
    units = included[unit_column(study.varied)]
    relations = relate_all(quantities, units)
    within = relate_within(quantities, GAP.name, groupings(included, study.varied), units)
    settings, kinds = without_seeds(included, study.varied), kinds_of(included)
    losses = training_losses(included, result.curves)
    with_gap = gap_correlations(quantities, settings, study.quantities, units, kinds, losses)
    levels = level_differences(included, study.quantities, study.varied)
    left_out, unfinished, failed = len(networks) - len(included), result.unfinished, len(result.failed)
    return {
        "relations": relations,
        "within": within,
        "gap_correlations": with_gap,
        "differences": table_of(levels),
        "findings": [
            *(sentence for one in levels for sentence in level_sentences(one)),
            *findings(study, networks, relations, within, with_gap, unfinished, failed),
        ],
        "answer": answer_of_study(study, within, with_gap, levels, left_out + failed, unfinished),
    }
