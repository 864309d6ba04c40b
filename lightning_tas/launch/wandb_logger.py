"""W&B, imported only when a recipe asks for it: one run per job, over all phases and all restarts.

The id is made once and kept in `<run>/wandb/run.json`, so that a resumed job goes on under it. Metrics lie on axes of
their own, `train/step`, `val/step` and so on, which continue over phases and restarts; W&B's own counter does not
survive a restart without a network. Nothing that W&B does may stop or stall training: without a network or a key the
run is offline, and when W&B fails later on, it is left alone with one warning.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.launch.wandb_server import obstacle
from lightning_tas.launch.wandb_shows import MEASURED, Shows

if TYPE_CHECKING:
    from lightning_tas.commands.config import Config

AXES = ("train", "val", "select", "search", "score", "system")
"""Each of these first parts of a metric's name has its own x axis, `<name>/step`."""
ID_LENGTH = 100
"""W&B allows 128 characters, also for the names of artifacts, which begin with a word of ours."""
INIT_SECONDS, FINISH_SECONDS = 20, 60
"""How long W&B may take to begin a run online, and to send what is left at its end (the rest stays in the folder)."""
FLUSH_SECONDS = 2
"""What a killed job has logged until so long before lies in its folder."""
ROWS = 1000
"""Rows of W&B's own counter that an attempt reserves at a time."""


def check_wandb(config: Config) -> None:
    """UserError, by name, when the package is missing."""
    if mode(config) != "disabled" and importlib.util.find_spec("wandb") is None:
        raise UserError("logger: 'wandb' needs the package wandb (pip install wandb); valid without it: csv")


def mode(config: Config) -> str:
    """`wandb.mode`, where that is the default also W&B's own variable."""
    asked = {"dryrun": "offline"}.get(os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_MODE", ""))
    return asked if config.wandb.mode == "online" and asked in ("offline", "disabled") else config.wandb.mode


class WandbRun(Shows):
    """The run of a job. Starts at the first thing there is to log; every method is safe to call at any time.

    Args:
        config: the resolved recipe; all of it becomes the run's `config`.
        folder: everything that W&B writes for this run lies in its `wandb/`.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        self._run: Any = None
        self._over = False
        self._row = 0
        self._reserved = 0
        self._environment: dict[str, str] = {}

    @property
    def files(self) -> Path:
        """Folder of W&B's files."""
        return self._folder.path / "wandb"

    @property
    def id(self) -> str:
        """The id of the run: recipe, run and eight random characters, made at the first call and kept.

        Random, because W&B would go on with the run of a folder that was deleted and made again under its name.
        """
        kept = self._kept()
        if "id" not in kept:
            words = re.sub(r"[^\w.-]+", "-", self._name, flags=re.ASCII)[: ID_LENGTH - 9]
            kept["id"] = f"{words}-{secrets.token_hex(4)}"
            self.files.mkdir(exist_ok=True)
            write_json(self._record, kept)
        return str(kept["id"])

    @property
    def _record(self) -> Path:
        return self.files / "run.json"

    def _kept(self) -> dict[str, Any]:
        return dict(read_json(self._record, "logger")) if self._record.exists() else {}

    @property
    def _name(self) -> str:
        return f"{self._folder.path.parent.name}-{self._folder.path.name}"

    # --- beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the run where it has not begun: before the progress bars, so that its message is seen."""
        if not self._over:
            with self._guarded():
                self._started()

    def _started(self) -> Any:
        if self._run is None:
            # Before W&B looks at them: what it keeps until a run is sent belongs to the run.
            for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
                if name not in os.environ:
                    os.environ[name] = self._environment[name] = str(self.files / name.split("_")[1].lower())
            self._row = self._reserved = int(self._kept().get("rows", 0))
            self._run = self._begin()
            self._row = max(self._row, int(self._run.step))  # online, the server knows how far the run was
            for axis in AXES:
                self._run.define_metric(f"{axis}/step", hidden=True)
                self._run.define_metric(f"{axis}/*", step_metric=f"{axis}/step")
        return self._run

    def _begin(self) -> Any:
        if mode(self._config) == "online":
            why = obstacle()
            if why is None:
                try:
                    return self._init("online")
                except Exception as error:  # refused, unfinished, broken: of many kinds
                    why = f"the server did not accept the run ({_first_line(error)})"
                    _end_service()  # which would refuse the id of a run that it could not begin
            rank_zero_warn(f"wandb: {why}, so this run is logged offline; `wandb sync {self.files}` sends it later")
        else:
            rank_zero_info(f"wandb: logging offline; `wandb sync {self.files}` sends it")
        try:
            return self._init("offline")
        except Exception as error:  # a slow service still holds the run it had begun, or one of a killed process
            if "in use" not in str(error):
                raise
            _end_service()
            return self._init("offline")

    def _init(self, chosen: Literal["online", "offline"]) -> Any:
        import wandb

        settings, offline = self._config.wandb, chosen == "offline"
        given: dict[str, Any] = {
            "silent": offline,
            "quiet": True,
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
            "x_transaction_log_flush_interval": FLUSH_SECONDS,
        }
        known = wandb.Settings.model_fields  # older versions lack some
        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or self._name,
            group=self._folder.path.parent.name,
            id=self.id,
            dir=str(self._folder.path),
            config=cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(self._config))),
            mode=chosen,
            resume=None if offline else "allow",
            reinit="create_new",  # never join, nor end, a run of the program around us
            settings=wandb.Settings(**{key: value for key, value in given.items() if key in known}),
        )

    def _next_row(self) -> int:
        """The row's number in W&B's own counter, which rises over all attempts.

        Without a network W&B would begin at 0 in every attempt, and its server drops rows that go backwards when
        several attempts are sent. Numbers are reserved in `run.json` before they are used, so a kill loses none.
        """
        if self._row >= self._reserved:
            self._reserved = self._row + ROWS
            write_json(self._record, {**self._kept(), "rows": self._reserved})
        self._row += 1
        return self._row - 1

    def close(self, status: int = 0) -> None:
        """End the run; `status` is the exit status of the job, which W&B shows as finished or failed."""
        if self._run is not None and not self._over:
            with self._guarded():
                self._run.finish(exit_code=status)
        self._over, self._run = True, None
        for name in self._environment:
            os.environ.pop(name, None)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its service has died, the disk is full, ...: training goes on
            self._over = True
            if isinstance(error, OSError):
                _end_service()  # which is dead: at the end of the program W&B would fail at it again
            rank_zero_warn(f"wandb: {_first_line(error)}; nothing more is logged there, metrics.csv goes on")

    # --- logging ----------------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Log one row."""
        if self._over:
            return
        with self._guarded():
            self._started().log(dict(values), step=self._next_row())


