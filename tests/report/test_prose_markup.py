"""Code, formulas and sources in the sentences of a page."""

import re

from flatlens.papers import EXPERIMENTS
from flatlens.report.prose import cited, coded, quoted


def test_no_tex_is_left_in_any_quote_and_its_words_stay():
    quotes = {prediction.quote for one in EXPERIMENTS.values() for prediction in one.predictions}
    assert any("$" in quote for quote in quotes)
    for quote in quotes:
        shown = re.sub("<[^>]*>", "", quoted(quote).replace("&#39;", "'"))
        assert not set("$\\*") & set(shown), quote
        if not set("$\\*&<>\"'") & set(quote):
            assert shown == quote


def test_an_unknown_command_stays_and_nothing_becomes_markup():
    assert str(quoted(r"of $\unknown{x}$")) == r"of \unknown{x}"
    assert str(quoted("<b> *so* $a<b$")) == "&lt;b&gt; <em>so</em> a&lt;b"
    assert str(coded("<i> `<b>`")) == "&lt;i&gt; <code>&lt;b&gt;</code>"


def test_only_papers_that_are_named_are_listed():
    assert list(cited(["sharpening App. C", "reparam2019 D.1"])) == ["sharpening", "reparam2019"]
    assert cited(["flatlens", "LayerNorm's definition"]) == {}
