"""Charts that need no network: what they save as HTML, and what a notebook shows, has the scripts inside."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from hashlib import sha256
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import altair as alt

from flatlens.errors import needs

with needs("study", "a chart"):
    import vl_convert

if TYPE_CHECKING:
    from flatlens.report.figures.figure import Drawing

    Base: TypeAlias = alt.TopLevelMixin
else:
    Base = object

_SHOWN = """\
<div id="{name}"></div>
<script>
(() => {{
{script}
const here = document.currentScript?.previousElementSibling ?? document.getElementById("{name}");
vegaEmbed(here, {spec}, {{ mode: "vega-lite" }}).catch(console.error);
}})();
</script>"""


@lru_cache(maxsize=1)  # a constant of the installed version that takes a second to make
def bundle() -> str:
    """Return the script that draws the charts."""
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script")


class Offline(Base):
    """The methods of a chart that differ where it needs no network."""

    def save(  # type: ignore[override]
        self, fp: str | os.PathLike[str] | IO[Any], format: str | None = None, **options: Any
    ) -> None:
        """Write a file as Altair does; in HTML, `inline` is True."""
        if (format or str(fp).rpartition(".")[2]) == "html":
            options = {"inline": True, **options}
        super().save(fp, format, **options)  # type: ignore[arg-type]

    def _repr_mimebundle_(self, *args: Any, **options: Any) -> Any:
        if alt.renderers.active != "default":  # the user's own choice
            return super()._repr_mimebundle_(*args, **options)
        spec = json.dumps(self.to_dict(context={"pre_transform": False})).replace("</", "<\\/")
        name = f"flatlens-{sha256(spec.encode()).hexdigest()[:12]}"
        return {"text/plain": repr(self), "text/html": _SHOWN.format(name=name, script=bundle(), spec=spec)}


def offline(drawing: Drawing) -> Drawing:
    """Return an Altair chart that needs no network; its copies by `properties` and the like need none either.

    >>> chart = offline(alt.Chart().mark_point())
    >>> isinstance(chart, alt.Chart), isinstance(chart.properties(width=9), Offline)
    (True, True)
    """
    kind: Any = type(drawing)
    found: Drawing = _kind(kind)(*drawing._args, **drawing._kwds)
    return found


@lru_cache(maxsize=8)  # one for each kind of chart
def _kind(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (Offline, kind), {"__module__": __name__})
