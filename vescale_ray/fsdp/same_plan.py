"""Do all ranks have the same plan? Asked before the first collective that depends on it.

One small all-gather per process group if they do. If they don't, three more find the first line in which rank 0 and the first rank
that differs from it differ, by hashes, so that no rank ever holds the plans of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vescale_ray import compat
from vescale_ray.fsdp.group import Group

if TYPE_CHECKING:
    from vescale_ray.fsdp.unit import Unit

_DIGEST, _HASH, _TEXT = 32, 8, 512


def check_same_plan(units: Sequence[Unit]) -> None:
    """Compare the plans of all groups over their ranks. Collective.

    Raises:
        RuntimeError: with the first difference, as it is on both sides.
    """
    plans: dict[int, tuple[Group, list[tuple[str, ...]]]] = {}
    for unit in units:
        for index, group in enumerate(unit.groups):
            if group.place.world > 1:
                head = f"{unit.name}[{index}]: {len(group.params)} parameters, {group.compute_dtype}/{group.reduce_dtype}"
                plans.setdefault(id(group.place.shard_group), (group, []))[1].append((head, *group.division.describe()))
    for group, descriptions in plans.values():
        _compare(group, descriptions)


def _compare(group: Group, descriptions: list[tuple[str, ...]]) -> None:
    digests = _gather(_hash("\n".join("\n".join(lines) for lines in descriptions), _DIGEST), _DIGEST, group)
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    which = _first_difference([_hash("\n".join(lines), _HASH) for lines in descriptions], odd, group)
    lines = descriptions[which] if which < len(descriptions) else ()
    line = _first_difference([_hash(text, _HASH) for text in lines], odd, group)
    head = lines[0] if lines else "(no such unit)"
    text = f"{head}: {lines[line]}" if 0 < line < len(lines) else head if line == 0 else f"{head}: (nothing more)"
    texts = [t.rstrip(b"\0").decode(errors="replace") for t in _gather(text.encode()[:_TEXT], _TEXT, group)]
    raise RuntimeError(
        f"the ranks planned different layouts: rank 0 has {texts[0]!r}, rank {odd} has {texts[odd]!r}; "
        f"build the same model with the same arguments of fully_shard on every rank"
    )


def _first_difference(hashes: list[bytes], odd: int, group: Group) -> int:
    """The first position at which the lists of rank 0 and rank ``odd`` differ; each rank knows its own. Collective."""
    longest = max(int.from_bytes(count, "little") for count in _gather(len(hashes).to_bytes(8, "little"), 8, group))
    size = max(1, longest) * _HASH
    lists = _gather(b"".join(hashes), size, group)
    for at in range(0, size, _HASH):
        if lists[0][at : at + _HASH] != lists[odd][at : at + _HASH]:
            return at // _HASH
    return longest


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def _gather(data: bytes, size: int, group: Group) -> list[bytes]:
    """Every rank's ``data``, filled up with zeros to ``size`` bytes."""
    mine = torch.zeros(size, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    mine = mine.to(group.place.device)
    # Every part starts as this rank's own: a process group that only pretends to communicate leaves it so.
    out = mine.repeat(group.place.world)
    compat.all_gather_single(out, mine, group=group.place.shard_group)
    parts = out.cpu().view(group.place.world, size)
    return [bytes(part.tolist()) for part in parts]
