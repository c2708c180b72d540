"""Public signatures type ids as `kv_pool.ids` does: a block's id is a `BlockId`, not an int."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "kv_pool"

KINDS = {
    "BlockId": r"(.*_)?block_ids?|(scratch|fixed|old|new|next|local|remote)_ids?|(old|new|migrated)_blocks",
    "GroupId": r"(.*_)?group_(ids?|idx)",
    "RequestId": r"(.*_)?request_ids?",
    "SequenceId": r"(.*_)?(sequence|seq|parent|child)_ids?",
    "SlotId": r"slots?",
    "LeaseId": r"(.*_)?lease_ids?",
    "TransferId": r"(.*_)?transfer_ids?",
    "NodeName": r"(.*_)?(node|peer)_names?",
}
"""The type of an id -> the names of parameters, attributes and properties that are such ids."""

EXCEPTIONS = {
    "cli/migrate.py.migrate.sequence_id": "text of the command line; a number, a name or newest",
    "integrations/nano_vllm.py.BlockManager.hash_to_block_id": "a dict from hashes to block ids",
}
"""A place -> why its id is plain."""


def is_public(name):
    return not name.startswith("_") or name.startswith("__")


def list_signatures(path):
    """Yield the place and the annotation of each parameter, attribute, property and result of a file."""
    for place, owner in list_owners(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())):
        if isinstance(owner, ast.AnnAssign):
            yield place, owner.annotation
            continue
        yield place, owner.returns
        arguments = owner.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield f"{place}.{one.arg}", one.annotation
        if place.endswith(".__init__"):
            for node in ast.walk(owner):
                is_attribute = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
                if is_attribute and is_public(node.target.attr):
                    yield f"{place.removesuffix('__init__')}{node.target.attr}", node.annotation


def list_owners(place, node):
    """Yield the public functions, methods and annotated fields below a module or class, with their places."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_public(part.name):
                yield f"{place}.{part.name}", part
        elif isinstance(part, ast.ClassDef):
            if is_public(part.name):
                yield from list_owners(f"{place}.{part.name}", part)
        elif (
            isinstance(part, ast.AnnAssign)
            and isinstance(part.target, ast.Name)
            and is_public(part.target.id)
        ):
            yield f"{place}.{part.target.id}", part


def find_plain(annotation):
    """Return the plain types in an annotation, also in a quoted one."""
    found = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    quoted = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    for text in quoted:
        if isinstance(text, str):
            found |= set(re.findall(r"\w+", text))
    return found & {"int", "str", "bytes"}


def find_kind(place):
    """Return the type that an id of this name has, or None."""
    name = re.sub(r"^(get|list|find|read|take)_", "", place.rpartition(".")[2])
    return next((kind for kind, names in KINDS.items() if re.fullmatch(names, name)), None)


def list_plain_ids(folder):
    """Return the places of ids whose annotation has a plain type."""
    return [
        f"{place}: {ast.unparse(annotation)}, not {kind}"
        for path in sorted(folder.rglob("*.py"))
        for place, annotation in list_signatures(path)
        for kind in [find_kind(place)]
        if kind is not None and annotation is not None and find_plain(annotation)
    ]


def test_public_signatures_have_typed_ids():
    plain = list_plain_ids(PACKAGE)
    assert [one for one in plain if one.partition(":")[0] not in EXCEPTIONS] == []


def test_every_exception_is_still_one():
    plain = {one.partition(":")[0] for one in list_plain_ids(PACKAGE)}
    assert set(EXCEPTIONS) <= plain
