"""From a stored image to a normalised tensor: augmentation for training, resize and crop for evaluation.

Shapes: B batch, C channels, H x W the network's image size.

Two forms that give equal bits: `Pipeline.item` takes any image through PIL and timm's transforms, one by one;
`Pipeline.batch` crops, flips, erases and normalises whole uint8 batches, for small images in memory with light
augmentation. All randomness comes from the sample's seed (`draws`). The order of operations is timm's: crop, flip,
RandAugment or colour jitter, normalise, erase.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchvision.transforms.functional as tvf
from PIL import Image
from timm.data.auto_augment import posterize as timm_posterize
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_interp_mode
from timm.data.transforms_factory import transforms_imagenet_eval, transforms_imagenet_train
from torch import Tensor
from torchvision.transforms import Compose

from lightning_tas.data.config import DataConfig
from lightning_tas.data.draws import preserved, seeded, uniforms
from lightning_tas.data.pixels import to_mode
from lightning_tas.errors import UserError

_DRAWS = 3  # crop top, crop left, flip


class Pipeline:
    """Augmentation (`train`) or evaluation transform for images of `in_chans` channels at `size` (H, W)."""

    def __init__(
        self,
        config: DataConfig,
        size: tuple[int, int],
        in_chans: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        train: bool,
    ) -> None:
        self.size, self.in_chans, self.train, self.crop = size, in_chans, train, config.crop
        self.exif = config.exif
        self.hflip = config.hflip if train else 0.0
        self.interpolation = "bicubic" if config.interpolation == "random" else config.interpolation
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
        self.padding = (0, 0)
        # Transforms of timm, None where the settings switch them off.
        self.resized_crop: Any = None
        self.colours: Any = None
        self.erase: Any = None
        self.centre: Any = None
        self.whole: Any = None  # in place of `centre` without random resized crops; images of `size` are left alone
        if train:
            self._build_train(config, mean)
        elif config.crop == "rrc":
            self.centre = self._centred(config.crop_pct)
        if config.crop != "rrc" and config.resize == "shorter":
            self.whole = self._centred(1.0)

    def _centred(self, crop_pct: float) -> Any:
        """The shorter side to size / crop_pct, then the centre of `size`; PIL to PIL, tensor to tensor."""
        steps = transforms_imagenet_eval(self.size, crop_pct, interpolation=self.interpolation, normalize=False)
        return Compose(steps.transforms[:2])

    def _build_train(self, config: DataConfig, mean: tuple[float, ...]) -> None:
        if config.crop == "rrc":
            self.resized_crop = RandomResizedCropAndInterpolation(
                self.size, tuple(config.crop_scale), tuple(config.crop_ratio), config.interpolation
            )
        elif config.crop == "pad":
            given = config.crop_padding
            self.padding = (
                max(1, round(self.size[0] / 8)) if given is None else given,
                max(1, round(self.size[1] / 8)) if given is None else given,
            )
        if config.auto_augment or config.color_jitter:
            self._need_rgb(config)
            try:
                _, colours, _ = transforms_imagenet_train(
                    self.size,
                    color_jitter=config.color_jitter or None,  # type: ignore[arg-type]
                    auto_augment=config.auto_augment,
                    interpolation=config.interpolation,
                    # timm's operations work on RGB; a grey image passes through them as three equal channels.
                    mean=mean if self.in_chans == 3 else mean * 3,
                    separate=True,
                )
            except (AssertionError, ValueError) as error:
                raise UserError(
                    f"data.auto_augment: {config.auto_augment!r} is not valid; timm says: {error}; "
                    "valid: as rand-m9-mstd0.5-inc1, augmix-m3-w3, original, or null"
                ) from None
            self.colours = _mended(colours) if colours.transforms else None
        if config.reprob > 0:
            self.erase = RandomErasing(config.reprob, mode=config.remode, max_count=config.recount, device="cpu")

    def _need_rgb(self, config: DataConfig) -> None:
        if self.in_chans not in (1, 3):
            raise UserError(
                f"data.auto_augment={config.auto_augment!r} and data.color_jitter={config.color_jitter!r} need 1 or 3 "
                f"channels; these images have {self.in_chans}: set data.auto_augment=null data.color_jitter=0"
            )

    @property
    def batchable(self) -> bool:
        """Whether `batch` can do what `item` does."""
        return not self.train or (self.resized_crop is None and self.colours is None)

    def item(self, image: Any, seed: int) -> Tensor:
        """float32 (C, H, W) from a PIL image, uint8 array (H, W[, C]) or uint8 tensor (C, H, W).

        Draws from the global generators; call inside `draws.preserved`.
        """
        top, left, flip = uniforms(np.asarray([seed], dtype=np.uint64), _DRAWS)[0]
        seeded(seed)
        picture = as_picture(image, self.in_chans, self.exif)
        if self.resized_crop is not None:
            picture = self.resized_crop(picture)
        else:
            picture = self.fixed(picture)
            if self.train and self.crop == "pad":
                pad_h, pad_w = self.padding
                picture = tvf.pad(picture, [pad_w, pad_h])
                picture = tvf.crop(picture, _offset(top, pad_h), _offset(left, pad_w), *self.size)
        if flip < self.hflip:
            picture = tvf.hflip(picture)
        if self.colours is not None:
            picture = self.colours(picture.convert("RGB"))
            picture = picture.convert("L") if self.in_chans == 1 else picture
        tensor = self.normalise(as_tensor(picture))
        return tensor if self.erase is None else self.erase(tensor)

    def fixed(self, picture: Any) -> Any:
        """The part that is the same in every epoch: resize (and the centre crop of evaluation)."""
        if self.centre is not None:
            return self.centre(picture)
        height, width = tvf.get_dimensions(picture)[1:]
        if (height, width) == self.size:
            return picture
        if self.whole is not None:
            return self.whole(picture)
        return tvf.resize(picture, list(self.size), str_to_interp_mode(self.interpolation))

    def batch(self, images: Tensor, seeds: np.ndarray) -> Tensor:
        """`item` for a whole uint8 batch (B, C, H, W) that `fixed` has been applied to, with seeds (B,)."""
        if self.train:
            images = self._crop_and_flip(images, uniforms(seeds, _DRAWS))
        floats = self.normalise(images)
        if self.erase is not None:
            with preserved():
                for one, seed in zip(floats, seeds.tolist(), strict=True):
                    seeded(seed)
                    self.erase(one)
        return floats

    def _crop_and_flip(self, images: Tensor, draws: np.ndarray) -> Tensor:
        height, width = self.size
        pad_h, pad_w = self.padding
        if pad_h or pad_w:
            images = torch.nn.functional.pad(images, (pad_w, pad_w, pad_h, pad_h))
        flip = draws[:, 2:3] < self.hflip
        rows = _offset(draws[:, :1], pad_h) + np.arange(height)  # (B, H)
        columns = np.arange(width)[None, :]
        columns = _offset(draws[:, 1:2], pad_w) + np.where(flip, width - 1 - columns, columns)  # (B, W)
        return images[
            torch.arange(len(images))[:, None, None, None],
            torch.arange(images.shape[1])[None, :, None, None],
            torch.from_numpy(rows)[:, None, :, None],
            torch.from_numpy(columns)[:, None, None, :],
        ]

    def normalise(self, pixels: Tensor) -> Tensor:
        """float32 of uint8 (..., C, H, W): (x / 255 - mean) / std."""
        return pixels.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)


def _mended(colours: Any) -> Any:
    """timm's transforms with a posterise operation that also keeps 0 bits."""
    for transform in colours.transforms:
        policies = [getattr(transform, "ops", ()), *getattr(transform, "policy", ())]
        for op in (op for policy in policies for op in policy):
            if op.aug_fn is timm_posterize:
                op.aug_fn = _posterise
    return colours


