"""A number such as `Q1` names one invariant of the package: it is defined once, and has a check.

A definition is a line in the docstring of an `invariants.py`: the number, then the statement. The line is
indented, or, where ruff has dedented the whole text, two spaces follow the number.
"""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFINITION = re.compile(r"^(?:    ([A-Z]\d{1,2}) +|([A-Z]\d{1,2})  +)\S", re.MULTILINE)
NUMBER = re.compile(r"\b[A-Z]\d{1,2}\b(?!-FIFO)")  # S3-FIFO is a policy
KEPT_OTHERWISE = re.compile(r"\b([A-Z]\d{1,2}) is kept by\b")

# Files in which a letter with digits has another meaning: path -> letter, meaning.
OTHER_MEANINGS = {
    "kv_pool/README.md": ("L", "layers"),
    "kv_pool/events/curve_keys.py": ("Z", "Z85, an encoding"),
    "kv_pool/events/subscriber_sockets.py": ("Z", "Z85, an encoding"),
    "kv_pool/lab/research.md": ("P", "percentiles"),
    "tests/core/test_kv_events.py": ("V", "recorded vectors"),
    "tests/events/test_batch.py": ("V", "recorded vectors"),
    "tests/events/test_continuity.py": ("S", "snapshots"),
    "tests/events/test_subscriber.py": ("Z", "Z85, an encoding"),
}
INVARIANTS = sorted((ROOT / "kv_pool").rglob("invariants.py"))
TEXTS = sorted(
    path
    for folder in ("kv_pool", "tests")
    for pattern in ("*.py", "*.md")
    for path in (ROOT / folder).rglob(pattern)
    if path != Path(__file__)
)


def name_of(path):
    return str(path.relative_to(ROOT))


def list_definitions(docstring):
    return [indented or plain for indented, plain in DEFINITION.findall(docstring)]


def read_docstring(path):
    return ast.get_docstring(ast.parse(path.read_text()), clean=False)


def list_defined():
    return {name_of(path): list_definitions(read_docstring(path)) for path in INVARIANTS}


def find_shared_prefixes(defined):
    """Return the letters that begin definitions in more than one file."""
    files = Counter(letter for numbers in defined.values() for letter in {number[0] for number in numbers})
    return sorted(letter for letter, num_files in files.items() if num_files > 1)


def list_citations(text, other_letter=""):
    return {number for number in NUMBER.findall(text) if number[0] != other_letter}


def list_messages(source):
    """Return the numbers that begin string literals of a module: `"Q1: ..."`."""
    literals = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    found = (re.match(r"([A-Z]\d{1,2}): ", literal) for literal in literals if isinstance(literal, str))
    return {match[1] for match in found if match}


def test_every_number_is_defined_once():
    defined = list_defined()
    counted = Counter(number for numbers in defined.values() for number in numbers)
    assert len(counted) > 70
    assert [number for number, count in counted.items() if count > 1] == []
    assert find_shared_prefixes(defined) == []


def test_every_cited_number_is_defined():
    defined = {number for numbers in list_defined().values() for number in numbers}
    undefined = {}
    for path in TEXTS:
        other_letter, _ = OTHER_MEANINGS.get(name_of(path), ("", ""))
        undefined[name_of(path)] = list_citations(path.read_text(), other_letter) - defined
    assert {name: numbers for name, numbers in undefined.items() if numbers} == {}


def test_every_number_begins_a_check_message():
    """Exempt is a number of which its file says what it `is kept by`."""
    sources = (ROOT / "kv_pool").rglob("*.py")
    checked = set().union(*(list_messages(source.read_text()) for source in sources))
    for path in INVARIANTS:
        docstring = read_docstring(path)
        missing = [
            number
            for number in list_definitions(docstring)
            if number not in checked and number not in KEPT_OTHERWISE.findall(docstring)
        ]
        assert missing == [], f"{name_of(path)} checks none of {missing}"


def list_broken(source):
    """Return the numbers that a test expects to be violated: strings that are, or begin with, a number."""
    literals = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    found = (re.match(r"\^?([A-Z]\d{1,2})(?:: |$)", text) for text in literals if isinstance(text, str))
    return {match[1] for match in found if match}


def test_every_number_is_violated_by_a_test():
    """Exempt is a number of which its file says what it `is kept by`."""
    broken = set().union(*(list_broken(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")))
    kept = {number for path in INVARIANTS for number in KEPT_OTHERWISE.findall(read_docstring(path))}
    defined = {number for numbers in list_defined().values() for number in numbers}
    assert sorted(defined - broken - kept) == []
