"""Every mode that Pillow opens gives the picture that a person sees, or an error that names the file and the mode."""

from __future__ import annotations

import io
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_tas.data import DataConfig, TASDataModule
from lightning_tas.data.augment import as_picture
from lightning_tas.data.pixels import to_mode
from lightning_tas.errors import UserError

GREY = np.linspace(0, 255, 48).round().astype(np.uint8).reshape(6, 8)
COLOUR = np.stack([GREY, GREY[::-1], np.full_like(GREY, 90)], axis=-1)


def stored(image: Image.Image, kind: str, **kwargs: Any) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, **kwargs)
    return Image.open(io.BytesIO(buffer.getvalue()))


def seen(image: Image.Image, mode: str = "RGB", exif: bool = True) -> np.ndarray:
    shown = to_mode(image, mode, exif)
    assert shown.mode == mode and to_mode(shown, mode) is shown
    return np.asarray(shown).astype(int)


def near(found: np.ndarray, wanted: np.ndarray, within: int) -> bool:
    wanted = wanted if wanted.ndim == found.ndim else np.stack([wanted] * 3, axis=-1)
    return found.shape == wanted.shape and int(np.abs(found - wanted.astype(int)).max()) <= within


def test_sixteen_bits_are_scaled() -> None:
    deep = GREY.astype(np.uint16) * 257
    for kind in ("png", "tiff"):
        assert stored(Image.fromarray(deep), kind).mode == "I;16"
        assert near(seen(stored(Image.fromarray(deep), kind)), GREY, 0)
        assert near(seen(stored(Image.fromarray(deep), kind), "L"), GREY, 0)
    big_endian = Image.frombytes("I;16B", (8, 6), deep.astype(">u2").tobytes())
    assert near(seen(big_endian), GREY, 0) and near(seen(stored(big_endian, "tiff")), GREY, 0)
    pgm = b"P5 8 6 65535\n" + deep.astype(">u2").tobytes()
    assert Image.open(io.BytesIO(pgm)).mode == "I" and near(seen(Image.open(io.BytesIO(pgm))), GREY, 0)
    # White is zero, which Pillow heeds for 8 bits only; and 12 bits of 16.
    assert near(seen(stored(Image.fromarray(65535 - deep), "tiff", tiffinfo={262: 0})), GREY, 0)
    see_through = stored(Image.fromarray(deep), "png", transparency=0)
    assert (
        see_through.mode == "I;16" and seen(see_through)[0, 0].tolist() == [255] * 3 and seen(see_through)[0, 1, 0] < 9
    )


def test_other_modes_show_their_colours() -> None:
    grey, colour = Image.fromarray(GREY), Image.fromarray(COLOUR)
    black_white = GREY > 127
    assert near(seen(stored(Image.fromarray(black_white), "png")), black_white * 255, 0)
    assert near(seen(stored(grey, "png")), GREY, 0) and near(seen(stored(colour, "png")), COLOUR, 0)
    assert near(seen(stored(colour.convert("P", palette=Image.Palette.ADAPTIVE), "png")), COLOUR, 0)
    for mode, within in (("RGBX", 0), ("CMYK", 0), ("YCbCr", 3), ("HSV", 6)):
        assert near(seen(colour.convert(mode)), COLOUR, within), mode
    assert near(seen(stored(colour.convert("CMYK"), "tiff")), COLOUR, 0)
    assert near(seen(stored(colour.convert("CMYK"), "jpeg", quality=100)), COLOUR, 24)


