"""Renders pages that stand alone, with their pictures inside, from Jinja2 templates.

`base.html` and `macros.html` are shared by all pages; the template of a page is next to the module that fills it.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from recover.runs.web.assets import chart_style, script, style


def render(template: Path, **values: Any) -> str:
    """The page as text. All values are escaped; a name that the template uses and `values` lacks raises an error."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["base64"] = lambda picture: base64.b64encode(picture.read_bytes()).decode()
    environment.globals |= {
        "style": Markup(style()),
        "chart_style": Markup(chart_style()),
        "script": Markup(script()),
    }
    return environment.get_template(template.name).render(values)
