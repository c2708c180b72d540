"""`PolicySource`: a cache policy that another process can load, with the text of its file."""

import hashlib
import sys

import msgspec

from kv_pool.core.policy_names import PolicyChoice, find_file, find_policy, read_file, read_policy_text
from kv_pool.errors import InvalidArgumentError

_INCLUDED = "kv_pool"


class PolicySource(msgspec.Struct, frozen=True):
    """A cache policy that another process can load.

    Attributes:
        name: as in `find_policy`.
        text: the text of the file of a policy `file.py:Class`, which other processes need not have.
        sha256: SHA-256 of the text of its file or module; None for policies of kv_pool, and for modules
            without source text.
    """

    name: str
    text: str | None = None
    sha256: str | None = None

    def load(self) -> PolicyChoice:
        """Return the policy.

        Raises:
            InvalidArgumentError: there is none, it cannot be imported, or its module has another text here.
        """
        if self.text is not None:
            return read_policy_text(self.name, self.text)
        found = find_policy(self.name)
        here = _digest_module(found)
        if here != self.sha256:
            raise InvalidArgumentError(
                f"the module of the cache policy {self.name!r} has another text in this process: SHA-256 "
                f"{here}, not {self.sha256}; install the same version on all workers"
            )
        return found


def read_source(name: str) -> PolicySource:
    """Return the source of a policy. Raises InvalidArgumentError if it cannot be found or imported."""
    path = find_file(name)
    if path is None:
        return PolicySource(name, sha256=_digest_module(find_policy(name)))
    text = read_file(path, name)
    read_policy_text(name, text)
    return PolicySource(name, text, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def _digest_module(policy: PolicyChoice) -> str | None:
    name = getattr(policy.make, "__module__", "")
    if name.split(".")[0] == _INCLUDED:
        return None
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or not path.endswith(".py"):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
