"""Tables, figures and the page: the only place that draws."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatlens.report.page import write_study_page as write_study_page

__all__ = ["write_study_page"]


def __getattr__(name: str) -> Any:  # tables in a terminal need none of the packages that draw
    if name not in __all__:
        raise AttributeError(f"module 'flatlens.report' has no attribute {name!r}")
    from flatlens.report.page import write_study_page

    return write_study_page
