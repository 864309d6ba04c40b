"""Names of what training adds to Lightning's checkpoints."""

from __future__ import annotations

KEY = "lightning_tas"
"""Primitives that rebuild the network: see `lightning_tas.training.checkpoint`."""
EMA = "ema_state"
"""The averaged weights: see `lightning_tas.training.ema`."""
