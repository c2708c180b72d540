"""A block's life: free or in use, with or without a hash, and the calls that lead from one to another."""

from pictures.drawing import Drawing

_LEFT, _RIGHT, _WIDTH = 40, 500, 220
_FREE, _USED, _HEIGHT = 64, 250, 62


def draw() -> Drawing:
    """Draw the four states in a square, the transitions between them, and the free queue below."""
    drawing = Drawing(
        "block_life",
        "A block's life",
        "A free block is taken by get_new_blocks, becomes cached by cache_full_blocks, is shared by touch, "
        "and returns to the free queue by free_blocks. It stays cached until it is taken again.",
        760,
        470,
    )
    drawing.add_text(_LEFT + _WIDTH / 2, 28, "no hash", "soft")
    drawing.add_text(_RIGHT + _WIDTH / 2, 28, "cached: a hash, can be hit", "soft")
    drawing.add_text(_LEFT, 50, "free: ref_cnt 0, in the free queue", "small soft", "start")
    drawing.add_text(_LEFT, 332, "in use: ref_cnt 1 or more", "small soft", "start")
    drawing.add_box(_LEFT, _FREE, _WIDTH, _HEIGHT, ("free, empty", "nothing to hit"), "plain")
    drawing.add_box(
        _RIGHT, _FREE, _WIDTH, _HEIGHT, ("free, cached", "least recently freed goes first"), "amber"
    )
    drawing.add_box(_LEFT, _USED, _WIDTH, _HEIGHT, ("in use, not cached", "partly filled"), "blue")
    drawing.add_box(_RIGHT, _USED, _WIDTH, _HEIGHT, ("in use, cached", "one request, or several"), "green")
    _add_transitions(drawing)
    _add_queue(drawing)
    return drawing


def _add_transitions(drawing: Drawing) -> None:
    top, bottom = _FREE + _HEIGHT, _USED
    drawing.add_arrow((_LEFT + 20, top), (_LEFT + 20, bottom))
    drawing.add_text(_LEFT + 30, top + 66, "`get_new_blocks`", "", "start")
    drawing.add_arrow((_LEFT + 170, bottom), (_LEFT + 170, top))
    drawing.add_text(_LEFT + 180, top + 40, "`free_blocks`", "", "start")
    drawing.add_arrow((_LEFT + _WIDTH, _USED + 31), (_RIGHT, _USED + 31))
    drawing.add_text(380, _USED + 22, "`cache_full_blocks`")
    drawing.add_text(380, _USED + 50, "event: BlockStored", "small soft")
    drawing.add_arrow((_RIGHT + 46, bottom), (_RIGHT + 46, top))
    drawing.add_text(_RIGHT + 56, top + 58, "`free_blocks`:", "", "start")
    drawing.add_text(_RIGHT + 56, top + 76, "last reference", "small soft", "start")
    drawing.add_arrow((_RIGHT + 160, top), (_RIGHT + 160, bottom))
    drawing.add_text(_RIGHT + 170, top + 58, "`touch`:", "", "start")
    drawing.add_text(_RIGHT + 170, top + 76, "prefix hit", "small soft", "start")
    drawing.add_arrow((_RIGHT, top - 8), (_LEFT + _WIDTH, bottom + 8))
    drawing.add_text(_RIGHT + 32, top + 72, "`get_new_blocks`", "", "end")
    drawing.add_text(_RIGHT + 32, top + 90, "event: BlockRemoved", "small soft", "end")
    drawing.add_arrow((_RIGHT, _FREE + 24), (_LEFT + _WIDTH, _FREE + 24))
    drawing.add_text(380, _FREE + 15, "`evict_blocks`")
    drawing.add_text(380, _FREE + 42, "event: BlockRemoved", "small soft")
    x, y = _RIGHT + _WIDTH - 40, _USED + _HEIGHT
    drawing.add_arrow((x - 40, y), (x - 40, y + 20), (x, y + 20), (x, y))
    drawing.add_text(x - 50, y + 24, "`touch`: one more request", "", "end")


def _add_queue(drawing: Drawing) -> None:
    """Draw the free queue: where blocks are taken, and where freed ones go."""
    y, x, width = 396, 150, 46
    fills = ("plain", "plain", "amber", "amber", "amber", "amber", "amber", "amber", "amber")
    drawing.add_text(x - 12, y + 20, "the free queue", "bold", "end")
    for place, fill in enumerate(fills):
        drawing.add_box(x + place * (width + 4), y, width, 30, (), fill)
    end = x + len(fills) * (width + 4) - 4
    drawing.add_arrow((x + 23, y - 4), (x + 23, y - 26))
    drawing.add_text(x + 34, y - 12, "taken from the front", "small", "start")
    drawing.add_arrow((x + 23, y + 54), (x + 23, y + 34))
    drawing.add_text(x + 34, y + 52, "freed without a hash: to the front", "small", "start")
    drawing.add_arrow((end + 40, y + 15), (end + 4, y + 15))
    drawing.add_text(end, y + 52, "freed with a hash: to the back", "small", "end")
