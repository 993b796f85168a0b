"""Options, places and layouts that cannot be used: one line, before anything is changed; reports in damaged files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from networks import module_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.errors import BadData, BadFolder, BadInput, BadModel, UnknownName

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 2


def problem(model: nn.Module | None = None, data: object = (X, Y), **options: object) -> fl.Problem:
    return fl.Problem(nn.Linear(3, 2) if model is None else model, "cross_entropy", data, **options)


class Rounds(nn.Linear):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(3, 2)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(self.dtype)


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("extra", buffer)
    return model


def with_weight(weight: torch.Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(weight)
    return model


SPARSE = r"a sparse tensor cannot be split into samples: convert it with to_dense\(\)"
REFUSED = {
    "integer outputs": (lambda: problem(Rounds(torch.int64)), BadModel, "outputs are torch.int64, but"),
    "boolean outputs": (lambda: problem(Rounds(torch.bool)), BadModel, "outputs are torch.bool"),
    "a model without numbers": (lambda: problem(nn.Linear(3, 2, device="meta")), BadModel, "'weight' is on the meta"),
    "a buffer without numbers": (lambda: problem(with_buffer(torch.ones(2, device="meta"))), BadModel, "'extra' is on"),
    "x without numbers": (lambda: problem(data=(X.to("meta"), Y)), BadData, r"data=.*meta device has no values"),
    "y without numbers": (lambda: problem(data=(X, Y.to("meta"))), BadData, "meta device"),
    "test data without numbers": (lambda: problem(test=(X.to("meta"), Y)), BadData, "test=.*meta device"),
    "sparse x": (lambda: problem(data=(X.to_sparse(), Y)), BadData, SPARSE),
    "sparse x by rows": (lambda: problem(data=(X.to_sparse_csr(), Y)), BadData, SPARSE),
    "sparse x of a loader": (lambda: problem(data=DataLoader([(X[0].to_sparse(), 0)], collate_fn=lambda rows: (
        torch.stack([rows[0][0]]), torch.tensor([0])))), BadData, SPARSE),
    "nested x": (lambda: problem(data=(torch.nested.nested_tensor([X[0], X[1]]), Y[:2])), BadData, "nested"),
    "labels in words": (lambda: problem(data=DataLoader(list(zip(X, "abababab", strict=True)))), BadInput,
    "the labels are text: number the classes 0, 1, "),
    "x in eight bits": (lambda: problem(data=(X.to(torch.float8_e4m3fn), Y)), BadData, r"with .float\(\)"),
    "a weight in eight bits": (lambda: problem(with_weight(torch.ones(2, 3).to(torch.float8_e4m3fn))), BadModel,
    "float8"),
    "a sparse weight": (lambda: problem(with_weight(torch.ones(2, 3).to_sparse())), BadModel, "'weight' is sparse"),
    "no ranks": (lambda: problem(ranks=None), BadInput, r"ranks=None.*Ranks.joined"),
    "a number of ranks": (lambda: problem(ranks=2), BadInput, r"ranks=2"),
    "a parameter's number": (lambda: problem(parameters=[5]), BadInput, r"parameters=\[5\].*names"),
    "a parameter itself": (lambda: problem(parameters=[nn.Linear(3, 2).weight]), BadInput, r"\[Parameter\].*names"),
    "data as the loss": (lambda: fl.Problem(nn.Linear(3, 2), (X, Y), "mse"), BadInput, "got Tensor: the order is"),
    "a scripted part": (lambda: problem(nn.Sequential(torch.jit.script(nn.Linear(3, 2)))), BadModel,
    "'0' is a ScriptModule, which has no hooks"),
    "an exported network": (lambda: problem(torch.export.export(nn.Linear(3, 2), (X,)).module()), BadModel,
    r"eval\(\) failed \(NotImplementedError.*torch.export, pass the nn.Module"),
    "a number as forward": (lambda: problem(forward=3), BadInput, r"forward=.*expected a function .*, got int"),
    "outputs alone of forward": (lambda: problem(forward=lambda model, batch: model(batch[0])), BadInput,
    r"must return \(outputs, targets\).*, got Tensor"),
    "a list of names": (lambda: problem(parameters=[["weight"]]), BadInput, r"list of parameter names"),
    "memory of 400 digits and a dot": (lambda: problem(memory="9" * 400 + ".5"), BadInput, "expected a size"),
    "memory that is true": (lambda: problem(memory=True), BadInput, "expected a size"),
    "a frame of words": (lambda: problem(data=(pd.DataFrame({"a": ["b"] * 8}), Y)), BadData, "cannot read a DataFrame"),
    "a generator's number": (lambda: fl.measure(fl.Lens(problem()), "mls", generator=5), BadInput,
    "measure.generator="),
    "progress of no function": (lambda: fl.measure(fl.Lens(problem()), "mls", progress=5), BadInput, "progress=5"),
    "a tracker's step": (lambda: fl.Tracker(problem(), "mls", live=False).step(2**63), BadInput, "below 2.*63"),
    "transforms of no kind": (lambda: fl.check_invariance(fl.Lens(problem()), "mls", 5), BadInput, "transforms.*5"),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:expandable", "ignore:.torch.jit.script"
)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_gets_one_line(what: str) -> None:
    make, error, words = REFUSED[what]
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_outputs_that_are_not_as_many_everywhere() -> None:
    class Widens(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            f = super().forward(x)
            return torch.cat([f, f], 1) if bool((x == 7).any()) else f

    x = torch.cat([X, 7 * torch.ones(2, 3)])
    data = DataLoader([(row, 0) for row in x], batch_size=4)
    with pytest.raises(BadModel, match="2 outputs for the samples before 8, and 4 for sample 8"):
        fl.Problem(Widens(3, 2), "cross_entropy", data)


def test_what_other_tools_hold_is_read() -> None:
    model = nn.Linear(3, 2)
    forms = [(X, Y), (pd.DataFrame(X.numpy()), pd.Series(Y.numpy())), (np.asarray(X), Y.tolist())]
    losses = [fl.measure(fl.Lens(problem(model, form)), "loss")["loss"].value for form in forms]
    assert losses == [losses[0]] * 3


def test_a_sparse_buffer_is_left_alone() -> None:
    class Mixes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("mix", torch.eye(3).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.sparse.mm(self.mix, x.T).T)

    model = Mixes()
    report = fl.measure(fl.Lens(problem(model)), ["mls"])
    assert report["mls"].value == pytest.approx(float(torch.linalg.matrix_norm(model.weight.detach(), 2)), rel=1e-6)


def report() -> fl.Report:
    return fl.measure(fl.Lens(problem(nn.Linear(3, 2).double())), ["mls", "ggn_trace"])


KEYS = [
    5,
    None,
    ("mls",),
    ("mls", "", ""),
    ("mls", 5),
    (5, "mls"),
    [],
    ["mls"],
    {},
    "",
    object(),
    ("mls", []),
    ([], None),
]


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_a_key_that_is_none(key: object) -> None:
    with pytest.raises(UnknownName, match=r"report\[|measure .* in this report|layer .* in the values") as caught:
        report()[key]
    assert "\n" not in str(caught.value)
    assert key not in report()


PATHS = [None, 5, "", ".", b"abc", "a\0b", "x" * 300, "no/such/folder/r", [], Path("/")]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path)[:20])
def test_paths_that_are_none(path: object) -> None:
    with pytest.raises(BadFolder, match=r"Report\.save") as caught:
        report().save(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match=r"Report\.load") as caught:
        fl.Report.load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadFolder, match=r"Tracker\.save") as caught:
        fl.Tracker(problem(), "mls", live=False).save(path)
    assert "\n" not in str(caught.value)


def test_no_flipped_bit_gives_other_numbers(tmp_path) -> None:
    saved = report()
    saved.save(tmp_path / "r")
    content, told = (tmp_path / "r").read_bytes(), repr(dict(saved))
    assert repr(dict(fl.Report.load(tmp_path / "r"))) == told
    refused = 0
    for at in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at // 3 % 8
        (tmp_path / "r").write_bytes(flipped)
        try:
            found = fl.Report.load(tmp_path / "r")
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017 (both ways are right, and looked at)
        else:
            assert repr(dict(found)) == told
            assert found.about == saved.about
            assert all(torch.equal(found[key].samples, e.samples) for key, e in saved.items() if e.samples is not None)
    assert refused > 0.9 * len(range(0, len(content), 3))


def test_a_report_of_a_version_without_checksums_is_read(tmp_path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    saved = report()
    saved.save(tmp_path / "r")
    with safe_open(tmp_path / "r", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        kept = ("flatlens.report", "flatlens.seconds")
        header = {name: text for name, text in file.metadata().items() if name in kept}
    save_file(tensors, tmp_path / "old", metadata=header)
    assert repr(dict(fl.Report.load(tmp_path / "old"))) == repr(dict(saved))


def drawn_batches(rng: random.Random) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One to four batches, of equal or of different sizes, for regression or classification."""
    shape, classes, size = rng.choice([(3,), (2, 3)]), rng.random() < 0.5, rng.randint(1, 5)
    sizes = [size if rng.random() < 0.6 else rng.randint(1, 5) for _ in range(rng.choice([1, 2, 2, 3, 4]))]
    return [(torch.randn(k, *shape), torch.randint(2, (k,)) if classes else torch.randn(k, 2)) for k in sizes]


