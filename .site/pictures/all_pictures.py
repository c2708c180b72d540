"""All pictures, in the order in which a reader meets them."""

from pathlib import Path

from pictures import block_life, event_stream, layers, migration, request_step
from pictures.drawing import Drawing

FOLDER = Path(__file__).parent


def draw_all() -> list[Drawing]:
    """Draw each of them. Raises ValueError where something does not fit."""
    return [module.draw() for module in (layers, block_life, request_step, event_stream, migration)]
