"""SVG that a page can hold: with its own ids, the page's colours, and words for a screen reader."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--series-1)",
    "#050505": "var(--series-2)",
    "#060606": "var(--series-3)",
    "#070707": "var(--series-4)",
    "#080808": "var(--series-5)",
}
"""Colours nobody draws with, and what the page puts in their place."""

_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


def embeddable(svg: str, name: str, title: str, text: str) -> str:
    """Return an SVG with its own ids, the page's colours, and words for a screen reader."""
    ET.register_namespace("", _SVG)
    root = ET.fromstring(svg)  # noqa: S314  (drawn just above, not input)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    _own_ids(root, name)
    for tag, words_ in (("desc", text), ("title", title)):
        element = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = words_
        root.insert(0, element)
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    result = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", ET.tostring(root, "unicode"))
    return re.sub("|".join(COLOURS), lambda found: COLOURS[found[0]], result)


def standing_alone(svg: str) -> str:
    """Return an SVG of `embeddable` as a file of its own, in the light colours of a page."""
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    light = css.partition("@media")[0]
    colours = re.findall(r"--(?:paper|ink|muted|rule|series-\d): [^;]+;", light)
    style = f":root {{ {' '.join(colours)} font-family: system-ui, sans-serif; }}"
    ground = '<rect width="100%" height="100%" fill="var(--paper)" />'
    head, close, rest = svg.partition(">")
    return f"{head}{close}<style>{style}</style>{ground}{rest}"


def _own_ids(root: ET.Element, name: str) -> None:
    """Keep the ids that something refers to, and make them the chart's own."""
    text = ET.tostring(root, "unicode")
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    new = {old: f"{name}-{place}" for place, old in enumerate(sorted(used))}
    for element in root.iter():
        if (old := element.attrib.pop("id", None)) in new:
            element.attrib["id"] = new[old]
        if reference := element.attrib.pop(_HREF, None):
            element.attrib["href"] = "#" + new[reference[1:]]
        for key, value in element.attrib.items():
            element.attrib[key] = re.sub(
                r"url\(#([^)]+)\)", lambda at: f"url(#{new[at[1]]})", value
            )
