"""``vescale-ray ckpt ..``: inspect, compare, convert, pin and delete checkpoints.

PATH is a run's name (under ./runs), a run's folder, a folder of checkpoints or a URL. ``@`` and a checkpoint's name may follow; without
them, the newest checkpoint is meant. Bars appear on a terminal only, so logs stay plain lines.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from vescale_ray.cli.common import FAILED, OK, CommandGroup, Failed, lasting_path
from vescale_ray.errors import BadInput
from vescale_ray.lasting import check_lasting

if TYPE_CHECKING:
    import torch

    from vescale_ray.checkpoint import Checkpoint, GcReport, ObjectStore, Retention
    from vescale_ray.runfolder import RunFolder

Target = str | Path
_COMMIT = re.compile(r"e\d{4,}-s\d{12,}")
_UNITS = {"": 1, "B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}, **{f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)}}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@click.group(cls=CommandGroup)
def ckpt() -> None:
    """Inspect, compare, convert, pin and delete checkpoints.

    PATH: a run's name, its folder, a folder of checkpoints, or a URL; PATH@NAME is one checkpoint of it.
    """


_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
_includes = click.option("--include", multiple=True, metavar="GLOB", help="Only tensors whose names match; may be given several times.")
_excludes = click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose names match.")
_names = click.option("--names", metavar="TABLE", help="Translation of names: llama, or a JSON file {our name: theirs} of globs.")


# ----------------------------------------------------------------------------------------------------------------- looking


@ckpt.command("ls")
@click.argument("path", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(path: str | None, as_json: bool) -> int:
    """List the committed checkpoints in PATH, oldest first. Without PATH: of the newest run."""
    from vescale_ray import checkpoint

    root = _root(path)
    commits = checkpoint.ls(_store(root))
    for one in commits:
        if as_json:
            about = {"name": one.name, "path": str(one.path), "step": one.step, "epoch": one.epoch, "world": one.world, "bytes": one.bytes}
            click.echo(json.dumps({**about, "problem": one.problem}))
        else:
            verdict = one.problem or f"step {one.step}, written by {one.world} workers, {_size(one.bytes)}"
            click.echo(f"{one.name}  {verdict}")
    if not commits and not as_json:
        click.echo(f"{root}: no committed checkpoint")
    return OK


@ckpt.command("show")
@click.argument("path", required=False)
@click.argument("name", required=False)
@click.option("--tensors", is_flag=True, help="List the tensors, too.")
@_includes
@_as_json
def show(path: str | None, name: str | None, tensors: bool, include: tuple[str, ...], as_json: bool) -> int:
    """Describe a checkpoint from its manifest alone: NAME in PATH, or the newest."""
    from vescale_ray.checkpoint.state.names import matches
    from vescale_ray.checkpoint.state.saved_meta import check_saved_meta

    opened = _open(path, name)
    check_saved_meta(opened.commit.path, opened.meta)
    listed = {n: t for n, t in opened.tensors.items() if matches(n, include or ("*",))}
    kinds: dict[str, tuple[int, int]] = {}
    for tensor in opened.tensors.values():
        for kind, dtype in tensor.kinds.items():
            label = f"{kind} {_dtype(dtype)}"
            count, size = kinds.get(label, (0, 0))
            kinds[label] = count + math.prod(tensor.shape), size + math.prod(tensor.shape) * dtype.itemsize
    about = {
        "name": opened.commit.name,
        "path": opened.commit.path,
        "step": opened.step,
        "epoch": opened.epoch,
        "world": opened.world,
        "created": opened.manifest.created,
        "writer": opened.manifest.writer,
        "bytes": opened.manifest.bytes,
        "tensors": len(opened.tensors),
        "kinds": {label: {"elements": count, "bytes": size} for label, (count, size) in kinds.items()},
        "aliases": opened.aliases,
        "entries": opened.meta.get("models", ["model"]),
        "optimizers": {key: saved.get("type") for key, saved in opened.meta.get("optimizers", {}).items()},
        "meta": opened.meta.get("meta", {}),
    }
    if as_json:
        full = {n: {"shape": list(t.shape), "kinds": {k: _dtype(d) for k, d in t.kinds.items()}} for n, t in listed.items()}
        click.echo(json.dumps({**about, **({"tensor": full} if tensors or include else {})}))
        return OK
    created = _clean(opened.manifest.created)
    click.echo(f"{opened.commit.name}: step {opened.step}, epoch {opened.epoch}, written by {opened.world} workers, {created}")
    click.echo(f"{opened.commit.path}")
    click.echo(f"{len(opened.tensors)} tensors, {_size(opened.manifest.bytes)} in {len(opened.manifest.objects)} objects")
    for label, (count, size) in kinds.items():
        click.echo(f"  {_clean(label):<28} {count:>16,} elements  {_size(size):>10}")
    for alias, target in opened.aliases.items():
        click.echo(f"  {_clean(alias)} is tied to {_clean(target)}")
    if tensors or include:
        for n, t in listed.items():
            held = ", ".join(f"{kind} {_dtype(dtype)}" for kind, dtype in t.kinds.items())
            click.echo(f"  {_clean(n)}  {list(t.shape)}  {_clean(held)}")
    return OK


@ckpt.command("verify")
@click.argument("path", required=False)
@click.argument("name", required=False)
@_as_json
def verify(path: str | None, name: str | None, as_json: bool) -> int:
    """Read a checkpoint and check every block's checksum: NAME in PATH, or the newest. Exit code 1 if it is damaged."""
    from vescale_ray import checkpoint

    root, found = _split(path)
    store = _store(root)
    chosen = name or found
    sizes = {one.name: one.bytes for one in checkpoint.ls(store)}
    total = sizes.get(chosen, 0) if chosen else next(reversed(sizes.values()), 0)
    with _bar("verifying", total, as_json) as advance:
        report = checkpoint.verify(_Watched(store, advance), chosen)
    if as_json:
        problems = [{"object": p.object, "block": p.block, "tensors": list(p.tensors), "reason": p.reason} for p in report.problems]
        about = {"commit": report.commit, "objects": report.objects, "blocks": report.blocks, "bytes": report.bytes}
        click.echo(json.dumps({**about, "problems": problems}))
        return FAILED if problems else OK
    if report.problems:
        raise Failed(f"{root}: {report.commit} is damaged: " + "; ".join(str(problem) for problem in report.problems))
    click.echo(f"{root}: {report.commit}: every checksum right ({report.objects} objects, {_size(report.bytes)})")
    return OK


