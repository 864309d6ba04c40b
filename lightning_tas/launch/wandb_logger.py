"""W&B, imported only when a recipe asks for it."""

from __future__ import annotations

import os
import socket
from functools import cache
from netrc import NetrcParseError, netrc
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pytorch_lightning.utilities import rank_zero_warn

from lightning_tas.errors import UserError
from lightning_tas.launch.run_folder import RunFolder

if TYPE_CHECKING:
    from pytorch_lightning.loggers import WandbLogger

    from lightning_tas.commands.config import Config

PROBE_SECONDS = 3


def check_wandb(config: Config) -> None:
    """UserError, by name, when the package or, for a run that can go online, the key is missing."""
    try:
        import wandb
    except ImportError:
        raise UserError("logger: 'wandb' needs the package wandb (pip install wandb); valid without it: csv") from None
    if mode(config) == "online" and reachable(address()) and not _has_key(wandb.setup().settings.api_key):
        raise UserError(
            f"logger: 'wandb' has no API key for {address()}; run `wandb login`, set WANDB_API_KEY, or choose "
            "wandb.mode=offline"
        )


def mode(config: Config) -> str:
    """`wandb.mode`, where that is the default also W&B's own variable."""
    asked = os.environ.get("WANDB_MODE", "")
    return asked if config.wandb.mode == "online" and asked in ("offline", "disabled") else config.wandb.mode


def address() -> str:
    """Where W&B sends runs, from its environment variables and settings files."""
    import wandb

    return str(wandb.setup().settings.base_url)


@cache
def reachable(url: str) -> bool:
    """Whether something answers at `url`, or at the proxy on the way there, within `PROBE_SECONDS`."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        socket.create_connection((target.hostname or "", port), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _has_key(setting: str | None) -> bool:
    if setting or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc().authenticators(urlsplit(address()).hostname or "") is not None
    except (OSError, NetrcParseError):
        return False


def wandb_logger(config: Config, folder: RunFolder, phase: str) -> WandbLogger:
    """One W&B run per job, named after the run folder; `phase` is a field of its configuration."""
    from pytorch_lightning.loggers import WandbLogger

    settings, chosen = config.wandb, mode(config)
    if chosen == "online" and not reachable(address()):
        # Online, W&B would try for minutes and then fail.
        chosen = "offline"
        rank_zero_warn(f"wandb: {address()} does not answer, so this run is logged offline; send it with `wandb sync`")
    return WandbLogger(
        name=settings.name or folder.path.name,
        project=settings.project,
        entity=settings.entity,
        save_dir=str(folder.path),
        id=f"{folder.path.parent.name}-{folder.path.name}",
        offline=chosen == "offline",
        mode=chosen,  # Lightning's `offline` alone sets a variable that W&B may have read already
        config={"phase": phase},
    )
