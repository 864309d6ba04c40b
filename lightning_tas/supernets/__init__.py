"""Weight-sharing supernets, the stand-alone networks cut from them, and how both meet checkpoints and timm.

`supernet` and `network` are the factories; a family registers its classes with `register_family`.
"""

from __future__ import annotations

from lightning_tas.supernets.autoformer import ElasticViT
from lightning_tas.supernets.checkpoints import load_checkpoint_file, load_reference, load_weights
from lightning_tas.supernets.config import ModelConfig, NetOptions
from lightning_tas.supernets.elastic_network import ElasticNetwork
from lightning_tas.supernets.elastic_pit import ElasticPiT
from lightning_tas.supernets.image_network import ImageNetwork, StandaloneNetwork
from lightning_tas.supernets.pit import PoolingTransformer
from lightning_tas.supernets.registry import Family, network, register_family, supernet
from lightning_tas.supernets.timm_model import model_config, read_arch, tas_vit
from lightning_tas.supernets.vision_transformer import VisionTransformer

__all__ = [
    "ElasticNetwork",
    "ElasticPiT",
    "ElasticViT",
    "Family",
    "ImageNetwork",
    "ModelConfig",
    "NetOptions",
    "PoolingTransformer",
    "StandaloneNetwork",
    "VisionTransformer",
    "load_checkpoint_file",
    "load_reference",
    "load_weights",
    "model_config",
    "network",
    "read_arch",
    "register_family",
    "supernet",
    "tas_vit",
]
