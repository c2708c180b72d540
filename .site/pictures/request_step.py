"""A request through one step of a scheduler: which slots it gets, and the calls in their order."""

from pictures.drawing import Drawing

_SPANS = (
    ("computed", "in the table", "blue", 150),
    ("cached prefix", "touch", "amber", 140),
    ("external", "loaded", "plain", 110),
    ("new", "computed in this step", "green", 190),
    ("lookahead", "guessed", "plain", 110),
)
"""The parts of a request in `allocate_slots`: (name, action, fill, width)."""

_LANES = (("Your scheduler", 130), ("KVCacheManager", 390), ("Your engine", 640))
_CALLS = (
    (0, 1, "`get_computed_blocks`", "the cached prefix; changes nothing"),
    (0, 1, "`allocate_slots`", "new blocks, or None: the request waits"),
    (1, 1, "`touch`, `get_new_blocks`, `cache_full_blocks`", ""),
    (1, 2, "`BatchBlockTable`, `SlotMapping`", "block tables, slots of new tokens"),
    (1, 2, "`take_block_copies`", "copies to make before the first write"),
    (2, 2, "the model runs", "writes K and V, then reads"),
    (2, 0, "sampled tokens", "`num_computed_tokens` += n"),
    (0, 1, "`free`", "if the request has ended"),
    (0, 1, "`take_events`", "for the publisher"),
)
"""(from lane, to lane, call, what it gives)."""

_TOP, _STEP = 196, 46


def draw() -> Drawing:
    """Draw the ruler of a request's tokens, and below it the calls between scheduler, manager and engine."""
    drawing = Drawing(
        "request_step",
        "A request through one step",
        "The scheduler looks up the cached prefix and allocates slots. The manager gives tables, slots and "
        "copies to the engine, and the model runs. The scheduler counts the computed tokens, frees ended "
        "requests and takes the events.",
        760,
        _TOP + _STEP * len(_CALLS) + 18,
    )
    _add_ruler(drawing)
    for name, x in _LANES:
        drawing.add_box(x - 108, _TOP - 52, 216, 30, (name,))
        drawing.add_arrow((x, _TOP - 22), (x, drawing.height - 10), dashed=True, heads="none")
    for number, (source, target, call, result) in enumerate(_CALLS):
        _add_call(drawing, _TOP + number * _STEP, source, target, call, result)
    return drawing


def _add_ruler(drawing: Drawing) -> None:
    drawing.add_text(30, 24, "Tokens of the request, as `allocate_slots` sees them", "", "start")
    x = 30.0
    for name, about, fill, width in _SPANS:
        drawing.add_box(x, 36, width, 46, (name, about), fill)
        x += width
    drawing.add_arrow((30, 96), (170, 96), heads="both")
    drawing.add_text(105, 114, "has blocks", "small soft")
    drawing.add_arrow((190, 96), (310, 96), heads="both")
    drawing.add_text(250, 114, "shares blocks", "small soft")
    drawing.add_arrow((330, 96), (x - 10, 96), heads="both")
    drawing.add_text((320 + x) / 2, 114, "gets new blocks", "small soft")


def _add_call(drawing: Drawing, y: int, source: int, target: int, call: str, result: str) -> None:
    start, end = _LANES[source][1], _LANES[target][1]
    if source == target:
        width = 340 if not result else 210
        drawing.add_box(
            start - width / 2, y - 16, width, 38 if result else 30, (), "blue" if source == 1 else "green"
        )
        drawing.add_text(start, y + (0 if result else 4), call)
        if result:
            drawing.add_text(start, y + 16, result, "small")
        return
    drawing.add_arrow((start, y), (end, y))
    middle = (_LANES[0][1] + _LANES[1][1]) / 2 if 0 in (source, target) else (start + end) / 2
    drawing.add_text(middle, y - 7, call)
    drawing.add_text(middle, y + 16, result, "small soft")
