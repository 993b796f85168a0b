"""Formulas as MathML, which browsers draw by themselves: the site then loads no script from a network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Draw formulas with docutils' own converter."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
