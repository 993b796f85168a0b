"""Projections and heads of attention: their rows and columns as the code has them, their numbers from Hessians."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from literal import definition_3
from literal_curvature import along_columns, least
from literal_modern import Literal, close, top
from modern import case
from torch import Tensor, nn

import flatlens as fl
from flatlens.grams import lay_out, planner
from flatlens.grams.plan import Rows
from flatlens.operations.graph import LEAF

MEASURED = [
    "relative_flatness", "relative_flatness_ggn", "kappa_trace", "neuron_flatness", "neuron_flatness_ggn",
    "matrix_normalized_sharpness", "normalized_sharpness",
]  # fmt: skip
HEADS = [[0, 1], [2, 3]]  # two heads of two features


def fused(layer: str, reader: str) -> dict[str, tuple[list[int] | None, list[int] | None]]:
    """(rows, columns) of every part where queries, keys and values lie below each other in one weight."""
    found: dict[str, tuple[list[int] | None, list[int] | None]] = {}
    for number, kind in enumerate(("query", "key", "value")):
        rows = [[4 * number + at for at in head] for head in HEADS]
        found |= {f"{layer}/{kind}": ([at for head in rows for at in head], None)}
        found |= {f"{layer}/{kind}/{head}": (mine, None) for head, mine in enumerate(rows)}
    return found | {f"{reader}/output/{head}": (None, columns) for head, columns in enumerate(HEADS)}


def apart(layer: str, reader: str) -> dict[str, tuple[list[int] | None, list[int] | None]]:
    """The same where each of them has a weight."""
    found = {
        f"{layer}.{kind}/{kind}/{h}": (rows, None) for kind in ("query", "key", "value") for h, rows in enumerate(HEADS)
    }
    return {**found, **{f"{reader}/output/{head}": (None, columns) for head, columns in enumerate(HEADS)}}


PARTS = {
    "vit-sdpa": fused("blocks.0.attn.qkv", "blocks.0.attn.proj"),
    "vit-mha": fused("blocks.0.attn.mha.in_proj_weight", "blocks.0.attn.mha.out_proj.weight"),
    "vit-crossed": fused("blocks.0.attn.mha.in_proj_weight", "blocks.0.attn.mha.out_proj.weight"),
    "gpt2": fused("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"),
    "bert": apart("bert.encoder.layer.0.attention.self", "bert.encoder.layer.0.attention.output.dense"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_the_rows_and_columns_that_the_network_reads_apart(name: str) -> None:
    this = case(name, "cross_entropy")
    parts = fl.Lens(fl.Problem(this.net, this.loss, this.data), outputs="exact", attention_heads=True).plan.parts
    first = list(PARTS[name])
    found = {
        part: tuple(None if at is None else at.tolist() for at in (weight.rows, weight.columns))
        for part, weight in parts.items()
        if part in first
    }
    assert found == PARTS[name]
    assert len(parts) == 2 * len(first)  # of two blocks


@pytest.mark.parametrize("name", ["vit-sdpa", "vit-crossed", "gpt2"])
def test_numbers_of_parts_are_those_of_their_block_of_the_hessian(name: str) -> None:
    this = case(name, "cross_entropy")
    problem, truth = fl.Problem(this.net, this.loss, this.data), Literal(this)
    lens = fl.Lens(problem, outputs="exact", attention_heads=True)
    report, whole = fl.measure(lens, MEASURED), fl.measure(fl.Lens(problem, outputs="exact"), MEASURED)
    for key, estimate in whole.items():  # parts count in no sum and change no other row
        close(report[key].value, estimate.value)
    for part, (rows, columns) in PARTS[name].items():
        weight = lens.plan.parts[part]
        parameter, transposed = weight.parameter, name == "gpt2"
        value = truth.values[parameter].T if transposed else truth.values[parameter]
        at = torch.arange(value.numel()).reshape(value.shape)
        at = at[slice(None) if rows is None else rows][:, slice(None) if columns is None else columns]
        W = value.flatten()[at] if not transposed else value.reshape(-1)[at]
        H, GN = (truth.block(A, parameter, transposed)[at.flatten()][:, at.flatten()] for A in (truth.H, truth.GN))
        close(report["relative_flatness", part].value, definition_3(H, W, 1), 1e-8)
        close(report["relative_flatness_ggn", part].value, definition_3(GN, W, 1))
        close(report["kappa_trace", part].value, W.square().sum() * H.trace(), 1e-8)
        held = nn.Linear(W.shape[1], W.shape[0], bias=False)
        held.weight = nn.Parameter(W)
        close(report["neuron_flatness", part].value, along_columns(H, held).sum(), 1e-8)
        close(report["neuron_flatness_ggn", part].value, along_columns(GN, held).sum())
        squares = truth.mean(
            lambda i, p=parameter, at=at, t=transposed: _columns(truth, i, p, t)[:, at.flatten()].square().sum()
        )
        close(report["matrix_normalized_sharpness", part].value, top(W) * squares**0.5)
        close(report["normalized_sharpness", part].value, least(GN.diagonal().reshape(W.shape), W.square() / 4), 1e-7)


def _columns(truth: Literal, i: int, parameter: str, transposed: bool) -> Tensor:
    """Sample i's Jacobian in a weight, in the order of its matrix's rows."""
    J = truth.columns(truth.J[i], parameter).reshape(-1, *truth.values[parameter].shape)
    return (J.mT if transposed else J).flatten(1)


def test_features_of_parts_have_the_units_of_the_whole_weight() -> None:
    """A layer's features divided by their spread are those of its parts; columns of the reader have their own."""
    this = case("vit-sdpa", "cross_entropy")
    lens = fl.Lens(fl.Problem(this.net, this.loss, this.data), outputs="exact", attention_heads=True)
    scale = lens.feature_scale()
    assert torch.equal(scale["blocks.0.attn.qkv/key/1"], scale["blocks.0.attn.qkv"])
    assert torch.equal(scale["blocks.0.attn.proj/output/1"], scale["blocks.0.attn.proj"][:, 2:])
    key = "relative_flatness_ggn(normalized='std')"
    plain = fl.measure(lens, ["relative_flatness_ggn", key])
    with torch.no_grad():  # the features in other units, the same function
        spread = scale["blocks.0.attn.qkv"][0]
        this.net.blocks[0].norm1.weight.div_(spread)
        this.net.blocks[0].norm1.bias.div_(spread)
        this.net.blocks[0].attn.qkv.weight.mul_(spread)
    lens = fl.Lens(fl.Problem(this.net, this.loss, this.data), outputs="exact", attention_heads=True)
    moved = fl.measure(lens, ["relative_flatness_ggn", key])
    for part in ("blocks.0.attn.qkv/query", "blocks.0.attn.qkv/value/1"):
        close(moved[key, part].value, plain[key, part].value)
        close(moved["relative_flatness_ggn", part].value, plain[key, part].value)
        assert abs(moved["relative_flatness_ggn", part].value / plain["relative_flatness_ggn", part].value - 1) > 0.01


