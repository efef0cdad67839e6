"""Functions that ranks run in the multi-process checkpoint tests; processes can import them."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checkpoint.built_models import BUILDERS, Mlp, full_state, gathered, one_step
from tests.ranks import join
from vescale_ray import checkpoint as ckpt
from vescale_ray import fsdp
from vescale_ray.models.llama import Llama, LlamaConfig


def save_rank(rank: int, world: int, roots: dict[str, str]) -> Any:
    """Save a trained model under each builder. One process does all of it, because starting a process costs more."""
    results = {}
    for builder, root in roots.items():
        model, optimizer = BUILDERS[builder](0, world)
        for _ in range(2):
            one_step(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "stream": {"consumed": 12}}
        handle = ckpt.save(state, root, 2, meta={"note": "two steps"}, aux={"rank": rank}, timeout_s=20)
        results[builder] = handle.commit.name, full_state(model, optimizer)
    return results


def load_rank(rank: int, world: int, loads: list[tuple[str, str]]) -> Any:
    """For each (root, builder), load into a new model of another seed, with an optimizer that has made no step."""
    results = []
    for root, builder in loads:
        model, optimizer = BUILDERS[builder](1, world)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "stream": None}
        loaded = ckpt.load(state, root)
        facts = (loaded.step, state["stream"], loaded.aux, optimizer.param_groups[0]["lr"])
        results.append((facts, torch.rand(2).tolist(), full_state(model, optimizer)))
    return results


def mixed_mesh_rank(rank: int, world: int, root: str) -> Any:
    """Save replicas on a 2-D mesh, Replicate and Shard(0) DTensors, and plain tensors; each element is written once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(5 * 3, dtype=torch.float32).view(5, 3)

    some, others = DeviceMesh("cpu", [1, 3]), DeviceMesh("cpu", [0, 1])

    def tensors(scale: float) -> dict[str, torch.Tensor]:
        return {
            "some ranks'": distribute_tensor((full + 4) * scale, some, [Shard(0)]),
            "others'": distribute_tensor((full + 5) * scale, others, [Replicate()]),
            "hsdp": distribute_tensor(full * scale, mesh, [Replicate(), Shard(0)]),
            "copy": distribute_tensor((full + 1) * scale, mesh, [Replicate(), Replicate()]),
            "plain": (full + 2) * scale,
            "tall": distribute_tensor((full[:1] + 3) * scale, mesh, [Replicate(), Shard(1)]),
        }

    ckpt.save({"model": tensors(1.0)}, root, 1, timeout_s=20)
    target = tensors(0.0)
    ckpt.load({"model": target}, root)
    for name, ranks, of in (("some ranks'", (1, 3), full + 4), ("others'", (0, 1), full + 5)):
        theirs = target.pop(name)
        assert isinstance(theirs, DTensor)
        if rank in ranks:
            assert torch.equal(theirs.full_tensor(), of)
    back = {name: (t.full_tensor() if isinstance(t, DTensor) else t).numpy() for name, t in target.items()}
    plain, backwards = nn.Linear(3, 8), nn.Linear(3, 8)
    fully_shard(backwards, mesh=DeviceMesh("cpu", [3, 1, 2, 0]))
    line = os.path.join(root, "line")
    ckpt.save({"model": plain}, line, 1, timeout_s=20)
    for use in (lambda: ckpt.save({"model": backwards}, line, 2, timeout_s=20), lambda: ckpt.load({"model": backwards}, line)):
        try:
            use()
        except ValueError as error:
            assert "its elements are unknown" in str(error) or "rank 0: " in str(error), error
        else:
            raise AssertionError("rows would be saved, or loaded, in another order than the model has them")
    stages_of_a_pipeline(mesh, os.path.join(root, "stages"))
    for how in (fully_shard, fsdp.fully_shard):
        over_tensor_parallelism(how, mesh, os.path.join(root, how.__module__))
    return back


