"""Images: data sets, splits, augmentation, and loaders that resume bit for bit."""

from lightning_tas.data import arrays as _arrays  # these two register the built-in data sets
from lightning_tas.data import images as _images
from lightning_tas.data.config import DataConfig
from lightning_tas.data.module import TASDataModule
from lightning_tas.data.registry import ArrayImages, Facts, ImageData, names, register

__all__ = ["ArrayImages", "DataConfig", "Facts", "ImageData", "TASDataModule", "names", "register"]

del _arrays, _images
