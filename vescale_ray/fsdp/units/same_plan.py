"""Check that all ranks have the same plan, and have loaded state dicts alike, before the first collective that depends on it.

If they do, this takes one small all-gather per process group. If not, three more find the first line in which rank 0 and the first
different rank differ. They compare hashes, so no rank ever holds all plans. The replicas (HSDP, DDP) then compare the digests of all their
ranks in the same way. So if one rank is different, every rank of every replica raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale_ray.fsdp.layouts.group_parameter import Place

if TYPE_CHECKING:
    from vescale_ray.fsdp.units.unit import Unit

_DIGEST, _HASH, _TEXT = 32, 8, 512


def check_same_plan(units: Sequence[Unit]) -> None:
    """Compare the plans of all groups over their ranks. Collective.

    Raises:
        RuntimeError: the plans differ; the message has the first difference as both ranks have it.
    """
    plans: dict[tuple[int, int], tuple[Place, list[tuple[str, ...]]]] = {}
    for unit in units:
        for index, group in enumerate(unit.groups):
            head = f"{unit.name}[{index}]: {len(group.params)} parameters, {group.compute_dtype}/{group.reduce_dtype}"
            head += f", staging buffers of {group.grads.staging} bytes" if group.grads.staging else ""
            head += f", module states loaded: {unit.loads}" if unit.loads else ""
            key = id(group.place.shard_group), id(group.place.replicate_group)
            plans.setdefault(key, (group.place, []))[1].append((head, *group.division.describe(), *group.gathered.wire.describe()))
    for place, descriptions in plans.values():
        ranks = _Ranks(place.shard_group, place.world, place.device, "rank")
        digest = _hash("\n".join("\n".join(lines) for lines in descriptions), _DIGEST)
        digests, difference = _compare(ranks, digest, descriptions)
        if place.replicate_group is not None:
            replicas = _Ranks(place.replicate_group, place.replicas, place.device, "replica")
            _, between = _compare(replicas, hashlib.blake2b(b"".join(digests), digest_size=_DIGEST).digest(), descriptions)
            difference = difference or between
        if difference:
            raise RuntimeError(
                f"the ranks planned different layouts: {difference}; "
                f"build the same model with the same arguments of fully_shard, and load the same state dicts, on every rank"
            )


class _Ranks:
    """The ranks whose plans are compared, and the word for one of them (rank or replica)."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device, word: str) -> None:
        self.group, self.size, self.device, self.word = group, size, device, word

    def gather(self, data: bytes, size: int) -> list[bytes]:
        """Return every member's ``data``, padded with zeros to ``size`` bytes. Collective."""
        if self.size == 1:
            return [data.ljust(size, b"\0")]
        mine = torch.zeros(size, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        mine = mine.to(self.device)
        # Every part starts as this rank's own, so that a fake process group, which moves nothing, leaves equal parts.
        out = mine.repeat(self.size)
        dist.all_gather_single(out, mine, group=self.group)
        parts = out.cpu().view(self.size, size)
        return [bytes(part.tolist()) for part in parts]


def _compare(ranks: _Ranks, digest: bytes, descriptions: list[tuple[str, ...]]) -> tuple[list[bytes], str]:
    """Return every member's digest, and the first difference between the plans, or "". Collective."""
    digests = ranks.gather(digest, _DIGEST)
    odd = next((rank for rank, other in enumerate(digests) if other != digests[0]), None)
    if odd is None:
        return digests, ""
    which = _first_difference([_hash("\n".join(lines), _HASH) for lines in descriptions], odd, ranks)
    lines = descriptions[which] if which < len(descriptions) else ()
    line = _first_difference([_hash(text, _HASH) for text in lines], odd, ranks)
    head = lines[0] if lines else "(no such unit)"
    text = f"{head}: {lines[line]}" if 0 < line < len(lines) else head if line == 0 else f"{head}: (nothing more)"
    texts = [t.rstrip(b"\0").decode(errors="replace") for t in ranks.gather(text.encode()[:_TEXT], _TEXT)]
    if texts[0] == texts[odd]:  # the replicas differ, but not in the plans of the ranks compared here
        return digests, f"{ranks.word} {odd} and {ranks.word} 0 differ (the error of another rank says where)"
    return digests, f"{ranks.word} 0 has {texts[0]!r}, {ranks.word} {odd} has {texts[odd]!r}"


def _first_difference(hashes: list[bytes], odd: int, ranks: _Ranks) -> int:
    """Return the first position at which the lists of rank 0 and rank ``odd`` differ; each rank passes its own list. Collective."""
    longest = max(int.from_bytes(count, "little") for count in ranks.gather(len(hashes).to_bytes(8, "little"), 8))
    size = max(1, longest) * _HASH
    lists = ranks.gather(b"".join(hashes), size)
    for at in range(0, size, _HASH):
        if lists[0][at : at + _HASH] != lists[odd][at : at + _HASH]:
            return at // _HASH
    return longest


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
