"""The colours of the pictures, for light and dark pages, and the style sheet of every picture."""

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#6e7781",
    "plain": "#f0f2f5",
    "blue": "#d7e8ff",
    "amber": "#ffeab8",
    "green": "#d3f2da",
    "red": "#ffdedb",
}
DARK = {
    "paper": "#14181f",
    "ink": "#e9eef4",
    "soft": "#a8b1bb",
    "line": "#8b949e",
    "plain": "#252b34",
    "blue": "#1d3d63",
    "amber": "#4f3d0c",
    "green": "#1a4527",
    "red": "#5c2622",
}
FILLS = ("plain", "blue", "amber", "green", "red")
"""Colours behind text; `ink` and `soft` are legible on each of them, and on `paper`."""

_RULES = """\
.kvp text { fill: var(--kvp-ink); }
.kvp text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
.kvp .bold { font-weight: 600; }
.kvp .small { font-size: 12.5px; }
.kvp .code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.kvp .soft { fill: var(--kvp-soft); }
.kvp .paper { fill: var(--kvp-paper); }
.kvp .box { stroke: var(--kvp-line); }
.kvp .line { stroke: var(--kvp-line); stroke-width: 1.5; fill: none; }
.kvp .dashed { stroke-dasharray: 5 4; }
.kvp .head { fill: var(--kvp-line); }"""


def make_style() -> str:
    """Return the style sheet: the site's colour scheme decides; elsewhere the system's preference does."""
    fills = "\n".join(f".kvp .{name} {{ fill: var(--kvp-{name}); }}" for name in FILLS)
    light, dark = _set_variables(LIGHT), _set_variables(DARK)
    return "\n".join(
        (
            f".kvp {{ {light} }}",
            f"@media (prefers-color-scheme: dark) {{ .kvp {{ {dark} }} }}",
            f'[data-md-color-scheme="default"] .kvp {{ {light} }}',
            f'[data-md-color-scheme="slate"] .kvp {{ {dark} }}',
            _RULES,
            fills,
        )
    )


def compute_contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG 2.2 defines it."""
    lighter, darker = sorted((_compute_luminance(first), _compute_luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _compute_luminance(colour: str) -> float:
    channels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _set_variables(colours: dict[str, str]) -> str:
    return " ".join(f"--kvp-{name}: {colour};" for name, colour in colours.items())
