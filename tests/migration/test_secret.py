import os
import stat

import pytest

from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.secret import load_secret, write_secret_file


def write(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_secret_is_random_and_private_to_its_owner(tmp_path):
    write_secret_file(tmp_path / "one")
    write_secret_file(tmp_path / "two")
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600
    one, two = load_secret(tmp_path / "one"), load_secret(str(tmp_path / "two"))
    assert one != two
    assert len(one) == len(two) == 64


def test_an_existing_secret_is_not_overwritten(tmp_path):
    path = write(tmp_path / "secret", b"x" * 16)
    with pytest.raises(InvalidArgumentError, match="File exists"):
        write_secret_file(path)
    assert path.read_bytes() == b"x" * 16


def test_surrounding_white_space_is_stripped(tmp_path):
    assert load_secret(write(tmp_path / "secret", b" sixteen letters.\n\n", 0o400)) == b"sixteen letters."


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_file_accessible_to_others_is_refused(tmp_path, mode):
    path = write(tmp_path / "secret", b"x" * 32, mode)
    with pytest.raises(InvalidArgumentError, match="chmod 600"):
        load_secret(path)


def test_an_invalid_secret_file_is_named_in_the_error(tmp_path):
    for content, message in (
        (b"", "at least 16 random bytes"),
        (b"  " + b"x" * 15 + b"\n", "at least 16 random bytes"),
        (os.urandom(5000), "maximum of 4096"),
    ):
        path = write(tmp_path / "secret", content)
        with pytest.raises(InvalidArgumentError, match=message) as error:
            load_secret(path)
        assert str(error.value).startswith(str(path))
    for path, message in ((tmp_path / "nothing", "No such file"), (tmp_path, "cannot read")):
        with pytest.raises(InvalidArgumentError, match=message):
            load_secret(path)
    with pytest.raises(InvalidArgumentError, match="cannot create"):
        write_secret_file(tmp_path / "no folder" / "secret")