@ckpt.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@_includes
@_excludes
@_as_json
def diff(a: str, b: str, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> int:
    """Compare two checkpoints, each PATH or PATH@NAME (B may be a NAME in A's PATH): tensors, shapes, dtypes, values.

    Exit code 1 if they differ.
    """
    from vescale_ray import checkpoint
    from vescale_ray.checkpoint.state.matching import label

    first = _open(a, None)
    second = _open(f"{_split(a)[0]}@{b}" if _COMMIT.fullmatch(b) else b, None)
    total = sum(math.prod(t.shape) * d.itemsize for t in first.tensors.values() for d in t.kinds.values())
    with _bar("comparing", total, as_json) as advance:
        found = checkpoint.diff(first, second, include=include or "*", exclude=exclude, progress=advance)
    if as_json:
        about = {
            "a": first.commit.path,
            "b": second.commit.path,
            "added": found.added,
            "removed": found.removed,
            "reshaped": [{"name": n, "kind": k, "a": x, "b": y} for (n, k), x, y in found.reshaped],
            "changed": [{**vars(d), "largest": _finite(d.largest)} for d in found.changed],
            "same": found.same,
            "bytes_read": found.bytes_read,
        }
        click.echo(json.dumps(about))
        return OK if found.equal else FAILED
    for pair in found.removed:
        click.echo(f"- {_clean(label(*pair))}")
    for pair in found.added:
        click.echo(f"+ {_clean(label(*pair))}")
    for pair, before, after in found.reshaped:
        click.echo(f"! {_clean(label(*pair))}: {before} -> {after}")
    for d in found.changed:
        largest = "" if d.largest is None else f", largest difference {d.largest:.6g}"
        click.echo(f"~ {_clean(label(d.name, d.kind))}: {d.differing:,} of {d.numel:,} elements differ{largest}")
    verdict = "no difference" if found.equal else "they differ"
    click.echo(f"{first.commit.name} and {second.commit.name}: {verdict}; {found.same} tensors equal bit for bit")
    return OK if found.equal else FAILED


# --------------------------------------------------------------------------------------------------------------- collecting


@ckpt.command("gc")
@click.argument("path")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Keep the newest KEEP whole checkpoints.")
@click.option("--every", type=click.IntRange(min=0), default=0, help="Also keep one for every EVERY steps.")
@click.option("--best", type=click.IntRange(min=0), default=0, help="Also keep the BEST best by --metric.")
@click.option("--metric", default="loss", show_default=True, help="Metric that the saves recorded.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Whether small or large is better.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@_as_json
def gc(path: str, keep: int, every: int, best: int, metric: str, mode: Literal["min", "max"], dry_run: bool, as_json: bool) -> int:
    """Delete the checkpoints that no rule and no pin keeps, and the remains of interrupted saves."""
    from vescale_ray.checkpoint import Retention

    root = _root(path)
    with _bad_values():
        rules = Retention(keep_last=keep, keep_every=every, keep_best=best, metric=metric, mode=mode)
    with _bar("verifying", None, as_json) as advance:
        report = _collect(root, rules, dry_run, advance)
    if as_json:
        click.echo(json.dumps(vars(report)))
    else:
        for deleted in report.deleted:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {deleted}")
        for kept in report.kept:
            click.echo(f"kept {kept} ({', '.join(report.why.get(kept, ()))})")
        waiting = f"; the data of {len(report.waiting)} stays for readers until their grace period ends" if report.waiting else ""
        count, size, would = len(report.swept), _size(report.freed_bytes), "would be " if dry_run else ""
        click.echo(f"{root}: {count} interrupted saves {would}swept, {size} {would}freed{waiting}")
    if report.problems:
        raise Failed(f"{root}: " + "; ".join(report.problems))
    return OK


def _collect(root: Target, rules: Retention, dry_run: bool, progress: Callable[[int], None]) -> GcReport:
    from vescale_ray import checkpoint

    return checkpoint.gc(_store(root), rules, dry_run=dry_run, progress=progress)


_pin_name = click.option("--as", "pin_name", default="cli", show_default=True, metavar="NAME", help="Name of the pin.")


@ckpt.command("pin")
@click.argument("path")
@_pin_name
@_as_json
def pin(path: str, pin_name: str, as_json: bool) -> int:
    """Keep PATH@NAME (or the newest) until it is unpinned, regardless of retention rules."""
    from vescale_ray import checkpoint

    root, name = _split(path)
    store = _store(root)
    commit = checkpoint.open(store, name).commit
    with _bad_values():
        checkpoint.pin(store, commit, pin_name)
    return _pinned(root, commit.name, pin_name, True, as_json)


@ckpt.command("unpin")
@click.argument("path")
@_pin_name
@_as_json
def unpin(path: str, pin_name: str, as_json: bool) -> int:
    """Remove a pin of PATH@NAME."""
    from vescale_ray import checkpoint

    root, name = _split(path)
    if name is None:
        raise BadInput(f"{path}: say which checkpoint: {path}@NAME; `vescale-ray ckpt ls {path}` lists them")
    with _bad_values():
        found = checkpoint.unpin(_store(root), name, pin_name)
    if not found:
        raise BadInput(f"{root}: {name} has no pin {pin_name!r}; it has {', '.join(checkpoint.pins(_store(root)).get(name, ())) or 'none'}")
    return _pinned(root, name, pin_name, False, as_json)


def _pinned(root: Target, commit: str, name: str, pinned: bool, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"path": str(root), "commit": commit, "pin": name, "pinned": pinned}))
    else:
        click.echo(f"{root}: {commit} {'pinned' if pinned else 'unpinned'} ({name})")
    return OK


