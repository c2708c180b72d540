"""The event stream with a gap: the publisher repeats the lost batches, or a snapshot replaces them."""

from pictures.drawing import Drawing

_X, _STEP, _SIZE = 190, 62, 46


def draw() -> Drawing:
    """Draw the live stream, then the two answers to a request: from the buffer, and a snapshot."""
    drawing = Drawing(
        "event_stream",
        "The event stream with a gap and a snapshot",
        "Batches 9 and 10 do not arrive. The subscriber sees the gap at 11, asks for all batches from 8 on, "
        "and holds live batches meanwhile. The answer is the batches themselves while the publisher's buffer "
        "has them, else a snapshot: a clear, then a store of every resident block.",
        760,
        640,
    )
    _add_live(drawing)
    drawing.add_arrow((20, 246), (740, 246), dashed=True, heads="none")
    _add_replay(drawing, 276)
    drawing.add_arrow((20, 436), (740, 436), dashed=True, heads="none")
    _add_snapshot(drawing, 466)
    return drawing


def _add_live(drawing: Drawing) -> None:
    drawing.add_text(20, 26, "Live, PUB to SUB: each batch has the next sequence number", "bold", "start")
    drawing.add_text(20, 70, "publisher sends", "", "start")
    drawing.add_text(20, 190, "subscriber receives", "", "start")
    for place, sequence in enumerate(range(7, 14)):
        x = _X + place * _STEP
        is_lost = sequence in (9, 10)
        drawing.add_box(x, 42, _SIZE, _SIZE, (str(sequence),), "blue")
        fill = "red" if is_lost else "amber" if sequence > 10 else "green"
        drawing.add_box(
            x, 162, _SIZE, _SIZE, ("lost",) if is_lost else (str(sequence),), fill, dashed=is_lost
        )
        drawing.add_arrow((x + 23, 90), (x + 23, 124 if is_lost else 158), dashed=is_lost)
    drawing.add_text(632, 122, "lost: the reader is", "small soft", "start")
    drawing.add_text(632, 140, "slow or was away", "small soft", "start")
    drawing.add_text(_X + 54, 228, "following", "small soft")
    drawing.add_text(_X + 5 * _STEP + 23, 228, "recovering: live batches are held", "small soft")


def _add_replay(drawing: Drawing, y: int) -> None:
    drawing.add_text(20, y, "The buffer still has 8: replay, DEALER to ROUTER", "bold", "start")
    _add_request(drawing, y, "blue")
    drawing.add_text(
        _X, y + 124, "8 again: the same bytes, so the publisher was not restarted", "small", "start"
    )
    drawing.add_text(_X, y + 142, "end: from here on the held batches, then live ones", "small soft", "start")


def _add_snapshot(drawing: Drawing, y: int) -> None:
    drawing.add_text(20, y, "The buffer no longer has 8: snapshot", "bold", "start")
    _add_request(drawing, y, "plain")
    drawing.add_text(
        _X,
        y + 124,
        "8: AllBlocksCleared, then BlockStored for every resident block, parents first",
        "small",
        "start",
    )
    drawing.add_text(_X, y + 142, "9 to 12: empty, since the snapshot includes them", "small soft", "start")


def _add_request(drawing: Drawing, y: int, fill: str) -> None:
    """Draw the request and its answer; `fill` is that of the batches behind the first one."""
    drawing.add_text(20, y + 34, "subscriber asks", "", "start")
    drawing.add_text(_X, y + 34, "from 8 on, the last batch that it has", "", "start")
    drawing.add_text(20, y + 84, "publisher answers", "", "start")
    answer = [
        ("8", "green"),
        *((str(sequence), fill) for sequence in range(9, 13)),
        ("end", "plain"),
        ("13", "amber"),
    ]
    for place, (label, colour) in enumerate(answer):
        drawing.add_box(_X + place * _STEP, y + 56, _SIZE, _SIZE, (label,), colour)
    drawing.add_text(640, y + 75, "13: live,", "small soft", "start")
    drawing.add_text(640, y + 93, "was held", "small soft", "start")
