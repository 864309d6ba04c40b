"""Search inside `Trainer.fit`: strategies as callbacks, judged by proxies or by accuracy with inherited weights.

    Trainer(callbacks=[EvolutionSearch(limits={"params": [5e6, 7e6]})]).fit(SupernetModule(...), datamodule=data)

Training is the same as without (bit for bit, where training repeats itself so: docs/training.md): a search works on a
private copy of the supernet, draws from generators of the seed, and logs to the loggers directly. Its results are in
the checkpoint; the state of one that is under way is kept in the folder after every generation, so a killed run goes on
inside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_tas.callbacks import search_record
from lightning_tas.callbacks.contract import check_module, validation_loader
from lightning_tas.callbacks.proxy_scoring import ends, private_twin, shows_bars
from lightning_tas.callbacks.search_build import Surroundings, build_job, build_region, check_space
from lightning_tas.callbacks.search_check import check_search, check_sources, judges
from lightning_tas.callbacks.search_record import Found
from lightning_tas.errors import UserError, typed, unknown
from lightning_tas.evaluator import AUTOCAST, preserved_rng
from lightning_tas.launch.files import make_folder
from lightning_tas.launch.settings import dotted
from lightning_tas.launch.throughput import Throughput
from lightning_tas.search.config import CHOICES, LimitsConfig, SearchConfig
from lightning_tas.search.objective import ACCURACY
from lightning_tas.training.ema import WeightAverage


class SearchCallback(Callback):
    """A search at the moment `when` of supernet training; the classes below name the strategy.

    Args:
        score: what is maximised: "accuracy" (top-1 with inherited weights on held-out images) or a proxy's name.
        limits: ``{"params": [5e6, 7e6], "macs": [None, 1.4e9], "latency": ..., "activations": ...}``.
        when: "fit_start" (before the first step), "every_n_epochs" (after every so many, and after the last), or
            "fit_end" (after the last epoch, before its checkpoint, which then holds the result).
        every_n_epochs: for ``when="every_n_epochs"``. Each time is a whole search of its own, from the same first
            candidates, because scores of older weights do not compare with new ones.
        top: how many networks are handed on.
        seed: None: the module's.
        folder: where `search.csv`, `search.json`, `search.png`, `result.json` and the state are written; None: the
            folder of the trainer's first logger, else its `default_root_dir`.
        loader: gives the whole of the held-out images on every process; None: the data module's `search_loader`, else
            the validation data of the fit.
        settings: those of `SearchConfig` (mode, proxy_options, batch_size, init, racing, eval_images, ...) and of the
            strategy (population, generations, ...).

    Averaged weights are searched where there are some (`train.ema`): they are what is measured and exported. Processes
    share the networks, and all get the same results. Logs ``search/*`` and ``system/search_seconds``.
    """

    strategy: ClassVar[str]

    def __init__(
        self,
        score: str = "accuracy",
        limits: Mapping[str, Any] | None = None,
        when: str = "fit_end",
        every_n_epochs: int = 1,
        top: int = 1,
        seed: int | None = None,
        folder: Path | str | None = None,
        loader: Callable[[], Any] | None = None,
        **settings: Any,
    ) -> None:
        if when not in CHOICES["search.when"]:
            raise unknown("when", when, CHOICES["search.when"])
        known = asdict(SearchConfig())
        own = {key: settings.pop(key) for key in list(settings) if key in known and key != "strategy"}
        options = own.pop("options", None) or {}
        if not isinstance(options, Mapping):
            raise UserError(f"search.options: {options!r} is not valid; valid: a mapping, as {{population: 50}}")
        self.search = SearchConfig(
            strategy=self.strategy,
            score=score,
            when=when,
            every_n_epochs=every_n_epochs,
            top=top,
            options={**options, **settings},
            **own,
        )
        prices = asdict(LimitsConfig())
        if not isinstance(limits, Mapping | None):
            raise UserError(f"limits: {limits!r} is not valid; valid: a mapping, as {{'params': [5e6, 7e6]}}")
        for key in limits or {}:
            if key not in prices:
                raise unknown("limits", key, prices)
        self.limits = LimitsConfig(**dict(limits or {}))
        check_search(self.search, self.limits)
        self.seed, self.folder, self.loader = seed, Path(folder) if folder is not None else None, loader
        self.visits: list[dict[str, Any]] = []
        self._place: Path | None = None
        self.identity: Any = None
        self.on_found: Callable[[Found], None] | None = None
        self._restored: dict[str, Any] | None = None

    @classmethod
    def of(cls, search: SearchConfig, limits: LimitsConfig, **more: Any) -> SearchCallback:
        """The callback of a recipe's settings."""
        own = asdict(search)
        name = own.pop("strategy")
        if name in CALLBACKS:
            return CALLBACKS[name](limits=asdict(limits), **own, **more)
        return AnySearch(name, limits=asdict(limits), **own, **more)

    # --- when -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what would only be found out when it is time to search, which may be after days of training."""
        if stage != "fit":
            return
        check_module(pl_module, "search", seed=self.seed is None)
        net: Any = pl_module.net
        data: Any = getattr(trainer, "datamodule", None)
        check_sources(self.search, self._loader(trainer) is not None, hasattr(data, "selection_batch"))
        others = [one for one in trainer.callbacks if isinstance(one, SearchCallback) and one is not self]  # type: ignore[attr-defined]
        if any(one._into(trainer) == self._into(trainer) for one in others):
            raise UserError(
                f"search: two searches would write into {str(self._into(trainer))!r}, one over the other; "
                "give each a folder of its own: folder=..."
            )
        self._place = self._into(trainer)  # on all processes: they ask one another for it
        if trainer.is_global_zero:
            make_folder(self._place, "search")
        device, bars = trainer.strategy.root_device, shows_bars(trainer)
        amp = _amp(trainer, device)
        region = build_region(net, self.limits, self._place, device=device, amp_dtype=amp, progress=bars)
        check_space(region, self.search)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare a restored record with the settings; search, where it is the time."""
        loader = self._loader(trainer)
        if ACCURACY in judges(self.search) and loader is not None:
            loader()  # a loader that is not the same on every process ends the run here, not after days of training
        if self._restored is not None:
            self._adopt(self._restored, trainer.global_step)
        if self.search.when == "fit_start" and not self.visits:
            if trainer.global_step:
                rank_zero_warn("search: the checkpoint holds no search of the initial weights; these are trained")
            self._search(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search when it is due; comes before the checkpoint of the epoch, which holds the result."""
        done, last = trainer.current_epoch + 1, ends(trainer)
        due = self.search.when == "every_n_epochs" and (done % self.search.every_n_epochs == 0 or last)
        if due or (self.search.when == "fit_end" and last):
            self._search(trainer, pl_module, done)

    # --- what -------------------------------------------------------------------------------------------------------

    def _search(self, trainer: Trainer, module: LightningModule, epoch: int) -> None:
        if any(visit["epoch"] == epoch for visit in self.visits):
            return
        began = time.perf_counter()
        with preserved_rng(), torch.inference_mode(False):
            job = self._job(trainer, module)
            found = job.run()
        if found.why_none:
            rank_zero_warn(f"search: {found.why_none}")
        self.visits.append({"epoch": epoch, "step": trainer.global_step, **found.to_dict()})
        if trainer.is_global_zero:
            into = self._into(trainer)
            if not (into / "study.json").exists():  # a run of commands measures what was found, and writes its own
                search_record.write_winners(into / "result.json", found, job.settings)
            self._log(trainer, found, epoch, time.perf_counter() - began)
            if self.on_found is not None:
                self.on_found(found)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Throughput):
                callback.leave_out(time.perf_counter() - began)

    def _job(self, trainer: Trainer, module: LightningModule) -> Any:
        """The search of the weights of now."""
        twin = private_twin(module.net, module.device)  # type: ignore[arg-type]
        average(trainer, twin)
        data: Any = getattr(trainer, "datamodule", None)
        around = Surroundings(
            seed=self.seed if self.seed is not None else int(module.seed),  # type: ignore[arg-type]
            folder=self._into(trainer),
            loader=self._loader(trainer),
            batch=getattr(data, "selection_batch", None),
            device=module.device,
            amp_dtype=_amp(trainer, module.device),
            on_generation=lambda row: self._log_generation(trainer, row),
            progress=shows_bars(trainer),
            identity=self.identity,
        )
        return build_job(twin, self.search, self.limits, around)

    def _loader(self, trainer: Trainer) -> Callable[[], Any] | None:
        own = self.loader or getattr(getattr(trainer, "datamodule", None), "search_loader", None)
        return own or validation_loader(trainer)

    def _into(self, trainer: Trainer) -> Path:
        if self._place is not None:
            return self._place
        return self.folder or Path(trainer.log_dir or trainer.default_root_dir)

    def _log_generation(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        for logger in trainer.loggers:
            if hasattr(logger, "log_generation"):  # ours for W&B, whose axis counts generations
                logger.log_generation(row)

    def _log(self, trainer: Trainer, found: Found, epoch: int, seconds: float) -> None:
        at, shown = max(trainer.global_step - 1, 0), max(epoch - 1, 0)
        row: dict[str, Any] = {}
        if found.networks:
            best = found.networks[0]
            row = {"search/best": best.value, "search/best_params": best.params, "search/best_macs": best.macs}
        for logger in trainer.loggers:
            logger.log_metrics({**row, "epoch": shown}, at)
            logger.log_metrics({"system/search_seconds": seconds, "epoch": shown}, at)
            if hasattr(logger, "log_search"):
                into = self._into(trainer)
                files = [into / search_record.RECORD, into / search_record.TABLE]
                logger.log_search(found.to_dict(), files, into / search_record.PICTURE)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was found so far, as primitives."""
        return {"settings": self._settings(), "visits": self.visits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the record of a checkpoint until training starts."""
        self._restored = dict(state_dict)

    def _settings(self) -> dict[str, Any]:
        return {
            "search": {**asdict(self.search), "options": dict(self.search.options or {})},
            "limits": asdict(self.limits),
        }

    def _adopt(self, state: Mapping[str, Any], step: int) -> None:
        before, now = (dotted(settings) for settings in (state.get("settings") or {}, self._settings()))
        different = [
            f"{key} is {typed(now.get(key))}, in the checkpoint {typed(before.get(key))}"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        if different:
            raise UserError(f"resume: the search has other settings: {'; '.join(different)}; give the same")
        self.visits = [dict(visit) for visit in state["visits"] if visit["step"] <= step]
        self._restored = None


def _amp(trainer: Trainer, device: torch.device) -> torch.dtype | None:
    return AUTOCAST.get(str(trainer.precision)) if device.type == "cuda" else None


def average(trainer: Trainer, twin: torch.nn.Module) -> None:
    """Give a private copy the averaged weights, where training keeps some."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAverage) and callback.average is not None:
            state = {
                name.removeprefix("net."): value for name, value in callback.average.items() if name.startswith("net.")
            }
            twin.load_state_dict({key: value.to(dtype=twin.state_dict()[key].dtype) for key, value in state.items()})


class EvolutionSearch(SearchCallback):
    """AutoFormer's evolution (Chen et al. 2021), see `search.evolution`."""

    strategy = "evolution"


class BlockwiseEvolution(SearchCallback):
    """T-Razor's evolution guided by the scores of single blocks (DSS++ by default), see `search.blockwise`."""

    strategy = "blockwise"

    def __init__(self, score: str = "dss_pp", **settings: Any) -> None:
        super().__init__(score=score, **settings)


class EtasSearch(SearchCallback):
    """ETAS: a pool of mutants, filtered by a proxy, of which few are measured; see `search.etas`."""

    strategy = "etas"


class RandomSearch(SearchCallback):
    """Random networks within limits; the baseline of every other strategy."""

    strategy = "random"


class ExactSearch(SearchCallback):
    """The true optimum of the whole space, for proxies that are sums over blocks; see `search.exact`."""

    strategy = "exact"

    def __init__(self, score: str = "snip", mode: str = "inherited", **settings: Any) -> None:
        super().__init__(score=score, mode=mode, **settings)


class AnySearch(SearchCallback):
    """A strategy by name, also a registered one of one's own: ``AnySearch("nsga2", ...)``."""

    def __init__(self, strategy: str | None = None, **settings: Any) -> None:
        if strategy is not None:
            self.strategy = strategy  # type: ignore[misc]  # of this one alone
        super().__init__(**settings)


CALLBACKS: dict[str, type[SearchCallback]] = {
    kind.strategy: kind for kind in (EvolutionSearch, BlockwiseEvolution, EtasSearch, RandomSearch, ExactSearch)
}
