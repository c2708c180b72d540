"""Text from outside (streams, peers, traces, file names) made safe to print.

A terminal obeys escape sequences and rich obeys markup; a string that another process chose may hold both.
Every command passes such strings through one of these functions before it prints them.
"""

from rich.text import Text

MAX_CHARS = 200


def escape_text(text: str, max_chars: int = MAX_CHARS) -> str:
    r"""Return `text` on one line, with every character that does not print as `\x1b`, `\u202e`, ...

    Control characters, line ends, bidirectional overrides, lone surrogates and unassigned code points are
    escaped; a space and all other printable characters are kept. Text beyond `max_chars` characters is cut
    and its length stated. The result is safe for `print` and for `rich.text.Text`, not for rich markup: use
    `make_cell` there.
    """
    if len(text) > max_chars:
        return f"{escape_text(text[:max_chars], max_chars)}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else escape_char(one) for one in text)


def escape_lines(text: str) -> str:
    """Return `text` as `escape_text` does, with its line ends kept: for messages of several lines."""
    return "\n".join(escape_text(line, 10 * MAX_CHARS) for line in text.split("\n"))


def escape_json(text: str) -> str:
    r"""Return JSON `text` with each character that does not print as `\uXXXX`; the value is equal.

    Line ends and spaces between values are kept. Encoders escape only what JSON requires, which leaves out
    DEL, C1 control characters and bidirectional overrides.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else escape_json_char(one) for one in text)


def make_cell(text: str, style: str = "") -> Text:
    """Return `text`, escaped, as a renderable for tables and consoles; rich reads no markup in it."""
    return Text(escape_text(text), style=style)


def escape_char(char: str) -> str:
    """Return the Python escape of one character."""
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escape_json_char(char: str) -> str:
    """Return the JSON escape of one character: a surrogate pair beyond U+FFFF."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