# --------------------------------------------------------------------------------------------------------------- converting


@ckpt.command("export-hf")
@click.argument("path")
@click.argument("folder", callback=lasting_path)
@_names
@_includes
@_excludes
@click.option("--key", default="model", show_default=True, help="The entry of the state to write.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Cast floating-point tensors to this dtype.")
@click.option("--max-shard", default="5GB", show_default=True, metavar="SIZE", help="Largest size of one file.")
@_as_json
def export_hf(
    path: str,
    folder: str,
    names: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    key: str,
    dtype: str | None,
    max_shard: str,
    as_json: bool,
) -> int:
    """Write a checkpoint's weights to FOLDER as Hugging Face safetensors with their index, then read them back and compare.

    Example: vescale-ray ckpt export-hf runs/demo out --names llama --dtype bf16
    """
    import torch

    from vescale_ray import checkpoint

    opened = _open(path, None)
    cast: torch.dtype | None = getattr(torch, _DTYPES[dtype]) if dtype else None
    limit, table = _bytes("--max-shard", max_shard), _table(names)
    with _bad_values(), _bar("writing", _weights(opened, key), as_json) as advance:
        done = checkpoint.export_hf(
            _store(_split(path)[0]),
            opened.commit,
            folder,
            rename=table,
            include=include or "*",
            exclude=exclude,
            key=key,
            dtype=cast,
            max_shard_bytes=limit,
            progress=advance,
        )
    return _told(
        folder, {"commit": opened.commit.name, "files": list(done.files), "tensors": len(done.tensors), "bytes": done.bytes}, as_json
    )


