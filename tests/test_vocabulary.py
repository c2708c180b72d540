"""One word for one idea: retired words in the sources, the tests and the documents fail here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kv_pool", "tests", "examples", "benchmarks", ".site")
RETIRED = {
    "whoever": "name the actor: the caller, the scheduler, the request",
    "somebody": "name the actor",
    "anew": "again",
    "told of": "notified of",
    "so many": "name the number",
    "given up": "released, cancelled or aborted",
    "give up": "release, cancel or abort",
    "gives up": "releases, cancels or aborts",
    "colder": "lower (tiers)",
    "handed out": "allocated",
    "hand out": "allocate",
    "hands out": "allocates",
    "barred": "frozen",
    "lend": "lease",
    "lends": "leases",
    "lent": "leased",
    "errand": "batch",
    "can not": "cannot",
}
"""Each retired word, and the word to use instead; see the glossary in kv_pool/README.md."""

WORDS = {word: re.compile(rf"(?<![a-z]){word}(?![a-z])", re.IGNORECASE) for word in RETIRED}


def list_texts():
    own = Path(__file__)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".svg") and path != own and "__pycache__" not in path.parts:
                yield path
    yield ROOT / "README.md"


def find_retired(text, word):
    """Return the lines with the word; identifiers count with their underscores as spaces."""
    return [
        number
        for number, line in enumerate(text.replace("_", " ").splitlines(), 1)
        if WORDS[word].search(line)
    ]


@pytest.mark.parametrize("word", RETIRED)
def test_retired_word_is_not_used(word):
    found = []
    for path in list_texts():
        if path.name == "CHANGELOG.md":  # quotes what older versions did
            continue
        found += [f"{path.relative_to(ROOT)}:{number}" for number in find_retired(path.read_text(), word)]
    assert not found, f"say {RETIRED[word]!r}"


def test_retired_word_would_be_noticed():
    assert find_retired("x = 1\ndef hand_out(): ...\n", "hand out") == [2]
    assert find_retired("Another hand outside.", "hand out") == []


def test_names_of_tests_have_at_most_60_characters():
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(names) > 2000
    assert [name for name in sorted(names) if len(name) > 60] == []