@pytest.mark.parametrize("seed", range(30))
def test_a_list_of_batches_or_samples_is_never_guessed(seed: int) -> None:
    """The line names DataLoader, and what it says works: every batch or sample once."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batches = drawn_batches(rng)
    samples = [(a, b if b.ndim else int(b)) for x, y in batches for a, b in zip(x, y, strict=True)]
    held = rng.choice([batches, samples])
    data = rng.choice([list, tuple])(rng.choice([tuple, list])(item) for item in held)
    net, loss = nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), "cross_entropy" if batches[0][1].ndim == 1 else "mse"
    net(batches[0][0])
    with pytest.raises(BadData, match=r"give DataLoader\((list\()?data\)?, batch_size=None\)") as caught:
        fl.Problem(net, loss, iter(data) if rng.random() < 0.1 else data)
    assert "\n" not in str(caught.value)
    told = DataLoader(data, batch_size=None if held is batches else 256)  # type: ignore[arg-type]
    x, y = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    expected = fl.measure(fl.Lens(fl.Problem(net, loss, (x, y))), "loss")["loss"].value
    assert fl.measure(fl.Lens(fl.Problem(net, loss, told)), "loss")["loss"].value == pytest.approx(expected, rel=1e-5)


def two_inputs() -> nn.Module:
    return module_of(lambda net, a, b: (net.one(a + b), net.two(b)), one=(3, 3), two=(3, 3))


def test_two_inputs_with_two_targets_are_one_batch() -> None:
    a, b, c, d = torch.randn(4, 6, 3)
    net = two_inputs()
    truth = float((net(a, b)[0] - c).square().mean() + (net(a, b)[1] - d).square().mean())
    with pytest.raises(BadData, match=r"DataLoader\(\[data\], batch_size=None\) if it is one batch"):
        fl.Problem(net, "mse", ((a, b), (c, d)))
    forms = {
        "told": DataLoader([((a, b), (c, d))], batch_size=None),
        "of other widths": ((a, b), (c, d[:, :3].double())),
    }
    for data in forms.values():
        assert fl.measure(fl.Lens(fl.Problem(net, "mse", data)), "loss")["loss"].value == pytest.approx(truth, rel=1e-5)
    assert fl.Problem(net, "mse", ((a, b), (a, b))).n == 6  # reconstructed


@pytest.mark.parametrize(
    "data", [X, X.numpy(), TensorDataset(X), DataLoader(X, batch_size=3), DataLoader(TensorDataset(X), batch_size=3)]
)
def test_data_without_targets(data: object) -> None:
    net = nn.Linear(3, 3)
    with pytest.raises(BadData, match=r"the data have no targets: give \(x, x\) for an autoencoder.*forward="):
        fl.Problem(net, "mse", data)

    def forward(model: nn.Module, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        x = batch[0] if isinstance(batch, tuple) else batch
        assert isinstance(x, torch.Tensor)
        return model(x), x

    found, truth = fl.Problem(net, "mse", data, forward=forward), fl.Problem(net, "mse", (X, X))
    values = [fl.measure(fl.Lens(each), "loss")["loss"].value for each in (found, truth)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_images_of_two_sizes_name_the_list() -> None:
    images = [(torch.randn(1, k, k), k % 2) for k in (3, 4, 5)]
    with pytest.raises(BadData, match=r"do not go into one batch.*or returns them as a list"):
        fl.Problem(nn.Linear(3, 2), "cross_entropy", DataLoader(images, batch_size=2))  # type: ignore[arg-type]
