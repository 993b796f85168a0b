import pytest

from flatlens.errors import BadInput, UnknownName
from flatlens.experiments.settings import KNOWN
from flatlens.experiments.specification import assignment, expression, load_yaml, values
from flatlens.models import MLP
from flatlens.training import SAM, SGD, RelativeFlatness, Steps


def test_values_as_they_are_written():
    for text, value in [
        ("0.1", 0.1), ("-3", -3), ("1e-3", 1e-3), ("True", True), ("None", None), ("relu", "relu"), ("'relu'", "relu"),
        ("(64, 32)", (64, 32)), ("[64, 32]", (64, 32)), ("SAM", SAM()), ("SAM(0.2)", SAM(0.2)),
        ("SGD(lr=0.1, momentum=0.9)", SGD(0.1, 0.9)), ("Steps(at=(50, 80))", Steps((50, 80))),
        ("(RelativeFlatness(0.1, all),)", (RelativeFlatness(0.1, "all"),)),
        ("MLP(inputs=2, widths=(3,), outputs=1)", MLP(2, (3,), 1)),
    ]:  # fmt: skip
        assert expression(text, KNOWN) == value


def test_several_values():
    assert values("0.05, 0.1", KNOWN) == (0.05, 0.1)
    assert values("0:4", KNOWN) == (0, 1, 2, 3)
    assert values("10:0:-5", KNOWN) == (10, 5)
    assert values("relu,tanh", KNOWN) == ("relu", "tanh")
    assert values("None,SAM(0.1)", KNOWN) == (None, SAM(0.1))
    assert values("(64,64),(32,)", KNOWN) == ((64, 64), (32,))
    assert assignment("lr = 0.1,0.2", KNOWN) == ("lr", (0.1, 0.2))


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("0.1 0.2", BadInput, "is not a setting"),
        ("__import__('os').system('true')", BadInput, "is not a setting"),
        ("open('x')", UnknownName, "unknown settings 'open'"),
        ("SAMM(0.1)", UnknownName, "did you mean SAM"),
        ("SAM(radius=1)", BadInput, "unknown setting 'radius' of SAM"),
        ("SAM(-1)", BadInput, "must not be negative"),
        ("[x for x in (1, 2)]", BadInput, "is not a setting"),
    ],
)
def test_what_is_no_setting_is_refused_in_a_line_and_never_run(text, error, said):
    with pytest.raises(error, match=said) as caught:
        expression(text, KNOWN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "5:5", " "])
def test_no_value_at_all_is_refused(text):
    with pytest.raises(BadInput):
        values(text, KNOWN)


def test_an_assignment_needs_a_name_and_a_value():
    for text in ("lr", "=0.1", ""):
        with pytest.raises(BadInput, match="NAME=VALUE"):
            assignment(text, KNOWN)


def test_exponents_in_yaml_are_numbers_as_in_python(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(
        "a: [1e-3, -2.5E4, 1.e+2, .5e1, 3, 1e, e3, '1e3']\nb: {lr: 5e-2}\nc: &c {x: 1}\nd: {<<: *c, x: 2}\n"
    )
    assert load_yaml(file) == {
        "a": [1e-3, -2.5e4, 100.0, 5.0, 3, "1e", "e3", "1e3"], "b": {"lr": 0.05}, "c": {"x": 1}, "d": {"x": 2}
    }  # fmt: skip


def test_yaml_is_read_and_what_is_none_refused(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("data: {name: digits}\nset: {lr: [0.1, 0.2]}\n")
    assert load_yaml(file) == {"data": {"name": "digits"}, "set": {"lr": [0.1, 0.2]}}
    for content, said in [
        ("a: [1", "is not YAML"),
        ("- 1", "must be a mapping"),
        ("!!python/object:os.system x", "is not YAML"),
        ("data: digits\nset: {}\ndata: patches", "names data twice"),
        ("data: digits\nset: {lr: 0.1, lr: 0.2}", "names lr twice"),
    ]:
        file.write_text(content)
        with pytest.raises(BadInput, match=said) as caught:
            load_yaml(file)
        assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="cannot be read"):
        load_yaml(tmp_path / "none.yaml")