@ckpt.command("import-hf")
@click.argument("source")
@click.argument("path")
@_names
@_includes
@_excludes
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="The checkpoint's step.")
@_as_json
def import_hf(
    source: str, path: str, names: str | None, include: tuple[str, ...], exclude: tuple[str, ...], step: int, as_json: bool
) -> int:
    """Make SOURCE the newest checkpoint of PATH, which is created if missing.

    SOURCE is a folder of safetensors, their index or one file.

    Example: vescale-ray ckpt import-hf Llama-3.2-1B runs/tuned/checkpoints --names llama
    """
    from vescale_ray import checkpoint
    from vescale_ray.checkpoint.bridges.foreign import local_folder
    from vescale_ray.checkpoint.huggingface import HfSource

    root, table = _root(path, must_exist=False), _table(names)
    with _bad_values():
        found = local_folder(source, "SOURCE")
    if not found.exists():
        raise BadInput(f"{source}: no such file or folder")
    total = sum(math.prod(t.shape) * t.kinds["param"].itemsize for t in HfSource(source).tensors.values())
    with _bad_values(), _bar("importing", total, as_json) as advance:
        commit = checkpoint.import_hf(
            source, _store(root), rename=table, include=include or "*", exclude=exclude, step=step, progress=advance
        )
    assert isinstance(commit, checkpoint.Commit)
    return _told(root, {"commit": commit.name, "bytes": commit.bytes}, as_json)


@ckpt.command("export-dcp")
@click.argument("path")
@click.argument("folder", callback=lasting_path)
@_includes
@_excludes
@_as_json
def export_dcp(path: str, folder: str, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> int:
    """Write a checkpoint to FOLDER for torch.distributed.checkpoint.load, then read it back and compare. Globs match DCP's keys
    (model.*)."""
    from vescale_ray import checkpoint

    opened = _open(path, None)
    total = sum(math.prod(t.shape) * d.itemsize for t in opened.tensors.values() for d in t.kinds.values())
    with _bad_values(), _bar("writing", total, as_json) as advance:
        done = checkpoint.export_dcp(
            _store(_split(path)[0]), opened.commit, folder, include=include or "*", exclude=exclude, progress=advance
        )
    return _told(folder, {"commit": opened.commit.name, "files": list(done.files), "keys": len(done.keys), "bytes": done.bytes}, as_json)


@ckpt.command("import-dcp")
@click.argument("source")
@click.argument("path")
@_names
@_includes
@_excludes
@click.option("--tied", multiple=True, metavar="OTHER=NAME", help="Two names of one tensor, which DCP stores twice.")
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="The checkpoint's step.")
@_as_json
def import_dcp(
    source: str,
    path: str,
    names: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    tied: tuple[str, ...],
    step: int,
    as_json: bool,
) -> int:
    """Make SOURCE, written by torch.distributed.checkpoint.save, the newest checkpoint of PATH, optimizer states included.

    Nothing is unpickled, not even DCP's own index.
    """
    from vescale_ray import checkpoint
    from vescale_ray.checkpoint.bridges.foreign import local_folder

    root, table = _root(path, must_exist=False), _table(names)
    with _bad_values():
        found = local_folder(source, "SOURCE")
    if not found.is_dir():
        raise BadInput(f"{source}: no such folder")
    pairs = dict(_pair(text) for text in tied)
    with _bad_values(), _bar("importing", None, as_json) as advance:
        commit = checkpoint.import_dcp(
            source, _store(root), rename=table, include=include or "*", exclude=exclude, tied=pairs, step=step, progress=advance
        )
    assert isinstance(commit, checkpoint.Commit)
    return _told(root, {"commit": commit.name, "bytes": commit.bytes}, as_json)


def _told(where: Target, about: Mapping[str, Any], as_json: bool) -> int:
    place = where if "://" in str(where) else os.path.abspath(where)
    files = f", {_size(about['bytes'])}, {len(about['files'])} files, read back and compared" if "files" in about else ""
    click.echo(json.dumps({"path": str(place), **about}) if as_json else f"{place}: {about['commit']}{files}")
    return OK


# -------------------------------------------------------------------------------------------------------------------- where


