"""Files are whole or absent."""

import pytest

from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json, write_atomically, write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = write_text(tmp_path / "a.json", "old")

    def half(temporary):
        temporary.write_text("ne")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_json_round_trip_and_no_nan(tmp_path):
    value = {"a": [1, 2.5, None], "b": "ü"}
    assert read_json(write_json(tmp_path / "deep" / "x.json", value)) == value
    with pytest.raises(ValueError):
        write_json(tmp_path / "nan.json", {"x": float("nan")})
    assert not (tmp_path / "nan.json").exists()


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_bad_files_are_user_errors_that_name_key_and_path(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"arch: .*x\.json"):
        read_json(path, key="arch")


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(UserError, match="folder"):
        read_json(tmp_path)
