"""`TASDataModule`: images for a LightningModule, split, augmented, sharded over ranks and resumable."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_tas.class_names import check_continued, class_order
from lightning_tas.data.arrays import SyntheticImages
from lightning_tas.data.augment import Pipeline
from lightning_tas.data.config import DataConfig, check, size_pair
from lightning_tas.data.dataset import AugmentedImages
from lightning_tas.data.loader import CountedLoader
from lightning_tas.data.registry import ArrayImages, Facts, ImageData, find, targets_of
from lightning_tas.data.sampling import EvalOrder, TrainOrder
from lightning_tas.data.splits import Splits, check_unseen, held_out
from lightning_tas.data.stored import cache_folder
from lightning_tas.data.verify import bad_images
from lightning_tas.data.verify import check as check_images
from lightning_tas.data.workers import FEW, default_workers
from lightning_tas.errors import UserError

IN_MEMORY = (ArrayImages, SyntheticImages)
"""Images that no file holds."""


class TASDataModule(pl.LightningDataModule):
    """Loaders of one data set.

    `train_dataloader` shuffles and augments the training part; `val_dataloader` is the search-validation split, held
    out of training by (seed); `test_dataloader` is the test set, which no search may see. Batches are (images float32
    (B, C, H, W), targets int64 (B,)); evaluation fills ranks up with the target -1.

    `num_classes`, `in_chans`, `img_size`, `num_train` and `steps_per_epoch` of a built-in data set are known without
    its files; `load` opens them (idempotent) and raises UserError when they are missing or do not fit the settings.
    """

    def __init__(self, config: DataConfig, seed: int = 0) -> None:
        super().__init__()
        check(config)
        self.config, self.seed = config, seed
        self._entry = find(config.name)
        self._known: Facts | None = self._entry.facts(config)
        self._data: ImageData | None = None
        self._splits: Splits | None = None
        self.trained_on: dict[str, Any] | None = None  # once loaded: how the split was drawn, for `check_unseen`
        self._told: set[str] = set()  # bad images that have been named
        if self._known is not None:
            self._check_batch(self.num_train)

    # ---- what is known -------------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        """Facts of the loaded data, or those known before."""
        if self._known is None:
            self.load()
        assert self._known is not None
        return self._known

    @property
    def num_classes(self) -> int:
        """Classes that the network must tell apart."""
        return self.config.num_classes or self.facts.num_classes

    @property
    def in_chans(self) -> int:
        """Channels of the images that the loaders give."""
        return self.config.in_chans or self.facts.in_chans

    @property
    def img_size(self) -> tuple[int, int]:
        """(H, W) of the images that the loaders give."""
        return self.facts.img_size if self.config.img_size is None else size_pair(self.config.img_size)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean per channel that images are normalised with."""
        return self._per_channel("mean", self.config.mean, self.facts.mean)

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation per channel that images are normalised with."""
        return self._per_channel("std", self.config.std, self.facts.std)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, in the order of their numbers (opens the data)."""
        return self.load().class_names

    @property
    def known_names(self) -> list[str] | None:
        """Names of the classes; None where the data have but numbers for them."""
        data = self.load()
        return data.class_names if data.named else None

    def order_of(self, names: Sequence[str] | None, what: str) -> list[int] | None:
        """Where these classes are among the `names` of the weights `what`, see `class_names.class_order`.

        Raises:
            OtherClasses: other names, unless `data.class_names` is "ignore".
        """
        if names is None or self.config.class_names == "ignore":
            return None
        return class_order(names, self.known_names, what)

    @property
    def num_train(self) -> int:
        """Images that an epoch without repeated augmentation trains on."""
        if self._splits is not None:
            return len(self._splits.train)
        total = self.facts.num_train
        if self._splits is not None:  # the facts had to be read from the data
            return len(self._splits.train)
        assert total is not None
        if not self.config.leak:
            total -= held_out(self.config.search_val, total)
        return total if self.config.train_subset is None else min(total, self.config.train_subset)

    def steps_per_epoch(self, world_size: int = 1) -> int:
        """Training batches per epoch of each of `world_size` processes."""
        return len(self._train_order(np.arange(self.num_train), 0, world_size))

    def check_batches(self, world_size: int, train_share: Any = None, val_share: Any = None) -> None:
        """Refuse settings under which a process would have no batch; a share (float) is of the batches of an epoch.

        Raises:
            UserError: names `data.batch_size`, or Lightning's `limit_train_batches` or `limit_val_batches`.
        """
        steps = self.steps_per_epoch(world_size)
        if steps == 0:
            raise UserError(
                f"data.batch_size: {self.config.batch_size} is not valid; {world_size} processes share "
                f"{self.num_train} training images: not one whole batch each"
            )
        shares = [("train", train_share, steps)]
        if isinstance(val_share, float):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what validation uses is said when it is used
                shares.append(("val", val_share, math.ceil(len(self.val_dataloader()) / world_size)))
        for name, share, batches in shares:
            if isinstance(share, float) and 0 < share * batches < 1:
                raise UserError(
                    f"trainer.limit_{name}_batches: {share!r} is not valid; of {batches} batches that is less than "
                    f"one; valid: {1 / batches:.3g} or above, or a whole number of batches"
                )

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self) -> ImageData:
        """Open the data, check them against the settings, and split them."""
        if self._data is None:
            data = self._entry.load(self.config)
            self._check_classes(data)
            facts = data.facts()
            if self._known is not None:
                assert self._known.in_chans == facts.in_chans, (self._known, facts)
            splits = self._split(data)
            self._check_batch(len(splits.train))
            self._known = facts
            for train in (True, False):
                self._pipeline(train)  # channels, normalisation and augmentation fit, or the user hears it now
            if self.config.verify:
                self._verify(data)
            self._data, self._splits = data, splits
        return self._data

    def _verify(self, data: ImageData) -> None:
        """`data.verify`: read everything that is in files."""
        bad: dict[str, str] = {}
        total, folder = 0, cache_folder(self.config)
        for source in (data.train, data.val, data.test):
            if source is not None and not isinstance(source, IN_MEMORY):
                images = self._images(source, np.arange(len(source)), self._pipeline(train=False))  # type: ignore[arg-type]
                total += len(images)
                found = check_images(source, images.problem, folder)
                bad |= {images.name(number): reason for number, reason in found.items()}
        if bad and self.config.on_bad_image == "error":
            raise UserError(f"{bad_images(bad, total)}. data.on_bad_image=skip does without them")
        if bad:
            warnings.warn(f"{bad_images(bad, total)}; data.on_bad_image=skip does without them", stacklevel=2)
        self._told.update(bad)

    def setup(self, stage: str | None = None) -> None:
        """Lightning's hook, on every process."""
        self.load()

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: which classes the numbers mean."""
        return {"name": self.config.name, "class_names": list(self.class_names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint that was trained on other classes, or on the same ones in another order."""
        if self.config.class_names != "ignore":
            check_continued(state_dict, self.state_dict())

    def _check_classes(self, data: ImageData) -> None:
        found = len(data.class_names)
        wanted = self.config.num_classes
        if wanted is not None and found > wanted:
            raise UserError(
                f"data.num_classes: {wanted} is not valid; data.name={self.config.name} has {found} classes"
            )
        if wanted is None and self._known is not None and found != self._known.num_classes:
            raise UserError(
                f"data.root: {self.config.name} has {self._known.num_classes} classes, but {self.config.root} holds "
                f"{found}: use data.name=folder, or set data.num_classes={found}"
            )

    def _split(self, data: ImageData) -> Splits:
        targets = targets_of(data.train)
        config, seed = self.config, self.seed
        search_val = 0.0 if data.val is not None else config.search_val
        splits = Splits.of(targets, search_val, config.leak, config.train_subset, seed)
        classes = np.ascontiguousarray(targets, dtype=np.int64).tobytes() + "\0".join(data.class_names).encode()
        self.trained_on = {
            "search_val": search_val, "leak": config.leak, "train_subset": config.train_subset, "seed": seed,
            "classes_sha256": hashlib.sha256(classes).hexdigest(),
        }  # fmt: skip
        return splits

    def check_unseen(self, trained_on: Sequence[Mapping[str, Any] | None] | None, weights: str) -> None:
        """Refuse to choose networks by images that the `weights` were trained on.

        Args:
            trained_on: what each of their trainings recorded of its split; None in files of earlier versions, and of
                released weights (a warning).

        Raises:
            UserError: names `data.search_val`; not with `data.leak`, nor where the data have a validation set.
        """
        data = self.load()
        assert self._splits is not None and self.trained_on is not None
        if data.val is None and not self.config.leak:
            targets = targets_of(data.train)
            for before in [None] if trained_on is None else trained_on:
                check_unseen(before, weights, self._splits.search_val, targets, self.trained_on["classes_sha256"])

    def _check_batch(self, num_train: int) -> None:
        size = self.config.batch_size
        if num_train < 1:
            raise UserError(
                f"data.search_val: {self.config.search_val!r} is not valid; it leaves no image of {self.config.name} "
                "to train on"
            )
        if size > num_train:
            raise UserError(
                f"data.batch_size: {size} is not valid; only {num_train} images of {self.config.name} are left to "
                f"train on (data.search_val={self.config.search_val}, data.train_subset={self.config.train_subset})"
            )

    def _per_channel(self, key: str, given: Any, native: tuple[float, ...]) -> tuple[float, ...]:
        if given is not None:
            numbers = list(given) if isinstance(given, (list, tuple)) else [given]
            real = all(isinstance(v, (int, float)) and math.isfinite(v) for v in numbers)
            values = tuple(float(v) for v in numbers) if real else ()
            if len(values) not in (1, self.in_chans) or (key == "std" and min(values) <= 0):
                raise UserError(
                    f"data.{key}: {given!r} is not valid; valid: one number or {self.in_chans}"
                    + (", above 0" if key == "std" else "")
                )
        elif len(native) == self.in_chans:
            values = native
        elif {len(native), self.in_chans} == {1, 3}:
            values = (sum(native) / len(native),)  # grey to colour or back
        else:
            raise UserError(f"data.in_chans: {self.in_chans} is not valid; {self.config.name} has {len(native)}")
        return values * self.in_chans if len(values) == 1 else values

    # ---- loaders -------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> CountedLoader:
        """Shuffled, augmented batches of this rank."""
        data = self.load()
        assert self._splits is not None
        rank, world_size = self._place()
        order = self._train_order(self._splits.train, rank, world_size)
        if len(order) == 0:
            raise UserError(
                f"data.batch_size: {self.config.batch_size} is not valid; {world_size} processes share "
                f"{len(self._splits.train)} training images, {order.samples} each: not one whole batch"
            )
        images = self._images(data.train, self._splits.train, self._pipeline(train=True), replace=True)
        return self._loader(images, order, self._progress)

    def val_dataloader(self) -> CountedLoader:
        """The search-validation split; the test set, with a warning, when nothing is held out."""
        data = self.load()
        assert self._splits is not None
        if data.val is not None:
            return self._eval_loader(data.val, np.arange(len(data.val)))  # type: ignore[arg-type]
        if len(self._splits.search_val) == 0:
            warnings.warn(
                "data.search_val=0 holds no images out: validation uses the test set, so nothing that is chosen by it "
                "(a search, early stopping) may be reported on the test set",
                stacklevel=2,
            )
            return self.test_dataloader()
        return self._eval_loader(data.train, self._splits.search_val)

    @property
    def chooses(self) -> bool:
        """Whether there are images to choose networks by, which are neither trained on nor the test set."""
        data = self.load()
        assert self._splits is not None
        return data.val is not None or len(self._splits.search_val) > 0

    def search_loader(self) -> CountedLoader:
        """The search-validation split, the whole of it on every process, for choosing networks.

        Raises:
            UserError: nothing is held out; the test set chooses nothing.
        """
        data = self.load()
        assert self._splits is not None
        source, indices = data.train, self._splits.search_val
        if data.val is not None:
            source, indices = data.val, np.arange(len(data.val))  # type: ignore[arg-type]
        if not len(indices):
            raise UserError("data.search_val: 0 holds no images out, and networks are never chosen by the test set")
        return self._eval_loader(source, indices, (0, 1))

    def test_dataloader(self) -> CountedLoader:
        """The test set."""
        data = self.load()
        return self._eval_loader(data.test, np.arange(len(data.test)))  # type: ignore[arg-type]

    def selection_batch(self, number: int) -> tuple[Tensor, Tensor]:
        """`number` images (B, C, H, W) of the training part, evenly spread, without augmentation, and their targets.

        For selectors and proxies that want real data. Never held-out or test images.
        """
        data = self.load()
        assert self._splits is not None
        train = self._splits.train
        if not 1 <= number <= len(train):
            raise UserError(f"select.batch_size: {number} is not valid; valid: 1 to {len(train)} training images")
        chosen = train[np.linspace(0, len(train) - 1, number).round().astype(np.int64)]
        images = self._images(data.train, chosen, self._pipeline(train=False), replace=True)
        loader = CountedLoader(images, EvalOrder(chosen, number, 0, 1), 0, False, None)
        batch: tuple[Tensor, Tensor] = next(iter(loader))
        return batch

    def _train_order(self, indices: np.ndarray, rank: int, world_size: int) -> TrainOrder:
        c = self.config
        return TrainOrder(indices, c.batch_size, self.seed, rank, world_size, c.repeated_aug, c.drop_last)

    def _eval_loader(self, source: Any, indices: np.ndarray, place: tuple[int, int] | None = None) -> CountedLoader:
        images = self._images(source, indices, self._pipeline(train=False))
        batch_size = self.config.eval_batch_size or self.config.batch_size
        return self._loader(images, EvalOrder(indices, batch_size, *(place or self._place())))

    def _images(self, source: Any, indices: np.ndarray, pipeline: Pipeline, replace: bool = False) -> AugmentedImages:
        skip = self.config.on_bad_image == "skip"
        return AugmentedImages(source, indices, pipeline, self.seed, skip, replace, self._told)

    def _loader(self, images: AugmentedImages, order: TrainOrder | EvalOrder, position: Any = None) -> CountedLoader:
        pin = torch.cuda.is_available() if self.config.pin_memory is None else self.config.pin_memory
        return CountedLoader(images, order, self._workers(images), pin, position)

    def _workers(self, images: AugmentedImages) -> int:
        """`data.num_workers`, or what suits where it is not set."""
        if self.config.num_workers is not None:
            return self.config.num_workers
        if isinstance(images.source, IN_MEMORY) or len(images) < FEW:
            return 0
        largest = max(self.config.batch_size, self.config.eval_batch_size or 0)
        batch = largest * self.in_chans * math.prod(self.img_size) * 4
        return default_workers(batch, self.trainer.num_devices if self.trainer is not None else None)

    def _pipeline(self, train: bool) -> Pipeline:
        return Pipeline(self.config, self.img_size, self.in_chans, self.mean, self.std, train)

    def _progress(self, loader: CountedLoader) -> tuple[int, int] | None:
        """(current epoch, finished batches of it), for the loader that the trainer runs through."""
        if self.trainer is None or self.trainer.train_dataloader is not loader:
            return None  # somebody wants training images for another purpose, perhaps in the middle of an epoch
        return self.trainer.current_epoch, self.trainer.fit_loop.batch_idx + 1

    def _place(self) -> tuple[int, int]:
        """(rank, world size) of this process."""
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
