"""Loading parts, under other names, in other dtypes, into models without storage and within a memory budget.

Loads are strict unless an option says otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.checkpoint_ranks import meta_rank
from tests.checkpoint.checkpoint_support import bits
from tests.checkpoint.saved_nets import saved_net
from tests.checkpoint.test_checkpoint_state import Net, adam, same_module, train
from tests.ranks import on_processes, run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.reading import loading, reader
from vescale_ray.checkpoint.state.name_tables import chosen


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if bits(before[name]) != bits(after[name])}


# ---------------------------------------------------------------------------------------------------------------- which ones


def test_only_the_tensors_that_the_globs_choose_change(root):
    net, _ = saved_net(root)
    other = Net(1)
    before = copy.deepcopy(other.state_dict())
    loaded = ckpt.load({"model": other}, root, include="body.*", exclude="*.bias")
    assert changed(before, other.state_dict()) == {"body.0.weight", "body.1.weight"}
    assert bits(other.get_parameter("body.0.weight")) == bits(net.get_parameter("body.0.weight")) and loaded.missing == ()


def test_a_tied_tensor_is_chosen_by_either_of_its_names(root):
    net, _ = saved_net(root)
    for glob in ("head.*", "embed.*"):
        other = Net(1)
        ckpt.load({"model": other}, root, include=glob)
        assert bits(other.head.weight) == bits(net.embed.weight)


def test_an_optimizers_states_are_chosen_with_their_parameters(root):
    net, optimizer = saved_net(root)
    other = Net(1)
    fresh = adam(other, lr=9.0)
    ckpt.load({"model": other, "optimizer": fresh}, root, exclude="body.1.*")
    assert set(fresh.state) == {p for p in other.parameters() if p.requires_grad} - set(other.body[1].parameters())
    assert bits(fresh.state[other.scale]["exp_avg"]) == bits(optimizer.state[net.scale]["exp_avg"])
    assert fresh.state[other.scale]["step"] == 2 and fresh.param_groups[0]["lr"] == 1e-2
    train(other, fresh, 1)  # a state that was left out begins anew
    assert fresh.state[other.get_parameter("body.1.weight")]["step"] == 1


def test_load_refuses_missing_or_extra_parameters_unless_allowed(root):
    net, optimizer = saved_net(root)
    other = Net(1)
    other.body = nn.Sequential(other.body[0], other.body[1], nn.Linear(6, 6))
    del other.narrow
    fresh = adam(other)
    state = {"model": other, "optimizer": fresh}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ckpt.CheckpointMismatch, match=r"differs from the checkpoint's in body.2.bias, narrow"):
        ckpt.load(state, root)
    with pytest.raises(ckpt.CheckpointMismatch, match=r"lacks 'body.2.weight', 'body.2.bias'; it also has 'narrow'"):
        ckpt.load({"model": other}, root)
    with pytest.raises(ckpt.CheckpointMismatch, match="also has 'narrow'"):
        ckpt.load({"model": other}, root, allow_missing="body.2.*")
    with pytest.raises(ckpt.CheckpointMismatch, match="lacks 'body.2.weight'"):
        ckpt.load({"model": other}, root, allow_unexpected=["narrow"])
    assert not changed(before, other.state_dict())
    loaded = ckpt.load(state, root, allow_missing="body.2.*", allow_unexpected=["narrow"])
    assert loaded.missing == ("body.2.weight", "body.2.bias")
    assert bits(fresh.state[other.scale]["exp_avg"]) == bits(optimizer.state[net.scale]["exp_avg"])
    assert not fresh.state.get(other.get_parameter("body.2.weight"))
    assert not {"body.2.weight", "body.2.bias"} & changed(before, other.state_dict())


def test_allow_missing_covers_plain_values(root):
    saved_net(root)
    state: dict[str, Any] = {"model": Net(1), "epoch": 4}
    with pytest.raises(ckpt.CheckpointMismatch, match="has no state 'epoch'"):
        ckpt.load(state, root)
    ckpt.load(state, root, allow_missing="epoch")
    assert state["epoch"] == 4


def test_frozen_parameter_states_are_dropped_only_if_allowed(root):
    saved_net(root)
    other = Net(1)
    other.scale.requires_grad_(False)
    state = {"model": other, "optimizer": adam(other)}
    with pytest.raises(ckpt.CheckpointMismatch, match="scale"):
        ckpt.load(state, root)
    ckpt.load(state, root, allow_unexpected="scale")
    assert bits(other.scale) == bits(ckpt.open(root).read("scale"))


# -------------------------------------------------------------------------------------------------------------- other names


def test_names_are_mapped_for_weights_states_and_scalars(root):
    net, optimizer = saved_net(root)

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = Net(1)

    other = Renamed()
    fresh = adam(other.wrapped)
    ckpt.load({"model": other, "optimizer": fresh}, root, rename={"wrapped.*": "*"})
    assert same_module(net, other.wrapped)
    assert fresh.state[other.wrapped.scale]["step"] == 2
    assert bits(fresh.state[other.wrapped.scale]["exp_avg_sq"]) == bits(optimizer.state[net.scale]["exp_avg_sq"])
    with pytest.raises(ckpt.CheckpointMismatch, match=r"lacks 'wrapped.scale' \(stored as 'scales'\) \(nearest there: 'scale'\)"):
        ckpt.load({"model": other}, root, rename={"wrapped.scale": "scales", "wrapped.*": "*"})


@settings(max_examples=40)
@given(st.lists(st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,2}){0,3}", fullmatch=True), unique=True, min_size=1, max_size=8))
def test_a_table_and_its_inverse_undo_each_other(names):
    table = ckpt.NameTable({"a*": "model.a*", "*.b.*": "x.*.c.*", "q.weight": "r.weight"})
    try:
        mapped = table.map(names)
    except ckpt.CheckpointMismatch:
        return
    assert set(mapped) == set(names)
    for name, new in mapped.items():
        if name.startswith("a"):
            assert new == "model." + name and table.inverse()(new) == name


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"a.*.*": "b.*"}, "has 2 stars on one side and 1 on the other"),
        ({"re:(": "b"}, "not a regular expression"),
    ],
)
def test_invalid_rename_rule_is_refused(rules, words):
    with pytest.raises(ValueError, match=words):
        ckpt.NameTable(rules)


def test_name_table_takes_regexes_and_refuses_colliding_names():
    table = ckpt.NameTable({r"re:blocks\.(\d+)\.(.*)": r"model.layers.\1.\2", "a*": "z"})
    assert table("blocks.12.w.x") == "model.layers.12.w.x" and table("other") == "other"
    with pytest.raises(ckpt.CheckpointMismatch, match="'a1' and 'a2' both become 'z'"):
        table.map(["a1", "a2"])
    with pytest.raises(ValueError, match="has no inverse"):
        table.inverse()


def test_include_and_exclude_globs_follow_shell_rules():
    assert chosen("layers.0.w", ["layers.*"], []) and not chosen("layers.0.w", ["layers.*"], ["*.w"]) and not chosen("a", ["b"], [])


# ------------------------------------------------------------------------------------------------------------- other dtypes


def test_dtypes_are_converted_on_request_only_and_as_torch_does(root):
    values = torch.randn(70_001)
    ckpt.save({"model": {"w": values, "n": torch.arange(9), "b": torch.tensor([True])}}, root, 1)
    target = {"w": torch.zeros(70_001, dtype=torch.bfloat16), "n": torch.zeros(9, dtype=torch.int32), "b": torch.tensor([False])}
    with pytest.raises(ckpt.CheckpointMismatch, match="'w' is float32, wanted bfloat16; cast=True converts"):
        ckpt.load({"model": target}, root)
    assert not target["w"].any()
    ckpt.load({"model": target}, root, cast=True)
    assert torch.equal(target["w"], values.bfloat16()) and target["n"].tolist() == list(range(9)) and target["b"].item()
    for wrong in ({"w": torch.zeros(70_001, dtype=torch.int64)}, {"b": torch.zeros(1)}, {"n": torch.zeros(9)}):
        with pytest.raises(ckpt.CheckpointMismatch, match="wanted"):
            ckpt.load({"model": wrong}, root, cast=True, allow_unexpected="*")


# ---------------------------------------------------------------------------------------------------------- without a group


def test_a_state_dict_comes_without_a_model(root):
    net, _ = saved_net(root)
    checkpoint = ckpt.open(root)
    whole = checkpoint.to_state_dict()
    assert list(whole) != [] and set(whole) == set(net.state_dict())
    assert whole["head.weight"] is whole["embed.weight"]
    other = Net(3)
    other.load_state_dict(whole)
    assert same_module(net, other)
    some = checkpoint.to_state_dict(include=["body.*", "count"], exclude="body.1.*", dtype=torch.bfloat16)
    assert set(some) == {"body.0.weight", "body.0.bias", "count"} and some["count"].dtype == torch.int64
    assert torch.equal(some["body.0.weight"], net.get_parameter("body.0.weight").detach().bfloat16())
    with pytest.raises(ckpt.CheckpointMismatch, match="has no tensor that fits nothing.here"):
        checkpoint.to_state_dict(include="nothing.here")


def test_any_range_of_any_tensor_can_be_read_alone(root):
    net, optimizer = saved_net(root)
    checkpoint = ckpt.open(root)
    flat = net.embed.weight.detach().reshape(-1)
    for start, end in [(0, 66), (5, 6), (13, 13), (60, 66)]:
        assert torch.equal(checkpoint.read_range("embed.weight", start, end), flat[start:end])
    with pytest.raises(ckpt.CheckpointMismatch, match=r"has 66 elements in the checkpoint; \[60, 67\) was requested"):
        checkpoint.read_range("embed.weight", 60, 67)
    with pytest.raises(ckpt.CheckpointMismatch, match=r"no tensor 'embd.weight' \(nearest there: 'embed.weight'\)"):
        checkpoint.read("embd.weight")


# ------------------------------------------------------------------------------------------------- models without storage


def test_conjugated_negated_and_meta_destinations_are_refused(tmp_path):
    kept = {"c": torch.randn(50, dtype=torch.complex64), "f": torch.randn(50)}
    ckpt.save({"model": kept}, tmp_path, 1)
    found = ckpt.open(tmp_path)
    outs = {
        "conjugated": ("c", torch.zeros(50, dtype=torch.complex64).conj()),
        "negated": ("f", torch._neg_view(torch.zeros(50))),
        "meta": ("f", torch.empty(50, device="meta")),
    }
    for what, (name, out) in outs.items():
        with pytest.raises(ckpt.CheckpointMismatch, match=f"'{name}'.*{what}"):
            found.read_ranges([(name, "param", 0, 50, out)])
    with pytest.raises(ckpt.CheckpointMismatch, match="meta"):
        found.read("f", device="meta")


def test_meta_model_gets_storage_ties_and_a_matching_optimizer(root):
    net, optimizer = saved_net(root)
    with torch.device("meta"):
        other = Net(1)
        other.scratch = torch.zeros(2, device="cpu")
    fresh = adam(other)
    ckpt.load({"model": other, "optimizer": fresh}, root)
    assert same_module(net, other) and other.head.weight is other.embed.weight
    assert train(net, optimizer, 2, seed=4) == train(other, fresh, 2, seed=4)
    assert same_module(net, other)


def test_meta_load_refuses_unfilled_tensors_before_allocating(root):
    saved_net(root)
    with torch.device("meta"):
        other = Net(1)
    with pytest.raises(ValueError, match="'scratch' would get no value"):
        ckpt.load({"model": other}, root)
    other.scratch = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'body.0.weight', 'body.0.bias', 'body.1.weight' and 1 more would get no value"):
        ckpt.load({"model": other}, root, exclude="body.*")
    assert all(p.is_meta for p in other.parameters())


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sharded_meta_model_loads_its_shards_and_trains_on(tmp_path, world):
    truth = run_gloo(2, meta_rank, str(tmp_path), True)[0]
    for back in run_gloo(world, meta_rank, str(tmp_path), False):
        for kind, (state, losses) in back.items():
            assert state.keys() == truth[kind][0].keys()
            assert all(np.array_equal(state[name], truth[kind][0][name]) for name in state), kind
            assert np.allclose(losses, truth[kind][1], rtol=1e-5), kind


@on_processes(2)
def test_parts_under_other_names_load_on_several_ranks(rank, world, tmp_path):
    net = {f"layers.{i}.w": torch.arange(35.0).view(7, 5) + i for i in range(3)}
    ckpt.save({"model": net | {"head": torch.ones(11)}}, tmp_path, 1, timeout_s=20)
    mesh = init_device_mesh("cpu", (world,))
    target: dict[str, Any] = {f"blocks.{i}.w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(i % 2)]) for i in range(3)}
    others: dict[str, Any] = {"exclude": "blocks.1.*", "allow_missing": "new", "allow_unexpected": "head"}
    ckpt.load({"model": target | {"new": torch.zeros(2)}}, tmp_path, rename={"blocks.*": "layers.*"}, **others)
    for i in range(3):
        assert torch.equal(target[f"blocks.{i}.w"].full_tensor(), net[f"layers.{i}.w"] * (i != 1))


def test_default_budget_matches_the_documentation():
    assert reader.BUDGET_BYTES == 16 << 20


def test_rescaled_load_gives_ranks_fresh_generators_and_no_aux(root, monkeypatch):
    """One process plays both ranks in turn, which works because the weights are replicated."""
    ckpt.save({"model": {"w": torch.ones(5)}}, root, 1, aux={"mine": 1})
    saved = torch.get_rng_state()
    drawn = []
    for rank in (0, 1, 1):
        monkeypatch.setattr(loading, "ranks_of", lambda group, rank=rank: (rank, 2))
        assert ckpt.load({"model": {"w": torch.zeros(5)}}, root).aux is None
        assert not torch.equal(torch.get_rng_state(), saved)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1] == drawn[2]
    monkeypatch.undo()
    assert ckpt.load({"model": {"w": torch.zeros(5)}}, root).aux == {"mine": 1} and torch.equal(torch.get_rng_state(), saved)