def _root(path: str | None, *, must_exist: bool = True) -> Target:
    """Return the folder (or URL) of checkpoints for PATH; for ``None``, that of the newest run."""
    from vescale_ray.config import load_config

    if path == "":
        raise BadInput("PATH is empty; give a run's name, a folder or a URL")  # an unset variable in a script must not mean this folder
    if path is not None and "://" in path:
        return path
    folder = _meant(path)
    root = folder.path
    if folder.config_path.is_file():
        # The run's folder may have moved; its present place counts, unless the configuration names another one.
        config = load_config(folder.config_path)
        if config.checkpoint.dir and "://" in config.checkpoint.dir:
            return config.checkpoint.dir
        root = Path(config.checkpoint_root) if config.checkpoint.dir else folder.checkpoints
    if must_exist and not root.is_dir():
        raise BadInput(f"{root}: no such folder of checkpoints, and no run of that name under ./runs; `vescale-ray ls` lists runs")
    if not must_exist:
        check_lasting(f"PATH = {path}", root)
    return root


def _meant(path: str | None) -> RunFolder:
    """Return the folder that PATH means: a run's, or one of checkpoints."""
    from vescale_ray.runfolder import RunFolder, newest_run

    named = Path("runs", path) if path is not None and not Path(path).exists() and os.sep not in path else None
    return newest_run() if path is None else RunFolder(named if named is not None and named.is_dir() else path)


def _run_folder(path: str) -> RunFolder | None:
    """Return the run that PATH means; None if it is a URL or only a folder of checkpoints."""
    folder = None if "://" in path else _meant(path)
    return folder if folder is not None and folder.is_run() else None


def _split(path: str | None) -> tuple[Target, str | None]:
    """Split PATH[@NAME] into (root, NAME)."""
    if path is not None and "@" in path:
        before, _, name = path.rpartition("@")
        if _COMMIT.fullmatch(name):
            return _root(before or None), name
    return _root(path), None


def _store(root: Target) -> ObjectStore:
    from vescale_ray.checkpoint.stores.opening import store_of

    with _bad_values():
        return store_of(root)


def _open(path: str | None, name: str | None) -> Checkpoint:
    from vescale_ray import checkpoint

    root, found = _split(path)
    return checkpoint.open(_store(root), name or found)


@contextmanager
def _bad_values() -> Iterator[None]:
    """Turn the library's ValueErrors into bad input, because the user gave the value."""
    try:
        yield
    except ValueError as error:
        raise error if isinstance(error, BadInput) else BadInput(str(error)) from None


class _Watched:
    """A store wrapper that reports how many bytes are read."""

    def __init__(self, store: ObjectStore, advance: Callable[[int], None]) -> None:
        self._store, self._advance = store, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def open_read(self, key: str) -> Iterator[_WatchedReader]:
        with self._store.open_read(key) as reader:
            yield _WatchedReader(reader, self._advance)


class _WatchedReader:
    def __init__(self, reader: Any, advance: Callable[[int], None]) -> None:
        self._reader, self._advance = reader, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_into(self, offset: int, view: memoryview) -> int:
        count: int = self._reader.read_into(offset, view)
        self._advance(count)
        return count


@contextmanager
def _bar(what: str, total: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr if that is a terminal; yields a function to call with the number of finished bytes."""
    if as_json or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _table(names: str | None) -> Mapping[str, str] | None:
    from vescale_ray.checkpoint.huggingface import TABLES

    if names is None:
        return None
    if names in TABLES:
        return TABLES[names]
    try:
        table = json.loads(Path(names).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--names {names}: it is not one of {', '.join(TABLES)}, and no readable file ({error.strerror})") from None
    except ValueError as error:
        raise BadInput(f"--names {names}: not JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(to, str) for to in table.values()):
        raise BadInput(f"--names {names}: give one JSON object of names: {{our name: theirs}}")
    return table


def _pair(text: str) -> tuple[str, str]:
    other, found, name = text.partition("=")
    if not (other and found and name):
        raise BadInput(f"--tied {text}: give OTHER=NAME, as head.weight=embed.weight")
    return other, name


def _bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise BadInput(f"{option} {text}: give a size such as 5GB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def _weights(opened: Checkpoint, key: str) -> int:
    stored = set(opened.names(key).values())
    return sum(math.prod(opened.tensors[n].shape) * opened.tensors[n].kinds["param"].itemsize for n in stored)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _clean(text: str) -> str:
    """Return a name from a file as text without control characters, which a terminal would obey."""
    return text if text.isprintable() else ascii(text)


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else repr(value)
