"""The layers of the package: which imports which."""

from pictures.drawing import Drawing

ROWS = (
    ("L8", (("cli", "the command kv-pool"),)),
    ("L7", (("integrations", "vLLM, nano-vllm, transformers"), ("lab", "production traces"))),
    ("L6", (("control", "the control socket of a running pool"),)),
    ("L5", (("adapter", "GPUKVPool: blocks by id"),)),
    (
        "L4",
        (
            ("metrics", "Prometheus, OTel"),
            ("migration", "blocks between nodes"),
            ("tiers", "host memory, disk"),
        ),
    ),
    ("L3", (("manager", "KVCacheManager, sequences"), ("reports", "statistics, layout"))),
    (
        "L2",
        (
            ("contiguous", "runs, compaction"),
            ("events", "publisher, mirror"),
            ("policies", "cache policies"),
            ("storage", "bytes of blocks"),
        ),
    ),
    ("L1", (("core", "BlockPool: which blocks are free, cached, in use"),)),
)
"""From the top: each layer's name, and its packages with a few words about each."""

SMALL = {
    "L8": "replay",
    "L2": "drawing, shared_options",
    "L1": "error_names, foreign_bytes, option, protocol, quantities, regular_files, threads",
    "L0": "ids, errors, environment, closing, lazy_names, loggers, documentation, version",
}
"""Modules that are not drawn as boxes."""

_COMPILED = ("core",)
_PARTLY_COMPILED = ("contiguous", "events", "manager")
_LEFT, _RIGHT, _STEP = 56, 744, 62


def draw() -> Drawing:
    """Draw a row of boxes for each layer, the highest on top."""
    drawing = Drawing(
        "layers",
        "The layers of kv_pool",
        "Nine layers. Each imports only from lower ones; packages of one layer do not import each other.",
        760,
        614,
    )
    for number, (layer, packages) in enumerate(ROWS):
        y = 14 + number * _STEP
        drawing.add_text(30, y + 29, layer, "soft")
        width = (_RIGHT - _LEFT - 10 * (len(packages) - 1)) / len(packages)
        for place, (package, about) in enumerate(packages):
            fill = "blue" if package in _COMPILED else "green" if package in _PARTLY_COMPILED else "plain"
            drawing.add_box(_LEFT + place * (width + 10), y, width, 46, (package, about), fill)
    y = 14 + len(ROWS) * _STEP
    drawing.add_text(400, y + 2, f"{SMALL['L1']}; L2: {SMALL['L2']}", "small soft")
    drawing.add_text(30, y + 35, "L0", "soft")
    drawing.add_box(_LEFT, y + 16, _RIGHT - _LEFT, 30)
    drawing.add_text(400, y + 35, SMALL["L0"], "small")
    _add_legend(drawing, y + 80)
    return drawing


def _add_legend(drawing: Drawing, y: float) -> None:
    drawing.add_box(_LEFT, y - 13, 18, 18, (), "blue")
    drawing.add_text(_LEFT + 26, y + 1, "compiled by mypyc", "small", "start")
    drawing.add_box(_LEFT + 170, y - 13, 18, 18, (), "green")
    drawing.add_text(_LEFT + 196, y + 1, "partly compiled", "small", "start")
    drawing.add_arrow((420, y - 16), (420, y + 8))
    drawing.add_text(434, y + 1, "imports: from any layer to any one below it", "small", "start")
