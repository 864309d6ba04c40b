"""Training images per second that the data module gives, without worker processes, on one core.

The fast form (batches of tensors) against the per-image form of the same augmentation, and the strong augmentation.

    python benchmarks/data.py
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

from lightning_tas.data import ArrayImages, DataConfig, TASDataModule
from lightning_tas.data.dataset import AugmentedImages

LIGHT: dict[str, Any] = {"crop": "pad", "auto_augment": None, "color_jitter": 0.0, "reprob": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "crop, flip": LIGHT,
    "crop, flip, erase": {**LIGHT, "reprob": 0.25},
    "DeiT": {},
}


def rate(images: AugmentedImages, order: Any, seconds: float) -> float:
    """Images per second of process time."""
    count, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        for keys in order.batches(0):
            count += len(images.__getitems__(keys)[1])
            if time.process_time() - start > seconds:
                break
    return count / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=["digits", "fashion_mnist"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f}")
    for name in options.names:
        for case, settings in CASES.items():
            module = TASDataModule(DataConfig(name=name, batch_size=options.batch_size, **settings))
            loader = module.train_dataloader()
            images: Any = loader.dataset
            line = f"{name}, {case}: {rate(images, loader.sampler, options.seconds):,.0f} images/s"
            if images.pixels is not None:
                assert isinstance(images.source, ArrayImages)
                images.pixels = None
                line += f"; one by one {rate(images, loader.sampler, options.seconds):,.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
