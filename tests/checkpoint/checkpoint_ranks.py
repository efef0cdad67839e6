"""Functions that ranks run in the multi-process checkpoint tests; processes can import them."""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import join
from vescale_ray import checkpoint as ckpt
from vescale_ray import fsdp
from vescale_ray.models.llama import Llama, LlamaConfig


class Mlp(nn.Module):
    """A model with odd sizes, so that shards are uneven and some are empty, and with a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.last = nn.Linear(13, 3, bias=False)
        self.gain = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.tensor([seed, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gain.mean()
        return self.last(x)


def fsdp2(seed: int, world: int) -> tuple[Mlp, torch.optim.AdamW]:
    mesh = init_device_mesh("cpu", (world,))
    model = Mlp(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def ragged(seed: int, world: int) -> tuple[Mlp, torch.optim.AdamW]:
    """Model whose parameters are RaggedDTensors. The cuts differ for every world size, and one parameter has empty ranks."""
    from vescale_ray import RaggedDTensor, RaggedShard
    from vescale_ray import distribute_tensor as distribute_ragged

    mesh = init_device_mesh("cpu", (world,))
    model = Mlp(seed)
    for index, (name, parameter) in enumerate(list(model.named_parameters())):
        rng = np.random.RandomState(100 * world + index)
        cuts = [0, *sorted(rng.randint(0, parameter.numel() + 1, world - 1)), parameter.numel()]
        counts = [int(b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
        placement = RaggedShard(tuple(range(parameter.dim())), counts)
        owner = model.get_submodule(name.rpartition(".")[0])
        sharded = distribute_ragged(parameter.detach(), mesh, [placement])
        assert isinstance(sharded, RaggedDTensor)
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(sharded))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


BUILDERS = {"fsdp2": fsdp2, "ragged": ragged}


def gathered(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone().numpy() for n, t in tensors.items()}


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Gather every tensor with its own full_tensor(): the oracle."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return gathered({**model.state_dict(), **{f"{name}/{key}": value for name, held in states.items() for key, value in held.items()}})


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step with deterministic gradients and no forward pass, so that it works for any sharding."""
    for index, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.grad = parameter * (0.1 + index)
    optimizer.step()
    optimizer.zero_grad()


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


def async_rank(rank: int, world: int, roots: dict[str, str]) -> Any:
    """Save asynchronously under each builder, and train on during the write. The expected values are gathered before."""
    results = {}
    for builder, root in roots.items():
        model, optimizer = BUILDERS[builder](0, world)
        with ckpt.Saver(root, timeout_s=20, when_busy="wait") as saver:
            for step in (1, 2, 3):
                one_step(model, optimizer)
                truth = full_state(model, optimizer)
                state = {"model": model, "optimizer": optimizer, "stream": {"consumed": 6 * step}}
                saver.async_save(state, step, aux={"rank": rank}, wait_staged=False).wait_staged()
        results[builder] = [c.name for c in ckpt.ls(root)], truth
    return results


class NoCollectives:
    """Make every collective, barrier and message of the process group raise while the context is active."""

    NAMES = (
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier", "monitored_barrier"),
        *("all_gather", "all_reduce", "broadcast", "gather", "scatter", "reduce", "all_to_all_single", "isend", "irecv", "send", "recv"),
    )

    def __enter__(self) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a save has made a collective")

        self._before = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, refuse)

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)