def stages_of_a_pipeline(mesh: DeviceMesh, root: str) -> None:
    """Saving all pipeline stages together is refused before a byte is written, even with SGD, which has no states.

    A stage that is saved by itself, as the documentation says, loads back.
    """

    def built(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(OrderedDict({f"layer{mesh.get_local_rank('replicate')}": nn.Linear(3, 5)}))
        fully_shard(model, mesh=mesh["shard"])
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1 * seed)}

    state = built(1)
    remedy = "save each pipeline stage by itself, with its own group and root"
    with ckpt.Saver(root, timeout_s=20) as saver:
        said = [str(saver.async_save(state, 1).exception(20))]
    try:
        ckpt.save(state, root, 1, timeout_s=20)
    except ValueError as error:
        said.append(str(error))
    assert len(said) == 2 and all("rank 2 has other optimizers than rank 0" in text and remedy in text for text in said), said
    assert not os.path.exists(root) or not os.listdir(root)
    try:
        ckpt.save({"model": {f"layer{mesh.get_local_rank('replicate')}": torch.ones(3)}}, root, 1, timeout_s=20)
    except ckpt.CheckpointError as error:
        assert "'layer0': no rank wrote elements [0, 3); a plain tensor" in str(error) and remedy in str(error), error
    try:
        ckpt.save({"plain": 1, **({"extra": 2} if mesh.get_rank() == 2 else {})}, root, 1, timeout_s=20)
    except ValueError as error:
        assert "rank 2 has entries ['extra'] that rank 0 lacks" in str(error), error
    else:
        raise AssertionError("it would be lost without a word")
    own, group = f"{root}/stage{mesh.get_local_rank('replicate')}", mesh.get_group("shard")
    ckpt.save(state, own, 1, timeout_s=20, group=group)
    again = built(2)
    ckpt.load(again, own, group=group)
    for one, other in zip(again["model"].parameters(), state["model"].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    assert again["optimizer"].param_groups[0]["lr"] == 0.1


def over_tensor_parallelism(how: Any, mesh: DeviceMesh, root: str) -> None:
    """Save and load FSDP2 (or our fully_shard) over tensor parallelism, with our loader and with stock DCP.

    Both cut dimension 0, unevenly, and the mesh's first dimension cuts last. Ranks of the tensor-parallel mesh hold equal copies of the
    tensors that tensor parallelism leaves alone, though those tensors' meshes do not name these ranks.
    """

    def built(seed: int) -> tuple[Mlp, nn.Module]:
        plain, model = Mlp(seed), Mlp(seed)
        first, last = mesh["shard"], mesh["replicate"]
        for block in model.blocks:
            parallelize_module(block, first, ColwiseParallel())
            how(block, mesh=last)
        parallelize_module(model.last, first, RowwiseParallel())
        how(model, mesh=last)
        return plain, model

    def check(model: nn.Module, truth: nn.Module) -> None:
        for (name, sharded), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
            assert isinstance(sharded, DTensor)
            assert torch.equal(sharded.full_tensor(), whole), name

    plain, model = built(5)
    with ckpt.Saver(root, timeout_s=20) as saver:
        saver.save({"model": model}, 1)
    assert ckpt.verify(root).ok
    ckpt.save({"model": model}, root, 2, timeout_s=20)
    other, into = built(6)
    other.load_state_dict(ckpt.open(root).to_state_dict())
    check(model, other)
    ckpt.load({"model": into}, root)
    check(into, plain)
    ckpt.save({"model": other}, root, 3, timeout_s=20)
    _, again = built(7)
    dcp.load({"model": again.state_dict()}, storage_reader=ckpt.DcpReader(root))
    check(again, plain)
    if mesh.get_local_rank("shard") == 1:
        with torch.no_grad():
            again.gain.to_local().add_(1)  # type: ignore[operator,union-attr]
    try:
        ckpt.save({"model": again}, root, 4, timeout_s=20)
    except ckpt.SaveFailed as error:
        assert re.search(r"'gain': ranks \d and \d both hold elements .* and they differ", str(error)), error
    else:
        raise AssertionError("of two that differ one was saved")


def killed_rank(rank: int, world: int, store: str, root: str, point: str, report: str) -> None:
    """Save while rank 1 dies at ``point``. The test does not use run_gloo, which reports a death as a failure."""
    torch.set_num_threads(1)
    if rank == 1:
        os.environ[ckpt.FAULT_ENV] = point
    join(dist.FileStore(store, world), rank, world, 20.0)
    try:
        outcome = ckpt.save({"model": {"w": torch.full((10,), 2.0)}}, root, 8, timeout_s=1.0).commit.name
    except ckpt.SaveFailed as error:
        outcome = f"failed: {error}"
    with open(f"{report}.{rank}", "w") as file:
        file.write(outcome)
    os._exit(0)  # the other member of the group is gone, so leave without a shutdown


def composed(rank: int, world: int, root: str) -> None:
    """Save each layout and load it into each other layout; the values are equal bit for bit, moments included.

    The layouts are ragged before and after tensor parallelism over rows and columns, and torch's own Shard of any dimension. A tensor with
    a pending reduction is refused.
    """
    import pytest
    from torch.distributed.tensor import Partial, Placement

    from vescale_ray import RaggedShard
    from vescale_ray import distribute_tensor as distribute_ragged
    from vescale_ray.dtensor import redistribute

    mesh, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    fulls = [torch.arange(96.0).reshape(16, 6), torch.arange(96).reshape(8, 2, 6).bfloat16(), torch.tensor([[True]]), torch.ones(0, 6)]
    layouts: list[tuple[Any, list[Placement], list[Placement]]] = [  # (mesh, placements of t0 and t1, placements of the small t2 and t3)
        (mesh, [RaggedShard((0,), (1, 3)), Shard(0)], [RaggedShard((), (0, 1)), Shard(0)]),
        (mesh, [RaggedShard((0,), (1, 3)), Shard(1)], [RaggedShard((), (1, 0)), Shard(1)]),
        (mesh, [Shard(-1), RaggedShard((0, 1), (3, 1))], [Shard(0), RaggedShard((), (0, 1))]),
        (line, [RaggedShard((0, 1), (1, 0, 5, 2))], [RaggedShard((), (0, 0, 1, 0))]),
        (mesh, [Replicate(), RaggedShard((), (0, 1))], [Replicate(), RaggedShard((), (0, 1))]),
        (mesh, [Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        (line, [Shard(1)], [Shard(0)]),
    ]

    def tensors(layout: tuple[Any, list[Placement], list[Placement]], scale: float) -> dict[str, torch.Tensor]:
        on, placements, small = layout
        return {
            f"t{i}": distribute_ragged((full * scale).to(full.dtype), on, placements if i < 2 else small) for i, full in enumerate(fulls)
        }

    for step, source in enumerate(layouts):
        ckpt.save({"model": tensors(source, 1.0)}, root, step + 1, timeout_s=20)
        checkpoint = ckpt.open(root)
        kinds = [e for g in checkpoint.manifest.groups for e in g.kinds]
        assert sum((e.end - e.start).sum() for e in kinds) == 96 + 96 + 1, "each element once"
        assert all(len(e.start) <= 4 for e in kinds), "each rank's part is one interval, whatever it is cut by"
        for target in layouts:
            into = tensors(target, 0.0)
            ckpt.load({"model": into}, root)
            for i, full in enumerate(fulls):
                whole = redistribute(into[f"t{i}"], [Replicate()] * target[0].ndim).to_local()  # type: ignore[arg-type]
                assert torch.equal(whole, full), (source, target, i)

    def trained(layout: tuple[Any, list[Placement], list[Placement]], steps: int) -> tuple[torch.nn.ParameterDict, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(distribute_ragged(fulls[0] / 100, *layout[:2]))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(steps):
            parameter.grad = distribute_ragged(fulls[0].cos(), *layout[:2])
            optimizer.step()
        return torch.nn.ParameterDict({"w": parameter}), optimizer

    model, optimizer = trained(layouts[1], 2)
    ckpt.save({"model": model, "optimizer": optimizer}, root, 99, timeout_s=20)
    model, optimizer = trained(layouts[2], 0)
    ckpt.load({"model": model, "optimizer": optimizer}, root)
    for whole, kind in ((model["w"], "param"), (optimizer.state[model["w"]]["exp_avg"], "exp_avg")):
        assert torch.equal(whole.full_tensor(), ckpt.open(root).read("w", kind))  # type: ignore[attr-defined]
    assert torch.equal(trained(layouts[3], 2)[0]["w"].full_tensor(), ckpt.open(root).read("w"))  # type: ignore[operator]

    one = distribute_ragged(fulls[0], mesh, [RaggedShard((0,), (1, 3)), Replicate()])
    pending = one.redistribute(placements=[RaggedShard((0,), (1, 3)), Partial()])
    for wrong, says in (
        (pending, "w' has placements .* a reduction is pending"),
        (pending.sum(), "w' has placements .* only Shard and Replicate"),
    ):
        with pytest.raises(ValueError, match=says):
            ckpt.save({"model": {"w": wrong}}, root, 100, timeout_s=20)


CONFIG = LlamaConfig(dim=24, layers=2, heads=2, kv_heads=1, ffn=40, vocab=31)


def sharded_llama(kind: str, world: int, device: str) -> Llama:
    shard: Any = fsdp.fully_shard if kind == "ours" else fully_shard
    mesh = init_device_mesh("cpu", (world,))
    with torch.device(device):
        model = Llama(CONFIG)
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def meta_rank(rank: int, world: int, root: str, save: bool) -> dict[str, Any]:
    """Save a trained model of each kind, or load it into a model that was built and sharded on the meta device; then train on."""
    found = {}
    for kind in ("ours", "torch"):
        torch.manual_seed(0)
        model = sharded_llama(kind, world, "cpu" if save else "meta")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if save:
            losses_of(model, optimizer, 2)
            ckpt.save(state, f"{root}/{kind}", 2, timeout_s=20)
        else:
            ckpt.load(state, f"{root}/{kind}")
        found[kind] = gathered(model.state_dict()), losses_of(model, optimizer, 2)
    return found
