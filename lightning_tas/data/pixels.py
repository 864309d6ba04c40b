"""The picture that a person sees: 8-bit grey or RGB from whatever Pillow opens, for every reader alike."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
from PIL import Image

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # TIFF
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N")
# Said without the file's name, of what does not touch the pixels.
warnings.filterwarnings("ignore", "(Corrupt|Possibly corrupt) EXIF|Metadata Warning", module=r"PIL\.TiffImagePlugin")


def to_mode(image: Image.Image, mode: str, exif: bool = True) -> Image.Image:
    """`image` as `mode`, "L" or "RGB": 16 bits scaled to 8, what is transparent on white, turned as EXIF says.

    Applied to its own result it changes nothing. `exif`: heed the EXIF orientation.

    Raises:
        ValueError: a mode without a fixed black and white (32-bit integers, floats), or one that Pillow cannot convert.
        Exception: whatever Pillow raises for a damaged file; it reads most files only here.
    """
    image.load()
    turn = _TURNS.get(_orientation(image)) if exif else None
    if image.mode in _SIXTEEN_BIT or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = _eight_bit(image)
    elif image.mode in ("I", "F"):
        raise ValueError(f"its mode is {image.mode!r}, in which no value is white: store it with 8 or 16 bits")
    elif image.mode == "LAB":
        image = _of_lab(image)
    elif image.has_transparency_data:
        image = _on_white(image)
    if image.mode != mode:
        try:
            image = image.convert(mode)
        except ValueError as error:
            raise ValueError(f"its mode is {image.mode!r}, which Pillow cannot show as {mode}") from error
    if turn is not None:
        image = image.transpose(turn)
        image.info = {}  # or it would be turned again
    return image


def _orientation(image: Image.Image) -> Any:
    """EXIF orientation; 1 (upright) where there is none, or where it is damaged: the pixels are good all the same."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF raises of many kinds
        return 1


def _eight_bit(image: Image.Image) -> Image.Image:
    """Grey of 12 or 16 bits, of which Pillow's own `convert` keeps what is below 256."""
    tags = getattr(image, "tag_v2", {})
    top = 4095 if tags.get(_BITS_PER_SAMPLE) == (12,) else 65535
    values = np.asarray(image).astype(np.int64).clip(0, top)
    if tags.get(_PHOTOMETRIC) == 0:  # white is zero; Pillow heeds it for 8 bits only
        values = top - values
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        values[values == transparent] = top
    return Image.fromarray(((values * 255 + top // 2) // top).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    straight = image.convert("LA") if image.mode == "La" else image
    straight = straight.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", straight.size, "white"), straight).convert("RGB")


def _of_lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    return ImageCms.applyTransform(image, _lab_to_rgb()) or image


@functools.cache
def _lab_to_rgb() -> Any:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, rgb, "LAB", "RGB")
