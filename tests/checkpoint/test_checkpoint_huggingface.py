"""Export and import of safetensors folders, checked against the ``safetensors`` package; malformed files are refused."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoint.built_models import gathered
from tests.checkpoint.checkpoint_ranks import CONFIG, sharded_llama
from tests.checkpoint.checkpoint_support import bits, damage, memory_folder, peak_growths, random_bits, random_layout, save_in_process
from tests.checkpoint.faulty_store import Fault, FaultyStore
from tests.checkpoint.test_checkpoint_state import Net
from tests.ranks import run_gloo
from vescale_ray import Fp8Block
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint import huggingface, huggingface_export
from vescale_ray.checkpoint.bridges import foreign
from vescale_ray.models.llama import Llama

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.shape == other.shape and tensor.dtype == other.dtype and bits(tensor) == bits(other), name


@st.composite
def weights(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3), min_size=1, max_size=7))
    return {f"t{i}.w": random_bits(shape, draw(st.sampled_from(DTYPES)), seed=i) for i, shape in enumerate(shapes)}


@settings(max_examples=12)
@given(weights(), st.integers(1, 600), st.integers(1, 400))
def test_exports_load_in_safetensors_and_import_back_equal(tensors, shard, piece):
    with memory_folder() as place:
        ckpt.save({"model": tensors}, place / "a", 1)
        done = ckpt.export_hf(place / "a", None, place / "hf", max_shard_bytes=shard)
        index = json.loads((place / "hf" / huggingface.INDEX).read_text())
        theirs = {name: t for file in done.files for name, t in load_file(place / "hf" / file).items()}
        same(tensors, theirs)
        assert {name: file for file in done.files for name in load_file(place / "hf" / file)} == index["weight_map"]
        assert index["metadata"]["total_size"] == done.bytes == sum(t.nbytes for t in tensors.values())
        for file in done.files:
            held = load_file(place / "hf" / file)
            assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= shard
        commit = ckpt.import_hf(place / "hf", place / "b", object_bytes=piece, step=3)
        assert commit.step == 3 and ckpt.verify(place / "b").ok
        same(tensors, ckpt.open(place / "b").to_state_dict())
        assert all(e.bytes <= piece + 12 * 4096 for e in ckpt.open(place / "b").manifest.objects)
        target = {name: torch.zeros_like(t) for name, t in tensors.items()}
        ckpt.import_hf(place / "hf", target)
        same(tensors, target)


@settings(max_examples=12)
@given(weights())
def test_import_reads_files_of_the_safetensors_package(tensors):
    with memory_folder() as place:
        save_file(tensors, place / "x.safetensors")
        ckpt.import_hf(place / "x.safetensors", place / "root")
        same(tensors, ckpt.open(place / "root").to_state_dict())


def test_tied_weights_are_written_once_and_come_back_tied(root):
    net = Net(0)
    ckpt.save({"model": net}, root / "a", 1)
    done = ckpt.export_hf(root / "a", None, root / "hf")
    assert done.files == ("model.safetensors",) and "head.weight" not in load_file(root / "hf" / "model.safetensors")
    ckpt.import_hf(root / "hf", root / "b")
    back = ckpt.open(root / "b")
    assert back.aliases == {"head.weight": "embed.weight"}
    same(ckpt.open(root / "a").to_state_dict(), back.to_state_dict())
    tied, untied = Net(1), Net(2, tie=False)
    ckpt.load({"model": tied}, root / "b")
    ckpt.import_hf(root / "hf", untied)
    assert bits(tied.head.weight) == bits(net.embed.weight) == bits(untied.head.weight) == bits(untied.embed.weight)


def transformers_names(layers: int) -> set[str]:
    """Names that transformers' LlamaForCausalLM gives its parameters (modeling_llama.py)."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(layers):
        names |= {f"model.layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention")}
        names |= {f"model.layers.{i}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"model.layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    return names


def test_llama_exports_with_hugging_face_names_and_imports_back(root):
    model = Llama(CONFIG)
    model.reset_parameters(3)
    ckpt.save({"model": model}, root / "a", 1)
    done = ckpt.export_hf(root / "a", None, root / "hf", rename=huggingface.LLAMA, max_shard_bytes=4000, dtype=torch.bfloat16)
    assert set(done.tensors) == transformers_names(CONFIG.layers) and len(done.files) > 3
    with torch.device("meta"):
        other = Llama(CONFIG)
    with pytest.raises(ckpt.CheckpointMismatch, match="is bfloat16, wanted float32; cast=True converts"):
        ckpt.import_hf(root / "hf", other, rename=huggingface.LLAMA)
    ckpt.import_hf(root / "hf" / huggingface.INDEX, other, rename=huggingface.LLAMA, cast=True)
    same({n: t.bfloat16().float() for n, t in model.state_dict().items()}, dict(other.state_dict()))
    ckpt.import_hf(root / "hf", root / "b", rename=huggingface.LLAMA)
    same({n: t.bfloat16() for n, t in model.state_dict().items()}, ckpt.open(root / "b").to_state_dict())


def hf_into_model_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for kind in ("ours", "torch"):
        model = sharded_llama(kind, world, "meta")
        done = ckpt.import_hf(folder, model, rename=huggingface.LLAMA)
        found[kind] = gathered(model.state_dict()), done.bytes
    return found


def hf_into_commit_rank(rank: int, world: int, folder: str) -> str:
    commit = ckpt.import_hf(Path(folder, "x.safetensors"), Path(folder, "root"), object_bytes=4000)
    ckpt.export_hf(Path(folder, "root"), None, Path(folder, "out"), max_shard_bytes=4000)
    return commit.name


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_read_their_own_parts_of_sharded_files(root, world):
    model = Llama(CONFIG)
    model.reset_parameters(5)
    ckpt.save({"model": model}, root / "a", 1)
    ckpt.export_hf(root / "a", None, root / "hf", rename=huggingface.LLAMA, max_shard_bytes=9000)
    whole = sum(p.nbytes for p in model.parameters())
    results = run_gloo(world, hf_into_model_rank, str(root / "hf"))
    for kind in ("ours", "torch"):
        assert sum(result[kind][1] for result in results) == whole, "no byte is read by two ranks"
        for result in results:
            assert all(np.array_equal(result[kind][0][n], t.numpy()) for n, t in model.state_dict().items())


def test_ranks_share_the_writing_of_a_commit_and_of_files(root):
    tensors = {f"t{i}": random_bits((50, 40), torch.bfloat16, i) for i in range(9)}
    save_file(tensors, root / "x.safetensors")
    names = run_gloo(3, hf_into_commit_rank, str(root))
    assert len(set(names)) == 1
    same(tensors, ckpt.open(root / "root").to_state_dict())
    assert ckpt.open(root / "root").world == 9
    back = ckpt.import_hf(root / "out", dict.fromkeys(tensors, torch.zeros(0)) | {n: torch.zeros_like(t) for n, t in tensors.items()})
    assert set(back.tensors) == set(tensors)  # type: ignore[union-attr]
    assert len(list((root / "out").glob("*.safetensors"))) == 9


def test_other_entries_and_optimizer_states_are_left_out(root):
    net = {"w": torch.randn(3)}
    ckpt.save({"model": net, "ema": {"w": torch.ones(3)}}, root / "a", 1)
    assert ckpt.export_hf(root / "a", None, root / "hf").tensors == ("w",)
    assert ckpt.export_hf(root / "a", None, root / "ema", key="ema").tensors == ("w",)
    assert torch.equal(load_file(root / "ema" / "model.safetensors")["w"], torch.ones(3))


def test_export_refuses_unsupported_dtypes_and_used_folders(root):
    ckpt.save({"model": {"c": torch.zeros(3, dtype=torch.complex128), "w": torch.zeros(2)}}, root / "a", 1)
    with pytest.raises(ckpt.CheckpointMismatch, match="'c' is complex128, which safetensors has no name for"):
        ckpt.export_hf(root / "a", None, root / "hf")
    ckpt.export_hf(root / "a", None, root / "hf", exclude="c")
    with pytest.raises(ValueError, match="holds model.safetensors, model.safetensors.index.json: give a folder without model files"):
        ckpt.export_hf(root / "a", None, root / "hf", exclude="c")
    with pytest.raises(ckpt.CheckpointMismatch, match="no tensor of 'model' that fits x"):
        ckpt.export_hf(root / "a", None, root / "hf2", include="x")


def test_a_damaged_checkpoint_is_not_exported(root):
    tensors = {("a", "param"): torch.randn(3000), ("b", "param"): torch.randn(3000)}
    commit = save_in_process(root / "a", tensors, random_layout(tensors, 1, seed=1))  # blocks of 4096 bytes
    damage(root / "a", commit, -5000)
    for limit in (100_000, 13_000):  # one file; or two files, of which the first is written without an error
        with pytest.raises(ckpt.CheckpointCorrupt, match="holds b"):
            ckpt.export_hf(root / "a", None, root / "hf", max_shard_bytes=limit)
        assert not (root / "hf").exists()


def test_export_fails_if_the_disk_stored_other_bytes(root, monkeypatch):
    ckpt.save({"model": {"a": torch.randn(3000)}}, root / "a", 1)
    real = os.write

    def flipped(fd: int, data: Any) -> int:
        raw = bytearray(data)
        raw[-1] ^= 1
        return real(fd, raw)

    monkeypatch.setattr(huggingface_export.os, "write", flipped)
    with pytest.raises(ckpt.ExportFailed, match="the data read back differs from the data written"):
        ckpt.export_hf(root / "a", None, root / "hf")
    monkeypatch.undo()
    assert not (root / "hf").exists()


# ------------------------------------------------------------------------------------------------------------ malformed ones


def file_of(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, end: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


MALFORMED = {
    "empty": b"",
    "length beyond the file": file_of({}, b"", length=3),
    "no JSON": file_of(b"{]", b""),
    "deep": file_of(b"[" * 100_000, b""),
    "overlap": file_of({"a": entry(0, 8), "b": entry(4, 12)}, b"0" * 12),
    "hole": file_of({"a": entry(0, 8), "b": entry(12, 16)}, b"0" * 16),
    "beyond the end": file_of({"a": entry(0, 80)}, b"0" * 8),
    "trailing": file_of({"a": entry(0, 8)}, b"0" * 9),
    "negative": file_of({"a": entry(-4, 0)}, b""),
    "huge shape": file_of({"a": entry(0, 4, shape=[2**61, 2**61])}, b"0" * 4),
    "unknown dtype": file_of({"a": entry(0, 4, "F31")}, b"0" * 4),
    "a dtype that torch lacks": file_of({"a": entry(0, 4, "F6_E2M3", shape=[16])}, b"0" * 12),
    "size": file_of({"a": entry(0, 4, shape=[2])}, b"0" * 4),
    "metadata": file_of({"__metadata__": {"a": 1}}, b""),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_in_one_line(root, case):
    (root / "x.safetensors").write_bytes(MALFORMED[case])
    with pytest.raises(ckpt.ForeignFileError, match="not a complete safetensors file|which torch does not have") as caught:
        ckpt.import_hf(root / "x.safetensors", root / "root")
    assert "\n" not in str(caught.value) and "x.safetensors" in str(caught.value) and len(str(caught.value)) <= 1000
    assert not (root / "root").exists()


def test_corrupted_header_is_refused_or_read_as_safetensors_does(root):
    """Change random bytes of a header. The file is refused, or our reader and the safetensors package give the same result."""
    tensors = {"a": random_bits((4, 5), torch.float32, 1), "b": random_bits((3,), torch.int64, 2), "c": random_bits((), torch.bfloat16, 3)}
    save_file(tensors, root / "good.safetensors")
    good = (root / "good.safetensors").read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(length)] = rng.randrange(256)
        (root / "x.safetensors").write_bytes(raw)
        try:
            source = huggingface.HfSource(root / "x.safetensors")
        except ckpt.ForeignFileError:
            refused += 1
            continue
        theirs = load_file(root / "x.safetensors")
        assert set(source.tensors) == set(theirs)
        for name, tensor in theirs.items():
            out = torch.zeros(tensor.numel(), dtype=tensor.dtype)
            source.read_into(name, "param", 0, out)
            assert source.tensors[name].shape == tuple(tensor.shape) and bits(out) == bits(tensor)
    assert refused > 200


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "which is not a safetensors file in its folder"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "which is not a safetensors file in its folder"),
        ({"weight_map": {"a": "d/x.safetensors"}}, "which is not a safetensors file in its folder"),
        ({"weight_map": {"a": "x.bin"}}, "which is not a safetensors file in its folder"),
        ({"weight_map": {"a": 3}}, "which is not a safetensors file in its folder"),
        ({"weight_map": {"a": "..\\x.safetensors"}}, "which is not a safetensors file in its folder"),
        ({"weight_map": {"a": "missing.safetensors"}}, "can't be opened"),
        ({"weight_map": {"b": "x.safetensors"}}, "the index has tensor 'b' in x.safetensors, which does not hold it"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "no weight_map"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "which is not a safetensors file in its folder"),
        ("[" * 100_000, "not an index: not JSON"),
    ],
)
def test_import_refuses_a_wrong_or_folder_escaping_index(root, index, words):
    place = root / "hf"
    place.mkdir()
    for path in (root / "x.safetensors", place / "x.safetensors"):
        save_file({"a": torch.ones(2)}, path)
    (place / huggingface.INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(ckpt.ForeignFileError, match=words):
        ckpt.import_hf(place, {"a": torch.zeros(2)})


def test_a_tensor_in_two_files_and_an_empty_folder_are_refused(root):
    with pytest.raises(ckpt.ForeignFileError, match="holds no model.safetensors.index.json and no"):
        ckpt.import_hf(root, root / "root")
    for name in ("x", "y"):
        save_file({"a": torch.ones(2)}, root / f"{name}.safetensors")
    with pytest.raises(ckpt.ForeignFileError, match="tensor 'a' is both in x.safetensors and in y.safetensors"):
        ckpt.import_hf(root, root / "root")


@pytest.mark.fault("K33")
def test_an_import_that_fails_or_is_interrupted_leaves_no_object(root):
    """A failed import may have filled the disk. Its objects must not stay until the collection a day later."""
    save_file({"a": torch.ones(3000), "b": torch.ones(3000)}, root / "model.safetensors")

    class Stopped(Exception):
        pass

    for error in (Stopped, KeyboardInterrupt):
        calls = [0]

        def progress(count: int, calls: Any = calls, error: Any = error) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise error

        with pytest.raises(error):
            ckpt.import_hf(root, root / "root", object_bytes=8000, progress=progress)
        assert calls == [2] and not [path for path in (root / "root").rglob("*") if path.is_file()]
    made = ckpt.import_hf(root, root / "root", object_bytes=8000, step=5)
    with pytest.raises(ckpt.CommitRefused):
        huggingface.into_commit(huggingface.HfSource(root), root / "root", {"a": "a"}, meta={}, aliases={"x": "y"})
    lost = FaultyStore(ckpt.PosixStore(root / "root"), [Fault("put", "lost", key="commits/*", times=None)])
    with pytest.raises(ckpt.SaveFailed):
        ckpt.import_hf(root, lost, step=9)
    newest = ckpt.latest(root / "root")
    assert newest is not None and newest.step == 9 and ckpt.verify(root / "root").ok, "the answer was lost, the commit is there"
    assert isinstance(made, ckpt.Commit) and {p.name for p in (root / "root" / "data").iterdir() if any(p.iterdir())} == {
        made.attempt,
        newest.attempt,
    }


def test_import_ignores_files_with_a_leading_dot(root):
    save_file({"a": torch.ones(2)}, root / "model.safetensors")
    (root / ".tmp-model-2.safetensors").write_bytes(b"half")
    (root / "._model.safetensors").write_bytes(b"Mac OS X")
    assert list(huggingface.HfSource(root).tensors) == ["a"]


@pytest.mark.parametrize("export", [ckpt.export_hf, ckpt.export_dcp])
@pytest.mark.fault("K33")
def test_export_failing_late_leaves_nothing_and_can_be_retried(root, monkeypatch, export):
    """Fail each rename and each sync of the folder in turn.

    A reader would take an index without its files for a whole export. A leftover temporary folder would make the next try fail.
    """
    ckpt.save({"model": {"a": torch.arange(5.0), "b": torch.arange(3)}}, root / "root", 1)
    for name, holder in (("rename", os), ("sync_folder", foreign), ("sync_folder", huggingface_export)):
        for nth in range(3):
            calls, real = [0], getattr(holder, name)

            def failing(*given: Any, calls: Any = calls, nth: int = nth, real: Any = real) -> Any:
                calls[0] += 1
                if calls[0] == nth + 1:
                    raise OSError(errno.EIO, "no more")
                return real(*given)

            monkeypatch.setattr(holder, name, failing)
            try:
                export(root / "root", None, root / "made" / "out", **({"max_shard_bytes": 1} if export is ckpt.export_hf else {}))
            except OSError:
                assert not (root / "made").exists(), (name, nth)
            else:
                assert calls[0] <= nth, "it was not reached"
                shutil.rmtree(root / "made")
            monkeypatch.undo()
    with pytest.raises(ckpt.CheckpointMismatch, match="that fits nothing"):
        export(root / "root", None, root / "made" / "out", include="nothing")
    (root / "theirs").mkdir()
    with pytest.raises(ckpt.CheckpointMismatch, match="that fits nothing"):
        export(root / "root", None, root / "theirs", include="nothing")
    assert not (root / "made").exists() and (root / "theirs").is_dir(), "a folder that was there stays"
    export(root / "root", None, root / "theirs")


def test_a_file_cut_short_after_its_header_was_read_is_named(root):
    save_file({"a": torch.ones(20_000)}, root / "x.safetensors")
    source = huggingface.HfSource(root / "x.safetensors")
    os.truncate(root / "x.safetensors", 4096)
    with pytest.raises(ckpt.ForeignFileError, match="ends at byte 4096, .* truncated"):
        source.read_into("a", "param", 0, torch.zeros(20_000))


def import_and_export(root):
    piece = np.zeros(8 << 20, dtype=np.uint8)
    header = {f"t{i}": {"dtype": "U8", "shape": [8 << 20], "data_offsets": [i * (8 << 20), (i + 1) * (8 << 20)]} for i in range(32)}
    text = json.dumps(header).encode()
    with open(root / "x.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(32):
            file.write(piece.data)
    yield
    ckpt.import_hf(root / "x.safetensors", root / "ckpt", object_bytes=32 << 20)
    yield
    ckpt.export_hf(root / "ckpt", None, root / "hf", max_shard_bytes=100 << 20)
    yield
    ckpt.save({"model": {"w": torch.ones(8192, 4096)}}, root / "weights", 1)
    yield
    ckpt.export_hf(root / "weights", None, root / "fp8", quantize=lambda name: Fp8Block())
    yield
    (root / "fp8" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}')
    ckpt.import_hf(root / "fp8", root / "again", object_bytes=32 << 20)
    yield


@pytest.mark.slow
def test_imports_and_exports_take_a_bounded_memory(tmp_path):
    imported, exported, _, quantized, dequantized = peak_growths(import_and_export, tmp_path)
    assert quantized <= (64 << 20) + (40 << 20) and dequantized <= (32 << 20) + (40 << 20)
    assert imported <= (32 << 20) + (40 << 20), "an object, the writer's buffers, the threads' stacks"
    assert exported <= (64 << 20) + (40 << 20)
    with safetensors.safe_open(str(tmp_path / "hf" / "model-00001-of-00003.safetensors"), "pt") as opened:
        assert len(opened.keys()) == 12
