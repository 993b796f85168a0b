"""A column's name is taken apart and put together again without loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatlens.column import Column, split_at_commas
from flatlens.deprecated_names import FormerName
from flatlens.distributions import RULES
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Report
from flatlens.measures import MEASURES
from flatlens.transforms.invariance import TRANSFORMS

WORDS = st.from_regex(r"[a-z_][a-z0-9_+ ]*", fullmatch=True)
VALUES = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text())
OPTIONS = st.dictionaries(WORDS, VALUES, max_size=3).map(
    lambda options: f"({', '.join(f'{name}={value!r}' for name, value in options.items())})" if options else ""
)
PARTS = st.lists(WORDS, max_size=3).map(".".join)
LAYERS = st.one_of(st.none(), st.text())
MEASURED = st.builds(
    lambda name, options, part, transform, layer: Column(name + options, part, transform, layer=layer),
    WORDS, OPTIONS, PARTS.filter(lambda part: part.rpartition(".")[2] not in ("lhs", "rhs")),
    st.sampled_from(["", *TRANSFORMS]), LAYERS,
)  # fmt: skip
SIDES = st.builds(
    lambda name, part, side, rule, layer: Column(name, part, layer=layer).of_side(side, rule),
    WORDS, PARTS.filter(lambda part: part.rpartition(".")[2] not in ("lhs", "rhs")),
    st.sampled_from(["lhs", "rhs"]), st.sampled_from(["", *RULES[1:]]), LAYERS,
)  # fmt: skip


@given(st.one_of(MEASURED, SIDES))
def test_a_column_is_read_back_from_its_name(column: Column) -> None:
    assert Column.parse(str(column)) == column
    assert Column.of(column.row, column.layer) == column


@given(st.one_of(st.text(), st.text(alphabet="ab.@[]()'\"=1\\, \n")))
def test_any_name_comes_back(name: str) -> None:
    assert str(Column.parse(name)) == name


@given(*[st.text(alphabet="ab.@[]()lhsr")] * 4, st.one_of(st.none(), st.text(alphabet="a.@[]")))
def test_fields_that_read_as_another_column_are_refused(
    measure: str, part: str, transform: str, rule: str, layer: str | None
) -> None:
    try:
        column = Column(measure, part, transform, rule, layer)
    except BadInput as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert Column.parse(str(column)) == column


NAMES = {
    "mls": Column("mls"),
    "mls[fc1]": Column("mls", layer="fc1"),
    "relative_flatness.sum": Column("relative_flatness", "sum"),
    "layer_sharpness.kappa@layerwise[fc3]": Column("layer_sharpness", "kappa", "layerwise", layer="fc3"),
    "local_volume(top_k=3)[blocks.0.norm1.weight]": Column("local_volume(top_k=3)", layer="blocks.0.norm1.weight"),
    "mls[fc:1]": Column("mls", layer="fc:1"),
    "mls[]": Column("mls", layer=""),
    "mls[a[0]@b]": Column("mls", layer="a[0]@b"),
    "sharpness(rtol=0.01).second": Column("sharpness(rtol=0.01)", "second"),
    "own(at='x).y@z[w]').max@permutation[fc]": Column("own(at='x).y@z[w]')", "max", "permutation", layer="fc"),
    "mls_chain.A_B.lhs[fc1]": Column("mls_chain", "A_B.lhs", layer="fc1"),
    "jacobian_generalisation.corrected.rhs@tight": Column("jacobian_generalisation", "corrected.rhs", rule="tight"),
    "training.optimiser": Column("training", "optimiser"),
    "penalties.0.coefficient": Column("penalties", "0.coefficient"),
    "batch_size+lr": Column("batch_size+lr"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_studies(name: str) -> None:
    assert Column.parse(name) == NAMES[name]
    assert str(NAMES[name]) == name


@pytest.mark.parametrize(
    "name",
    ["", "@layerwise", ".sum", "[fc1]", "mls@", "mls.", "mls@a@b", "mls(", "mls(top=')", "<b>alert(1)</b>\"'&"],
)
def test_a_name_of_another_form_is_a_measure(name: str) -> None:
    assert Column.parse(name) == Column(name)
    assert Column(name).measure == name


def test_a_transform_and_a_rule_are_told_apart() -> None:
    moved, tight = Column.parse("mls@layerwise"), Column("theorem").of_side("rhs", "tight")
    assert (moved.transform, moved.rule, moved.side) == ("layerwise", "", "")
    assert (tight.transform, tight.rule, tight.side) == ("", "tight", "rhs")
    assert str(tight) == "theorem.rhs@tight"
    for wrong in (("theorem", "rhs", "layerwise", ""), ("mls", "", "", "tight")):
        with pytest.raises(BadInput, match="would be read as another column"):
            Column(*wrong)


def test_a_column_after_a_transform_keeps_part_and_layer() -> None:
    moved, plain = NAMES["layer_sharpness.kappa@layerwise[fc3]"], Column.parse("layer_sharpness.kappa[fc3]")
    assert (plain.after("layerwise"), moved.after("")) == (moved, plain)
    with pytest.raises(BadInput, match="would be read as another column"):
        Column.parse("mls_chain.A_B.lhs").after("layerwise")  # sides of bounds are not measured after transforms


def test_a_list_is_split_at_the_commas_outside_brackets_of_any_kind() -> None:
    assert split_at_commas("a(1, 2), b[3,4] ,{5, (6, 7)}") == ["a(1, 2)", "b[3,4]", "{5, (6, 7)}"]
    assert split_at_commas(" a,, ") == ["a", "", ""]


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_has_a_column(name: str) -> None:
    assert Column.parse(name) == Column(name)
    assert Column.parse(name).name == name


def test_a_former_part_is_read_as_the_present_one() -> None:
    column = Column.parse("hessian_trace(exact=True).bending@layerwise[fc1]")
    assert str(column) == "hessian_trace(exact=True).functional_hessian@layerwise[fc1]"
    assert Column.parse("mine.bending").part == "bending"
    estimate = Estimate(1.0)
    report = Report({("hessian_trace.functional_hessian", None): estimate}, {})
    with pytest.warns(FormerName, match="functional_hessian"):
        assert report["hessian_trace.bending"] is estimate
    assert "hessian_trace.bending" in report
