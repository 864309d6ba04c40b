"""Files are whole or absent."""

import json

import pytest
import torch

from lightning_tas.errors import UserError
from lightning_tas.launch.files import DIGEST, Damaged, read_json, read_torch, write_atomically, write_json, write_text


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
    assert read_json(write_json(tmp_path / "x.json", value)) == value
    with pytest.raises(UserError, match="its folder does not exist"):  # and does not come back
        write_json(tmp_path / "gone" / "x.json", value)
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


def test_a_flipped_bit_of_our_json_is_never_read_as_if_it_were_whole(tmp_path):
    """A digit that became another one is valid JSON: a network of three heads more, a latency of 9 ms less."""
    value = {"arch": {"num_heads": [3, 4], "id": "a-1"}, "latency": 12.75, "status": "finished", "none": None}
    path = write_json(tmp_path / "x.json", value)
    content, refused = path.read_bytes(), 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            found = read_json(path, key="arch")
        except UserError as error:
            refused += 1
            assert "arch: " in str(error) and "x.json" in str(error)
        else:  # in the name of the digest alone
            assert {key: found[key] for key in value} == value
    assert refused >= len(content) - len(DIGEST)
    path.write_text(json.dumps(value))  # by hand: nobody says what it should be
    assert read_json(path) == value


def test_spaces_and_order_of_our_json_may_change(tmp_path):
    value = {"b": {2: "x", 10: "y"}, "a": [1.0, 1e-7, 3]}
    path = write_json(tmp_path / "x.json", value)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, indent=8))
    assert read_json(path) == json.loads(json.dumps(value))


def test_a_flipped_bit_of_torchs_files_is_named(tmp_path, flip):
    path = tmp_path / "x.ckpt"
    torch.save({"a": torch.arange(1000.0), "step": 3}, path)
    assert read_torch(path)["step"] == 3
    whole = path.read_bytes()
    flip(path)
    assert torch.load(path, weights_only=True)["step"] == 3  # torch notices nothing
    with pytest.raises(Damaged, match=r"the checksum of .*/data/0 in it is wrong"):
        read_torch(path)
    for place in range(0, len(whole), 31):  # anywhere: the same content, or an error
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            found = read_torch(path)
        except Exception:
            continue
        assert found["step"] == 3 and torch.equal(found["a"], torch.arange(1000.0)), place
    torch.save({"step": 3}, path, _use_new_zipfile_serialization=False)  # older files have no checksums
    assert read_torch(path) == {"step": 3}
