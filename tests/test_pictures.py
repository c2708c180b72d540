"""The pictures of the documentation are current and legible, and name existing code."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pictures import layers
from pictures.all_pictures import FOLDER, draw_all
from pictures.palette import DARK, FILLS, LIGHT, compute_contrast
from test_layers import LAYERS

from kv_pool.migration.messages import MigrationPhase

PACKAGE = Path(__file__).parent.parent / "kv_pool"
PICTURES = {picture.name: picture for picture in draw_all()}


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_what_its_source_draws(name):
    svg = (FOLDER / f"{name}.svg").read_text()
    assert svg == PICTURES[name].make_svg(), "run python -m pictures in .site"
    root = ElementTree.fromstring(svg)
    assert root.find("{http://www.w3.org/2000/svg}desc").text


def test_every_committed_picture_is_drawn_and_shown():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)
    documents = [PACKAGE.parent / "README.md", *PACKAGE.rglob("README.md")]
    shown = {name for path in documents for name in re.findall(r"pictures/(\w+)\.svg", path.read_text())}
    assert shown == set(PICTURES)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "soft"])
def test_text_is_legible(colours, text):
    """WCAG 2.2, level AA: 4.5 for text of this size."""
    contrasts = {fill: compute_contrast(colours[text], colours[fill]) for fill in ("paper", *FILLS)}
    assert min(contrasts.values()) >= 4.5, contrasts


@pytest.mark.parametrize("name", PICTURES)
def test_code_in_a_picture_exists(name):
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    texts = " ".join(PICTURES[name].texts)
    spans = " ".join(re.findall(r"`([^`]+)`", texts))
    names = re.findall(r"\w+", spans) + re.findall(r"\b(?:[A-Z]+[a-z]+){2,}\b|\b\w+_\w+\b", texts)
    assert [each for each in names if not re.search(rf"\b{each}\b", sources)] == []


def test_picture_of_the_layers_has_all_of_them():
    drawn = {package: int(layer[1:]) for layer, row in layers.ROWS for package, _ in row}
    for layer, modules in layers.SMALL.items():
        drawn |= dict.fromkeys(modules.split(", "), int(layer[1:]))
    assert drawn == {name: layer for name, layer in LAYERS.items() if name != "__main__"}


def test_picture_of_a_migration_has_all_phases():
    texts = " ".join(PICTURES["migration"].texts)
    assert [phase.name for phase in MigrationPhase if phase.name not in texts] == []
