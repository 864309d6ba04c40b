"""Whether W&B can be reached and knows who we are, found out in seconds: W&B itself would try for minutes."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from netrc import NetrcParseError, netrc
from urllib.parse import urlsplit

PROBE_SECONDS = 3


def obstacle() -> str | None:
    """What keeps this process from logging online, as a clause; None when nothing does."""
    url = address()
    if not reachable(url):
        return f"{url} does not answer"
    if not _has_key(url):
        return f"there is no API key for {url} (`wandb login`, or WANDB_API_KEY)"
    return None


def address() -> str:
    """Where W&B sends runs, from its environment variables and settings files."""
    import wandb

    return os.environ.get("WANDB_BASE_URL") or str(wandb.setup().settings.base_url)


def reachable(url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether `url` gives any HTTP answer within `seconds`, through a proxy where the environment names one.

    In a thread, because looking up a name has no time limit of its own.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.build_opener().open(url, timeout=seconds).close()  # heeds the proxies of this moment
        except urllib.error.HTTPError:
            pass  # an answer, whatever it says
        except urllib.error.URLError as error:
            # A certificate that Python does not know: W&B has its own store and may.
            if "CERTIFICATE_VERIFY_FAILED" not in str(error.reason):
                return
        except (OSError, ValueError):
            return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(seconds + 1)


def _has_key(url: str) -> bool:
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if wandb.setup().settings.api_key:
        return True
    try:
        return netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname or "") is not None
    except (OSError, NetrcParseError):
        return False