def _end_service() -> None:
    """End the process in which W&B does its work, or leave it to the program that started it; W&B begins another."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=0)
    os.environ.pop("WANDB_SERVICE", None)  # the parent's: a run that was killed there is never given up


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class NetworkCosts(Callback):
    """Remembers parameters and multiply-accumulates of the networks that validation measures, by label."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = pl_module.net
        for label, arch in pl_module.reported().items():  # type: ignore[operator]  # ClassifierModule's contract
            price = cost(net.arch if arch is None else arch, net)  # type: ignore[arg-type, union-attr]
            self.found[label] = (int(price.params), int(price.macs))


class WandbPhase(Logger):
    """Lightning logger of one phase on the job's run.

    Args:
        run: shared by all phases.
        phase: a field of every row.
        before: updates in the phases before this one, added to every step.
        costs: of the networks that validation measures.
    """

    def __init__(self, run: WandbRun, phase: str, before: int, costs: NetworkCosts) -> None:
        super().__init__()
        self._wandb, self._phase, self._before, self._costs = run, phase, before, costs
        self._newest: dict[str, str] = {}  # the last row of every axis; as text, where NaN equals NaN

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str:
        return self._phase

    @property
    def save_dir(self) -> str:
        return str(self._wandb.files)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The whole recipe is in the run's config."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """One row for each axis that has values; a row that was logged before a checkpoint is not repeated."""
        values = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
        epoch = values.pop("epoch", None)
        at = self._before + (step or 0)
        rows: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            axis = key.split("/")[0]
            rows.setdefault(axis if axis in AXES else "train", {})[key] = value
        for axis, row in rows.items():
            whole = {**row, f"{axis}/step": at, "epoch": epoch, "phase": self._phase}
            text = repr(sorted(whole.items()))
            if self._newest.get(axis) == text:
                continue
            self._newest[axis] = text
            measured = self._networks(row, epoch, at) if axis == "val" else []
            title = f"Validation, {self._phase}"
            shown = self._wandb.networks("val/networks", measured, title) if measured else {}
            self._wandb.log({**whole, **shown})

    def log_table(self, key: str, columns: list[Any], data: list[list[Any]], step: int | None = None) -> None:
        """A table, on the axis of its name; as Lightning's own logger has it."""
        self._show(key, lambda wandb: wandb.Table(columns=columns, data=data), step)

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        """Pictures (files among others), on the axis of their name; as Lightning's own logger has it."""
        self._show(key, lambda wandb: [wandb.Image(image) for image in images], step)

    def log_generation(self, row: Mapping[str, Any]) -> None:
        """One generation of a search inside this phase."""
        self._wandb.log_generation(row, self._phase)

    def log_search(self, found: Mapping[str, Any], files: Sequence[Path], picture: Path | None) -> None:
        """What a search inside this phase found."""
        self._wandb.log_search(found, files, picture, self._phase)

    def _show(self, key: str, make: Callable[[Any], Any], step: int | None) -> None:
        with self._wandb._guarded():
            import wandb

            place = {f"{key.split('/')[0]}/step": self._before + (step or 0), "phase": self._phase}
            self._wandb.log({key: make(wandb), **place})

    def _networks(self, row: Mapping[str, float], epoch: Any, at: int) -> list[list[Any]]:
        found = []
        for label, price in self._costs.found.items():
            prefix = f"val/{label}" if label else "val"
            if f"{prefix}/top1" in row:
                measured = [row.get(f"{prefix}/{key}") for key in MEASURED]
                found.append([label or self._phase, *price, *measured, epoch, at, self._phase])
        return found
