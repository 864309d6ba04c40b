"""What a job shows on its W&B run besides metrics: selections, searches, scores of proxies, specialised networks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError

NETWORK_COLUMNS = ("network", "params", "macs", "top1", "top5", "loss", "epoch", "step", "phase")
MEASURED = ("top1", "top5", "loss")
_PRICES = ("params", "macs", "score", "bin")
_LAYOUT = ("depth", "embed_dim", "num_heads", "mlp_ratio", "id")


class Shows(ABC):
    """Methods of `WandbRun`, which knows when the run begins and what to do when W&B fails."""

    _over: bool
    _run: Any

    @property
    @abstractmethod
    def id(self) -> str:
        """The id of the run."""

    @abstractmethod
    def log(self, values: Mapping[str, Any]) -> None:
        """Log one row."""

    @abstractmethod
    def _guarded(self) -> AbstractContextManager[None]:
        """Around calls of W&B: the job goes on where W&B fails."""

    def networks(self, key: str, rows: list[list[Any]], title: str) -> dict[str, Any]:
        """What to log for a params-accuracy scatter `key` with the table `<key>_table` behind it."""
        import wandb

        table = wandb.Table(columns=list(NETWORK_COLUMNS), data=rows)
        return {key: wandb.plot.scatter(table, x="params", y="top1", title=title)}

    def log_selection(self, record: Mapping[str, Any], path: Path, picture: Path | None) -> None:
        """The preferred architectures as rows on the axis `select/step`, as a table, a picture and an artifact."""
        if self._over:
            return
        candidates = record["candidates"]
        for step, entry in enumerate(candidates):
            numbers = {f"select/{key}": entry[key] for key in _PRICES}
            self.log({**numbers, "select/step": step, "phase": "select"})
        with self._guarded():
            import wandb

            rows = [
                [entry["label"], *(entry[key] for key in _PRICES), *_layout(Architecture.from_dict(entry["arch"]))]
                for entry in candidates
            ]
            columns: list[str | int] = ["network", *_PRICES, *_LAYOUT]
            shown: dict[str, Any] = {"select/preferred": wandb.Table(columns=columns, data=rows)}
            shown["select/examined"] = record["examined"]
            if picture is not None:
                shown["select/allocation"] = wandb.Image(str(picture))
            self.log({**shown, "select/step": max(len(candidates) - 1, 0), "phase": "select"})
            self._keep("selection", [path, picture])

    def log_result(self, record: Mapping[str, Any], path: Path, picture: Path | None) -> None:
        """The specialised networks as scatter and table, as numbers of the run's summary, and as an artifact."""
        if self._over:
            return
        entries = record["architectures"]
        with self._guarded():
            import wandb

            where = [record.get("epochs"), record.get("steps"), "result"]
            rows = [
                [entry["label"], entry["params"], entry["macs"], *(entry["metrics"].get(k) for k in MEASURED), *where]
                for entry in entries
            ]
            shown = self.networks("result/networks", rows, "Specialised networks, test set")
            if picture is not None:
                shown["result/accuracy"] = wandb.Image(str(picture))
            self.log(shown)
            for entry in entries:
                numbers = {key: entry["metrics"].get(key) for key in ("top1", "top5")}
                for key, value in {**numbers, "params": entry["params"], "macs": entry["macs"]}.items():
                    self._run.summary[f"result/{entry['label']}/{key}"] = value
            self._keep("result", [path, picture])

    def log_generation(self, row: Mapping[str, Any], phase: str = "search") -> None:
        """One generation of a search on the axis `search/step`, which counts generations."""
        numbers = {f"search/{key}": value for key, value in row.items() if value is not None}
        self.log({**numbers, "search/step": row["generation"], "phase": phase})

    def log_search(
        self, found: Mapping[str, Any], files: Sequence[Path], picture: Path | None, phase: str = "search"
    ) -> None:
        """What a search found: tables, the Pareto front as a scatter, the best network in the summary, an artifact."""
        if self._over:
            return
        with self._guarded():
            import wandb

            networks, generations = found["networks"], found["generations"]
            shown: dict[str, Any] = {"search/networks": _table(networks), "search/evaluations": found["evaluations"]}
            if generations:
                columns: list[str | int] = list(generations[0])
                shown["search/generations"] = wandb.Table(
                    columns=columns, data=[[row.get(name) for name in columns] for row in generations]
                )
            if found["front"]:
                shown["search/front"] = wandb.plot.scatter(_table(found["front"]), "params", "score", "Pareto front")
            if picture is not None and picture.exists():
                shown["search/picture"] = wandb.Image(str(picture))
            step = generations[-1]["generation"] if generations else 0
            self.log({**shown, "search/step": step, "phase": phase})
            if networks:
                best = networks[0]
                for key in ("id", "score", "params", "macs"):
                    self._run.summary[f"search/best/{key}"] = best[key]
                self._run.summary["search/best/arch"] = json.dumps(best["arch"])
            self._keep("search", [*files, picture])

    def log_scores(
        self, rows: Sequence[Mapping[str, Any]], pictures: Mapping[str, Path], files: Sequence[Path]
    ) -> None:
        """Correlations of proxies as a table and as numbers of the run's summary, pictures, and files as an artifact.

        Args:
            rows: of one set of columns; `weights`, `accuracy` and `proxy` name a row, `tau_b` is its number.
            pictures: name to file.
            files: what the artifact holds.
        """
        if self._over:
            return
        with self._guarded():
            import wandb

            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            shown = {f"score/{name}": wandb.Image(str(path)) for name, path in pictures.items()}
            self.log({"score/correlations": table, **shown})
            for row in rows:
                self._run.summary[f"score/{row['weights']}/{row['accuracy']}/{row['proxy']}"] = row["tau_b"]
            self._keep("score", list(files))

    def _keep(self, kind: str, paths: Sequence[Path | None]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.id}", type=kind)
        for path in paths:
            if path is not None and path.exists():
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)


def _table(entries: Sequence[Mapping[str, Any]]) -> Any:
    """Networks of a search as a W&B table."""
    import wandb

    rows = [
        [*(entry[key] for key in ("label", "score", "params", "macs")), *_layout(Architecture.from_dict(entry["arch"]))]
        for entry in entries
    ]
    return wandb.Table(columns=["network", "score", "params", "macs", *_LAYOUT], data=rows)


def _layout(arch: Architecture) -> list[Any]:
    """The cells of `_LAYOUT`; lists (heads of every layer, ...) are text, None is what the family does not have."""
    cells: list[Any] = []
    for name in _LAYOUT:
        try:
            cell = getattr(arch, name)
        except UserError:
            cell = None
        cells.append(" ".join(f"{item:g}" for item in cell) if isinstance(cell, tuple) else cell)
    return cells
