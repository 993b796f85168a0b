"""Tables, figures and the page: the only place that draws."""

from flatlens.report.page import write_study_page

__all__ = ["write_study_page"]