def test_lab_is_converted() -> None:
    """L* 0, 53.6 and 100 are black, the grey 128, and white; a* and b* give colours (CIE, D50 to sRGB)."""
    lab = np.array([[[0, 128, 128], [137, 128, 128], [255, 128, 128], [138, 128 + 81, 128 + 70]]], np.uint8)
    found = seen(Image.frombytes("LAB", (4, 1), (lab ^ np.array([0, 128, 128], np.uint8)).tobytes()))
    assert near(found[:, :3], np.array([[0, 128, 255]]), 2)
    assert found[0, 3, 0] > 245 and found[0, 3, 1:].max() < 30


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa", "P", "RGB", "L"])
def test_what_is_transparent_shows_white(mode: str) -> None:
    """Half of the picture is see-through: a person sees the page, not the colour that is stored below."""
    alpha = np.full((6, 8), 255, np.uint8)
    alpha[:, 4:] = 0
    picture = Image.fromarray(np.dstack([GREY, GREY, GREY, alpha]))
    if mode == "P":
        palette = Image.fromarray(np.where(alpha > 0, 10, 20).astype(np.uint8)).convert("P")
        image = stored(palette, "png", transparency=20)
        wanted = np.where(alpha > 0, 10, 255)
    elif mode in ("RGB", "L"):
        wanted = np.where(alpha > 0, 10, 255)
        image = Image.fromarray(np.where(alpha > 0, 10, 20).astype(np.uint8)).convert(mode)
        image = stored(image, "png", transparency=20 if mode == "L" else (20, 20, 20))
    else:
        straight = picture.convert("LA") if mode in ("LA", "La", "PA") else picture
        image = straight.convert("P").convert("PA") if mode == "PA" else straight.convert(mode)
        if mode == "PA":
            image.putalpha(Image.fromarray(alpha))
        wanted = np.where(alpha > 0, GREY, 255)
    assert image.mode == mode or mode == "P"
    assert near(seen(image), wanted, 1 if mode != "PA" else 26)
    assert near(seen(image, "L"), wanted, 1 if mode != "PA" else 26)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_upright(orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    turned = Image.fromarray(np.dstack([GREY, GREY, GREY]))
    back = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 3: Image.Transpose.ROTATE_180,
            2: Image.Transpose.FLIP_LEFT_RIGHT, 4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
            7: Image.Transpose.TRANSVERSE}  # fmt: skip
    if orientation > 1:
        turned = turned.transpose(back[orientation])
    image = stored(turned, "png", exif=tags)
    assert near(seen(image), GREY, 0)
    plain = as_picture(stored(turned, "png", exif=tags), 3, exif=False)
    assert np.array_equal(np.asarray(plain), np.asarray(turned))


def test_damaged_exif_is_no_damaged_picture() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of a file that it does not name
        for junk in (b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff", b"Exif\x00\x00junk", b"Exif\x00\x00II*\x00"):
            assert seen(stored(Image.fromarray(COLOUR), "jpeg", exif=junk)).shape == (6, 8, 3)


def folder_with(tmp_path: Path, content: bytes, name: str) -> TASDataModule:
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / name).write_bytes(content)
    config = DataConfig(name="folder", root=str(tmp_path), img_size=8, batch_size=1, search_val=0)
    return TASDataModule(config)


def saved(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def promising(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels; of 182 million, Pillow raises what is neither OSError nor ValueError."""
    whole = saved(Image.fromarray(GREY), "png")
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]


BROKEN = {
    "float.tif": (saved(Image.fromarray(np.ones((6, 8), np.float32)), "tiff"), "mode is 'F'"),
    "integers.tif": (saved(Image.fromarray(np.ones((6, 8), np.int32)), "tiff"), "mode is 'I'"),
    "empty.png": (b"", "it is empty"),
    "text.jpg": (b"no image at all", "no image of a kind that Pillow knows"),
    "cut.jpg": (saved(Image.fromarray(COLOUR), "jpeg")[:-50], "runcated"),
    "bomb.png": (promising(14_000, 13_000), "exceeds limit"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    content, reason = BROKEN[name]
    with pytest.raises(UserError) as caught:
        next(iter(folder_with(tmp_path, content, name).test_dataloader()))
    message = str(caught.value)
    assert message.startswith(f"data.root: image '{tmp_path / 'test' / 'a' / name}' cannot be read: ")
    assert reason in message and "\n" not in message and " at 0x" not in message
