"""``vescale-ray ckpt ls, show, verify, diff, gc, pin, unpin``: inspect, compare, pin and delete checkpoints.

PATH is a run's name (under ./runs), a run's folder, a folder of checkpoints or a URL. ``@`` and a checkpoint's name may follow; without
them, the newest checkpoint is meant. Bars appear on a terminal only, so logs stay plain lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import click

from vescale_ray.cli.checkpoints.checkpoint_output import Watched, bar, clean, dtype_text, finite, size_text
from vescale_ray.cli.checkpoints.checkpoint_paths import COMMIT, Target, bad_values, open_at, root_of, split, store_at
from vescale_ray.cli.common import FAILED, OK, Failed
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from vescale_ray.checkpoint import GcReport, Retention


as_json_flag = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
includes = click.option("--include", multiple=True, metavar="GLOB", help="Only tensors whose names match; may be given several times.")
excludes = click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose names match.")


# ----------------------------------------------------------------------------------------------------------------- looking


@click.command("ls")
@click.argument("path", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(path: str | None, as_json: bool) -> int:
    """List the committed checkpoints in PATH, oldest first. Without PATH: of the newest run."""
    from vescale_ray import checkpoint

    root = root_of(path)
    commits = checkpoint.ls(store_at(root))
    for one in commits:
        if as_json:
            about = {"name": one.name, "path": str(one.path), "step": one.step, "epoch": one.epoch, "world": one.world, "bytes": one.bytes}
            click.echo(json.dumps({**about, "problem": one.problem}))
        else:
            verdict = one.problem or f"step {one.step}, written by {one.world} workers, {size_text(one.bytes)}"
            click.echo(f"{one.name}  {verdict}")
    if not commits and not as_json:
        click.echo(f"{root}: no committed checkpoint")
    return OK


@click.command("show")
@click.argument("path", required=False)
@click.argument("name", required=False)
@click.option("--tensors", is_flag=True, help="List the tensors, too.")
@includes
@as_json_flag
def show(path: str | None, name: str | None, tensors: bool, include: tuple[str, ...], as_json: bool) -> int:
    """Describe a checkpoint from its manifest alone: NAME in PATH, or the newest."""
    from vescale_ray.checkpoint.state.name_tables import matches
    from vescale_ray.checkpoint.state.saved_meta import check_saved_meta

    opened = open_at(path, name)
    check_saved_meta(opened.commit.path, opened.meta)
    listed = {n: t for n, t in opened.tensors.items() if matches(n, include or ("*",))}
    if include and not listed:
        raise BadInput(f"{opened.commit.path} has no tensor that fits {', '.join(include)}; `ckpt show --tensors` lists all names")
    kinds: dict[str, tuple[int, int]] = {}
    for tensor in opened.tensors.values():
        for kind, dtype in tensor.kinds.items():
            label = f"{kind} {dtype_text(dtype)}"
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
        full = {n: {"shape": list(t.shape), "kinds": {k: dtype_text(d) for k, d in t.kinds.items()}} for n, t in listed.items()}
        click.echo(json.dumps({**about, **({"tensor": full} if tensors or include else {})}))
        return OK
    created = clean(opened.manifest.created)
    click.echo(f"{opened.commit.name}: step {opened.step}, epoch {opened.epoch}, written by {opened.world} workers, {created}")
    click.echo(f"{opened.commit.path}")
    click.echo(f"{len(opened.tensors)} tensors, {size_text(opened.manifest.bytes)} in {len(opened.manifest.objects)} objects")
    for label, (count, size) in kinds.items():
        click.echo(f"  {clean(label):<28} {count:>16,} elements  {size_text(size):>10}")
    for alias, target in opened.aliases.items():
        click.echo(f"  {clean(alias)} is tied to {clean(target)}")
    if tensors or include:
        for n, t in listed.items():
            held = ", ".join(f"{kind} {dtype_text(dtype)}" for kind, dtype in t.kinds.items())
            click.echo(f"  {clean(n)}  {list(t.shape)}  {clean(held)}")
    return OK


@click.command("verify")
@click.argument("path", required=False)
@click.argument("name", required=False)
@as_json_flag
def verify(path: str | None, name: str | None, as_json: bool) -> int:
    """Read a checkpoint and check every block's checksum: NAME in PATH, or the newest. Exit code 1 if it is damaged."""
    from vescale_ray import checkpoint

    root, found = split(path)
    store = store_at(root)
    chosen = name or found
    sizes = {one.name: one.bytes for one in checkpoint.ls(store)}
    total = sizes.get(chosen, 0) if chosen else next(reversed(sizes.values()), 0)
    with bar("verifying", total, as_json) as advance:
        report = checkpoint.verify(Watched(store, advance), chosen)
    if as_json:
        problems = [{"object": p.object, "block": p.block, "tensors": list(p.tensors), "reason": p.reason} for p in report.problems]
        about = {"commit": report.commit, "objects": report.objects, "blocks": report.blocks, "bytes": report.bytes}
        click.echo(json.dumps({**about, "problems": problems}))
        return FAILED if problems else OK
    if report.problems:
        raise Failed(f"{root}: {report.commit} is damaged: " + "; ".join(str(problem) for problem in report.problems))
    click.echo(f"{root}: {report.commit}: every checksum right ({report.objects} objects, {size_text(report.bytes)})")
    return OK


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@includes
@excludes
@as_json_flag
def diff(a: str, b: str, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> int:
    """Compare two checkpoints, each PATH or PATH@NAME (B may be a NAME in A's PATH): tensors, shapes, dtypes, values.

    Exit code 1 if they differ.
    """
    from vescale_ray import checkpoint
    from vescale_ray.checkpoint.state.matching import label

    first = open_at(a, None)
    second = open_at(f"{split(a)[0]}@{b}" if COMMIT.fullmatch(b) else b, None)
    total = sum(math.prod(t.shape) * d.itemsize for t in first.tensors.values() for d in t.kinds.values())
    with bar("comparing", total, as_json) as advance:
        found = checkpoint.diff(first, second, include=include or "*", exclude=exclude, progress=advance)
    if as_json:
        about = {
            "a": first.commit.path,
            "b": second.commit.path,
            "added": found.added,
            "removed": found.removed,
            "reshaped": [{"name": n, "kind": k, "a": x, "b": y} for (n, k), x, y in found.reshaped],
            "changed": [{**vars(d), "largest": finite(d.largest)} for d in found.changed],
            "same": found.same,
            "bytes_read": found.bytes_read,
        }
        click.echo(json.dumps(about))
        return OK if found.equal else FAILED
    for pair in found.removed:
        click.echo(f"- {clean(label(*pair))}")
    for pair in found.added:
        click.echo(f"+ {clean(label(*pair))}")
    for pair, before, after in found.reshaped:
        click.echo(f"! {clean(label(*pair))}: {before} -> {after}")
    for d in found.changed:
        largest = "" if d.largest is None else f", largest difference {d.largest:.6g}"
        click.echo(f"~ {clean(label(d.name, d.kind))}: {d.differing:,} of {d.numel:,} elements differ{largest}")
    verdict = "no difference" if found.equal else "they differ"
    click.echo(f"{first.commit.name} and {second.commit.name}: {verdict}; {found.same} tensors equal bit for bit")
    return OK if found.equal else FAILED


# --------------------------------------------------------------------------------------------------------------- collecting


@click.command("gc")
@click.argument("path")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Keep the newest KEEP whole checkpoints.")
@click.option("--every", type=click.IntRange(min=0), default=0, help="Also keep one for every EVERY steps.")
@click.option("--best", type=click.IntRange(min=0), default=0, help="Also keep the BEST best by --metric.")
@click.option("--metric", default="loss", show_default=True, help="Metric that the saves recorded.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Whether small or large is better.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@as_json_flag
def gc(path: str, keep: int, every: int, best: int, metric: str, mode: Literal["min", "max"], dry_run: bool, as_json: bool) -> int:
    """Delete the checkpoints that no rule and no pin keeps, and the remains of interrupted saves."""
    from vescale_ray.checkpoint import Retention

    root = root_of(path)
    with bad_values():
        rules = Retention(keep_last=keep, keep_every=every, keep_best=best, metric=metric, mode=mode)
    with bar("verifying", None, as_json) as advance:
        report = _collect(root, rules, dry_run, advance)
    if as_json:
        click.echo(json.dumps(vars(report)))
    else:
        for deleted in report.deleted:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {deleted}")
        for kept in report.kept:
            click.echo(f"kept {kept} ({', '.join(report.why.get(kept, ()))})")
        waiting = f"; the data of {len(report.waiting)} stays for readers until their grace period ends" if report.waiting else ""
        count, size, would = len(report.swept), size_text(report.freed_bytes), "would be " if dry_run else ""
        click.echo(f"{root}: {count} interrupted saves {would}swept, {size} {would}freed{waiting}")
    if report.problems:
        raise Failed(f"{root}: " + "; ".join(report.problems))
    return OK


def _collect(root: Target, rules: Retention, dry_run: bool, progress: Callable[[int], None]) -> GcReport:
    from vescale_ray import checkpoint

    return checkpoint.gc(store_at(root), rules, dry_run=dry_run, progress=progress)


_pin_name = click.option("--as", "pin_name", default="cli", show_default=True, metavar="NAME", help="Name of the pin.")


@click.command("pin")
@click.argument("path")
@_pin_name
@as_json_flag
def pin(path: str, pin_name: str, as_json: bool) -> int:
    """Keep PATH@NAME (or the newest) until it is unpinned, regardless of retention rules."""
    from vescale_ray import checkpoint

    root, name = split(path)
    store = store_at(root)
    commit = checkpoint.open(store, name).commit
    with bad_values():
        checkpoint.pin(store, commit, pin_name)
    return _pinned(root, commit.name, pin_name, True, as_json)


@click.command("unpin")
@click.argument("path")
@_pin_name
@as_json_flag
def unpin(path: str, pin_name: str, as_json: bool) -> int:
    """Remove a pin of PATH@NAME."""
    from vescale_ray import checkpoint

    root, name = split(path)
    if name is None:
        raise BadInput(f"{path}: say which checkpoint: {path}@NAME; `vescale-ray ckpt ls {path}` lists them")
    with bad_values():
        found = checkpoint.unpin(store_at(root), name, pin_name)
    if not found:
        others = ", ".join(checkpoint.pins(store_at(root)).get(name, ())) or "none"
        raise BadInput(f"{root}: {name} has no pin {pin_name!r}; it has {others}")
    return _pinned(root, name, pin_name, False, as_json)


def _pinned(root: Target, commit: str, name: str, pinned: bool, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"path": str(root), "commit": commit, "pin": name, "pinned": pinned}))
    else:
        click.echo(f"{root}: {commit} {'pinned' if pinned else 'unpinned'} ({name})")
    return OK