def test_no_place_is_tested_twice_where_a_plan_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    tested = planner.independent_rows

    def counted(f: Tensor, at: Mapping[str, Any], *given: Any) -> dict[str, list[Rows]]:
        places.append(len(at))
        return tested(f, at, *given)

    monkeypatch.setattr(planner, "independent_rows", counted)
    this = case("bert", "cross_entropy")
    problem = fl.Problem(this.net, this.loss, this.data)
    lay_out(problem, problem.model)
    first, again = places[: len(problem.probes)], places[len(problem.probes) :]
    assert min(first) > 0
    assert again
    assert max(again) == 0


class Mark:
    """Lies in a node, and lives as long as it."""


def test_two_graphs_of_trials_are_held_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the first, and that of the one whose turn it is; plans are those of trials that keep theirs."""
    this, graphs, most = case("bert", "cross_entropy"), list[list[ReferenceType[Mark]]](), 0
    problem, recorded = fl.Problem(this.net, this.loss, this.data), planner.run_recorded

    def weighed(*given: Any) -> tuple[Any, ...]:
        nonlocal most
        found = recorded(*given)
        marks = {node: Mark() for node in found[0].graph.nodes if node.name() != LEAF}
        graphs.append([ref(mark) for mark in marks.values()])
        for node, mark in marks.items():
            node.metadata["mark"] = mark
        most = max(most, sum(any(mark() is not None for mark in graph) for graph in graphs))
        return found

    one = lay_out(problem, problem.model)
    monkeypatch.setattr(planner, "run_recorded", weighed)
    problem.probes *= 5
    several = lay_out(problem, problem.model)
    assert most == 2
    assert (several.weights.keys(), several.rows) == (one.weights.keys(), one.rows)
    monkeypatch.setattr(planner.Trial, "forget", lambda trial: None)
    kept = lay_out(problem, problem.model)
    assert most == 6  # with that of the fused kernel
    assert kept.rows == several.rows