def async_failing_rank(rank: int, world: int, root: str) -> Any:
    """Outcomes on each rank when rank 1's disk is full once, is slow, its state can't be stored, or it is late.

    No save uses a collective.
    """

    class Store(ckpt.PosixStore):
        slow = 0.0

        def put_stream(self, key, chunks, size):  # type: ignore[no-untyped-def]
            time.sleep(self.slow)
            super().put_stream(key, chunks, size)

    store, told = Store(root), dict[str, Any]()
    saver = ckpt.Saver(store, timeout_s=20)
    state = {"model": {"w": torch.ones(10)}}
    with NoCollectives():
        if rank == 1:
            os.environ[ckpt.FAULT_ENV] = "data.chunk=ENOSPC"
        told["full"] = str(saver.async_save(state, 1).exception(20))
        os.environ.pop(ckpt.FAULT_ENV, None)
        told["after"] = saver.async_save(state, 2).wait(20).step
        told["sync"] = ckpt.save(state, store, 3, timeout_s=20).commit.name
        store.slow = 1.5 * (rank == 1)
        handles = [saver.async_save(state, step) for step in (10, 11, 12)]
        told["skipped"] = [isinstance(handle.exception(20), ckpt.SaveSkipped) for handle in handles]
        with ckpt.Saver(store, timeout_s=20, double_buffer=False) as single:
            first = single.async_save(state, 20)
            while rank != 1 and single._writer._slabs():  # until the other ranks have written their data and have their buffers back
                time.sleep(0.01)
            second = single.async_save(state, 21)
            told["skipped at once"] = second.skipped
            told["single"] = [first.wait(20).step, str(second.exception(20)), second.skipped]
        store.slow = 0.0
        odd = {**state, "odd": object()} if rank == 1 else state
        for name, save in (("unfit", saver.async_save), ("unfit sync", lambda *a: ckpt.save(a[0], store, a[1], timeout_s=20))):
            try:
                told[name] = str(save(odd, 30).exception(20))  # type: ignore[operator]
            except ValueError as error:
                told[name] = f"ValueError: {error}"
        if rank != 2:
            told["alone"] = str(ckpt.Saver(store, timeout_s=0.5).async_save(state, 31).exception(20))
        if rank != 2:
            try:
                ckpt.save(state, store, 32, timeout_s=0.5)
            except ckpt.SaveFailed as error:
                told["missed"] = str(error)
        told["back"] = [saver.async_save(state, 33).wait(20).step, ckpt.save(state, store, 34, timeout_s=20).step]
        told["two"] = two_savers(f"{root}-two", state)
        told["files"] = len([p for p in os.scandir(f"{root}/data") if any(os.scandir(p.path))])
    dist.barrier()
    told["steps"] = [c.step for c in ckpt.ls(root)]
    told["outside"] = told["gone"] = "nothing"
    pair = dist.new_group([0, 1])
    try:
        ckpt.save(state, store, 40, timeout_s=20, group=pair)
    except ValueError as error:
        told["outside"] = str(error)
    dist.destroy_process_group()
    try:
        saver.async_save(state, 41)
    except ValueError as error:
        told["gone"] = str(error)
    # A new process group over a store that holds the words of an older group.
    again = dist.PrefixStore("again", dist.FileStore(f"{root}/../store", world))
    join(again, rank, world, 20.0)
    told["anew"] = [saver.async_save(state, 42).wait(20).step, ckpt.save(state, store, 43, timeout_s=20).step]
    assert saver._accord is not None and saver._accord._group is dist.group.WORLD, "the store of the group before may be gone"
    saver.close()
    return told


def two_savers(root: str, state: Any) -> list[tuple[bool, ...]]:
    """For each step, which of three simultaneous saves to one folder were committed: a synchronous one, and those of two savers."""
    ends = []
    with ckpt.Saver(root, timeout_s=20) as one, ckpt.Saver(root, timeout_s=20, retention=ckpt.Retention(keep_last=2)) as other:
        for step in range(1, 5):
            handles = [saver.async_save(state, step) for saver in (one, other)]
            try:
                between = ckpt.save(state, root, step, timeout_s=20).commit.step == step
            except ckpt.CheckpointError:
                between = False
            ends.append((between, *(handle.exception(20) is None for handle in handles)))
    return ends


def async_killed_rank(rank: int, world: int, store: str, root: str, report: str, victim: int, point: str) -> None:
    """Save asynchronously while the victim dies at ``point``; the other rank goes on and ends.

    The test does not use run_gloo, which reports a death as a failure.
    """
    torch.set_num_threads(1)
    if rank == victim:
        os.environ[ckpt.FAULT_ENV] = point
    join(dist.FileStore(store, world), rank, world, 20.0)
    saver = ckpt.Saver(root, timeout_s=1.0)
    handle = saver.async_save({"model": {"w": torch.full((10,), 2.0)}}, 8)
    began = time.monotonic()
    outcome = f"{type(handle.exception(20)).__name__}: {handle.exception()}"
    with open(f"{report}.{rank}", "w") as file:
        file.write(f"{time.monotonic() - began} {outcome}")
    saver.close()
    os._exit(0)  # the other member of the group is gone, so leave without a shutdown


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
