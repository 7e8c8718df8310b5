"""HTML pages of the workspace, written whole. Not here: what stands in them (``report.py``, ``statements.py``), or their templates."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from jinja2 import Environment, FileSystemLoader, select_autoescape

from assay.assets.workspace import Workspace

PAGE = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True)


def publish(workspace: Workspace, page: str, template: str, /, **told: Any) -> Path:
    """Write ``reports/<page>.html`` from a template beside this file, and return it: a reader finds the old page or the new one."""
    text = PAGE.get_template(template).render(**told, written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    file = workspace.reports / f"{page}.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{uuid4().hex}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
    return file
