"""A migration's phases: the messages between source and target, and what each of them holds meanwhile."""

from pictures.drawing import Drawing

_SOURCE, _TARGET = 250, 510
_MESSAGES = (
    ("<", "PrepareTransfer"),
    (">", "Offer"),
    ("=", "bytes, in batches"),
    ("<", "AskChecksums"),
    ("<", "RenewLease"),
    ("", ""),
    ("<", "AcknowledgeTransfer"),
    (">", "Acknowledged"),
)
"""(way, message); the empty place is for what the target does alone."""

_TOP, _STEP = 126, 50


def draw() -> Drawing:
    """Draw the messages from top to bottom, with the phases of the target on the right."""
    drawing = Drawing(
        "migration",
        "The phases of a migration",
        "The target prepares, reads the leased blocks, verifies checksums, inserts the blocks, acknowledges. "
        "The source releases a moved sequence when it handles the acknowledgement. If anything fails before, "
        "the source keeps it.",
        760,
        _TOP + _STEP * len(_MESSAGES) + 74,
    )
    drawing.add_box(_SOURCE - 110, 14, 160, 34, ("source node",))
    drawing.add_box(_TARGET - 50, 14, 160, 34, ("target node",))
    end = _TOP + _STEP * (len(_MESSAGES) - 1) + 34
    for x in (_SOURCE, _TARGET):
        drawing.add_arrow((x, 48), (x, end), dashed=True, heads="none")
    for number, (way, message) in enumerate(_MESSAGES):
        if not way:
            continue
        y = _TOP + number * _STEP
        left, right = (_SOURCE + 8, y), (_TARGET - 8, y)
        drawing.add_arrow(*((right, left) if way == "<" else (left, right)))
        if way == "=":
            drawing.add_arrow((_SOURCE + 8, y + 5), (_TARGET - 8, y + 5))
        drawing.add_text((_SOURCE + _TARGET) / 2, y - 8, message if way == "=" else f"`{message}`")
    drawing.add_text((_SOURCE + _TARGET) / 2, _TOP + 4 * _STEP + 17, "every third of a lease", "small soft")
    _add_source(drawing)
    _add_target(drawing)
    return drawing


def _add_source(drawing: Drawing) -> None:
    """Draw what the source holds, from the first message to the last but one."""
    top, bottom = _TOP + 12, _TOP + 6 * _STEP
    drawing.add_box(14, top, 216, bottom - top - 8, (), "amber")
    drawing.add_text(122, top + 30, "leased to read", "bold")
    drawing.add_text(122, top + 52, "not reused, not moved", "small")
    drawing.add_text(122, top + 92, "a moved sequence is frozen", "small")
    drawing.add_text(122, top + 132, "lease ends, or cancelled:", "small")
    drawing.add_text(122, top + 150, "the source keeps everything", "small")
    drawing.add_box(
        14, bottom + 4, 216, 62, ("released", "a move: the sequence", "belongs to the target"), "green"
    )


def _add_target(drawing: Drawing) -> None:
    phases = (
        ("WAITING", "plain", -1, 0, "for a worker"),
        ("PREPARING", "plain", 0, 1, "layouts are compared"),
        ("READING", "blue", 1, 5, "blocks leased for writing"),
        ("INSERTING", "green", 5, 6, "verified blocks can be hit"),
        ("ACKNOWLEDGING", "plain", 6, 7, "repeated until answered"),
        ("DONE", "green", 7, 8, "the sequence is adopted"),
    )
    for phase, fill, first, last, about in phases:
        y = _TOP + first * _STEP - 18
        drawing.add_box(530, y, 216, (last - first) * _STEP - 6, (phase, about), fill)
    y = _TOP + len(_MESSAGES) * _STEP
    drawing.add_text(
        380,
        y + 14,
        "An error before `AcknowledgeTransfer`: FAILED or CANCELLED; the source has everything",
        "small soft",
    )
    drawing.add_text(
        380,
        y + 36,
        "No answer to it: IN_DOUBT, until the source answers or is known to be gone",
        "small soft",
    )
