"""The secret shared by the nodes of one user on one machine, created when it is first needed."""

import os
from pathlib import Path
from secrets import token_hex

from kv_pool.control.socket_path import get_default_folder, make_folder
from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.secret import load_secret, write_secret_file


def get_default_secret_path() -> Path:
    """Return the default path: beside the control sockets, in a folder that only its owner can enter."""
    return get_default_folder() / "secret"


def load_or_create_secret(path: str | None) -> bytes:
    """Return the secret in a file; for None in the default file, which is created if it does not exist.

    Raises:
        InvalidArgumentError: the file does not exist, or other users can read it; see `load_secret`.
        ControlError: the folder of the default file belongs to another user.
    """
    if path is not None:
        return load_secret(path)
    default = get_default_secret_path()
    make_folder(default)
    if not default.exists():
        _make_secret(default)
    return load_secret(default)


def _make_secret(path: Path) -> None:
    """Create the file atomically: if two nodes start at the same time, both use the first one's file."""
    draft = path.with_name(f"{path.name}.{token_hex(4)}")
    write_secret_file(draft)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot create the secret of nodes: {error.strerror}") from error
    finally:
        draft.unlink()
