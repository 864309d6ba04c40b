"""What identifies a result."""

import torch

from lightning_tas.launch import provenance
from lightning_tas.launch.results import comparable


def test_the_hash_follows_names_shapes_types_and_bytes():
    state = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(True)}
    same = provenance.state_hash(dict(reversed(state.items())))
    assert same == provenance.state_hash(state)
    changed = [
        {**state, "b": state["b"].reshape(3, 2)},
        {**state, "b": state["b"].double()},
        {**state, "b": state["b"] + torch.tensor([0, 0, 1e-6])},
        {"c": state["b"], "a": state["a"]},
    ]
    assert len({provenance.state_hash(s) for s in changed} | {same}) == 5


def test_non_contiguous_and_bfloat16_tensors_hash():
    tensor = torch.randn(4, 6)
    assert provenance.state_hash({"x": tensor.t()}) == provenance.state_hash({"x": tensor.t().contiguous()})
    assert provenance.state_hash({"x": tensor.bfloat16()}) != provenance.state_hash({"x": tensor})


def test_versions_and_command_are_recorded():
    assert torch.__version__.startswith(provenance.versions()["torch"])
    assert provenance.command().startswith("python ")


def test_identical_runs_differ_only_in_timing_host_and_run():
    record = {"seed": 0, "timing": {"s": 1}, "host": {"name": "x"}, "run": "a"}
    assert comparable(record) == comparable({**record, "timing": {"s": 2}, "run": "b"})
    assert comparable(record) != comparable({**record, "seed": 1})
