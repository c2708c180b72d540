"""The secret of the nodes that one user runs on one machine: made when it is first needed."""

import os
from pathlib import Path
from secrets import token_hex

from kv_pool.control.socket_path import get_default_folder, make_folder
from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.secret import load_secret, write_secret_file


def get_default_secret_path() -> Path:
    """Beside the control sockets, in a folder that only its owner can enter."""
    return get_default_folder() / "secret"


def find_secret(path: str | None) -> bytes:
    """What is in the file; for None in the default one, which is made if there is none.

    Raises:
        InvalidArgumentError: no such file, or one that others can read; see `load_secret`.
        ControlError: there can be no default file: its folder is somebody else's.
    """
    if path is not None:
        return load_secret(path)
    default = get_default_secret_path()
    make_folder(default)
    if not default.exists():
        _make_secret(default)
    return load_secret(default)


def _make_secret(path: Path) -> None:
    """Make the file in one step: of two nodes that begin at once, both use what the first one has made."""
    draft = path.with_name(f"{path.name}.{token_hex(4)}")
    write_secret_file(draft)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidArgumentError(f"{path}: can not make the secret of nodes: {error.strerror}") from error
    finally:
        draft.unlink()