def _posterise(image: Image.Image, bits_to_keep: int, **unused: Any) -> Image.Image:
    """Keep the upper bits of each pixel; none left is black.

    At magnitude 10, which "mstd" noise reaches, the increasing form of timm keeps 0 bits. Pillow used to take that;
    newer ones raise.
    """
    if bits_to_keep <= 0:
        return Image.new(image.mode, image.size)
    return timm_posterize(image, bits_to_keep)


def _offset(draw: Any, padding: int) -> Any:
    """Offset 0 .. 2 * padding of a crop, from a number in [0, 1)."""
    offset = np.floor(draw * (2 * padding + 1)).astype(np.int64)
    return int(offset) if np.ndim(offset) == 0 else offset


def as_picture(image: Any, in_chans: int, exif: bool = True) -> Any:
    """A PIL image of mode L or RGB; any other number of channels stays a uint8 tensor (C, H, W)."""
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.ascontiguousarray(image[None] if image.ndim == 2 else np.moveaxis(image, 2, 0)))
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3:
            raise UserError(f"images must be PIL or uint8 (C, H, W), got {image.dtype} {tuple(image.shape)}")
        if image.shape[0] not in (1, 3):
            if image.shape[0] != in_chans:
                raise UserError(f"data.in_chans={in_chans}, but the images have {image.shape[0]} channels")
            return image
        image = tvf.to_pil_image(image)
    if in_chans not in (1, 3):
        raise UserError(f"data.in_chans={in_chans}, but the images are of mode {image.mode}")
    return to_mode(image, "L" if in_chans == 1 else "RGB", exif)


def as_tensor(picture: Any) -> Tensor:
    """uint8 (C, H, W) of a PIL image or tensor."""
    return picture if isinstance(picture, Tensor) else tvf.pil_to_tensor(picture)
