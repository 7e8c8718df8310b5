"""Pictures as Dagster shows them. Not here: drawing them (``ops/evaluate/plots.py``)."""

import base64

import dagster as dg

LARGEST = 50_000  # bytes: they lie in the event log


def inline(png: bytes) -> dg.MetadataValue:
    """A PNG inside a markdown metadata value; one that is too large is told instead of shown."""
    if len(png) > LARGEST:
        return dg.MetadataValue.md(f"(a picture of {len(png):,} bytes, too large for the event log)")
    return dg.MetadataValue.md(f"![](data:image/png;base64,{base64.b64encode(png).decode()})")
