"""Strategies that choose architectures; no Lightning here."""

from lightning_tas.search.config import SelectConfig
from lightning_tas.search.preferred import select_preferred, select_with
from lightning_tas.search.selection import Candidate, Selection, candidate_labels, cut_space

__all__ = ["Candidate", "SelectConfig", "Selection", "candidate_labels", "cut_space", "select_preferred", "select_with"]
