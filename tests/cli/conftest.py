"""What every test of the command line needs."""

from collections.abc import Callable

import pytest

from flatlens import cli


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress, however slow the machine is."""
    for module in ("progress", "cli.terminal"):
        monkeypatch.setattr(f"flatlens.{module}.DELAY", 1e6)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must end with 2, silent but for one line on stderr; the line comes back."""

    def run(*arguments: str) -> str:
        status = cli.run(arguments)
        out, err = capsys.readouterr()
        assert status == 2, (status, out, err)
        assert out == ""
        assert err.startswith("flatlens: ")
        assert err.count("\n") == 1, err
        return err

    return run
