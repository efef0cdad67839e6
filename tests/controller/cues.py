"""A model whose workers fail at a given moment.

The moment is the n-th forward of the k-th generation that a worker builds, the building itself, or the write of the last checkpoint. If it
does not matter which process fails, each process takes the next free cue. A cue may also be for a rank, and several may be for one moment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.controller.hanging import act
from tests.workers.tiny_models import DropoutModel
from vescale_ray.models.moe import MoE, MoEConfig

CONTROLLER = b"ray::Controller"


@dataclass(frozen=True)
class Cue:
    """A failure and its moment.

    Attributes:
        way: what happens, as in ``_Player.at`` and :func:`act`.
        build: first generation (from 1) in which the process may fail, if it gets as far as ``forward``.
        forward: number of the forward, from 1; 0: while the model is built.
        save: fail when the last checkpoint is written, and not in a forward.
        rank: rank that fails; None: any one process.
        together: number of cues of this moment that wait for each other, and then happen at once.
    """

    way: str
    build: int = 1
    forward: int = 0
    save: bool = False
    rank: int | None = None
    together: int = 1


def _folder() -> Path:
    # Ray's workers leave the process group of the process that started Ray, but not its session.
    return Path(tempfile.gettempdir()) / f"vescale-test-cues-{os.getsid(0)}"


@contextmanager
def cues(*parts: Cue) -> Iterator[None]:
    """Write the cues for a run of :func:`model` or :func:`experts`."""
    folder = _folder()
    folder.mkdir()
    (folder / "director").write_text(str(os.getpid()))
    for number, part in enumerate(parts):
        (folder / f"{'cue' if part.rank is None else 'role'}-{number}").write_text(json.dumps(asdict(part)))
    try:
        yield
    finally:
        shutil.rmtree(folder)


def played() -> int:
    """Number of cues whose moment has come."""
    return len(list(_folder().glob("played-*")))


class _Player:
    """Carries out the cue that this process has taken."""

    def __init__(self) -> None:
        self.builds = 0
        self.watches = False
        self.cue: Cue | None = None
        self.name = ""

    def watch(self) -> None:
        """Watch the building and the saving from now on. The model is created before its generation is built."""
        if not self.watches:
            self.watches = True
            self._watch_building()
            self._watch_saving()

    def built(self) -> None:
        self.builds += 1
        if self.builds == 1:
            self._take()
        self.at(0)

    def at(self, forward: int, save: bool = False) -> None:
        self._take_role(forward, save)
        cue = self.cue
        if cue is None or not self._now(cue, forward, save):
            return
        self.cue = None
        (_folder() / f"played-{self.name}").touch()
        self._gather(cue)
        if "controller" in cue.way:
            _end_controller()
        if cue.way in ("kill", "controller and worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif cue.way == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            act(cue.way)

    def _now(self, cue: Cue, forward: int, save: bool) -> bool:
        return cue.save == save and (save or (self.builds >= cue.build and forward == cue.forward))

    def _take_role(self, forward: int, save: bool) -> None:
        """Take a cue of this process' current rank, if one is due."""
        for path in sorted(_folder().glob("role-*")):
            try:
                cue = Cue(**json.loads(path.read_text()))
            except FileNotFoundError:
                continue  # its rank has just taken the cue
            if cue.rank == dist.get_rank() and self._now(cue, forward, save):
                path.rename(path.with_name(f"taken-{path.name}"))
                self.name, self.cue = path.name, cue

    def _gather(self, cue: Cue) -> None:
        """Wait for the other cues of the same moment, for at most 10 s."""
        moment = f"{cue.build}-{cue.forward}"
        (_folder() / f"here-{moment}-{os.getpid()}").touch()
        end = time.monotonic() + 10
        while len(list(_folder().glob(f"here-{moment}-*"))) < cue.together and time.monotonic() < end:
            time.sleep(0.001)

    def _take(self) -> None:
        for path in sorted(_folder().glob("cue-*")):
            mine = path.with_name(f"taken-{path.name}")
            try:
                path.rename(mine)
            except FileNotFoundError:
                continue  # another process was faster
            self.name, self.cue = path.name, Cue(**json.loads(mine.read_text()))
            return

    def _watch_building(self) -> None:
        from vescale_ray.workers import trainer

        whole = trainer.build_sharded

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.built()
            return whole(*args, **kwargs)

        setattr(trainer, "build_sharded", watched)  # noqa: B010

    def _watch_saving(self) -> None:
        from vescale_ray.workers import saving

        whole = saving.write_checkpoint_shard

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.at(-1, save=True)
            return whole(*args, **kwargs)

        setattr(saving, "write_checkpoint_shard", watched)  # noqa: B010


_PLAYER = _Player()  # one per process, since models come and go with the generations


def _end_controller() -> None:
    """SIGKILL the controller on this node. Its parent is this worker's raylet."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{name}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if title.startswith(CONTROLLER) and parent == os.getppid():
            os.kill(int(name), signal.SIGKILL)


class _Cued(nn.Module):
    """Mixed into a model: its process plays the cues of its forwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forwards = 0
        self.on_stage = _folder().exists() and (_folder() / "director").read_text() != str(os.getpid())
        if self.on_stage:
            _PLAYER.watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        if self.on_stage:
            _PLAYER.at(self.forwards)
        return super().forward(*args, **kwargs)


class CuedModel(_Cued, DropoutModel):
    """A model with dropout."""


class CuedExperts(_Cued, MoE):
    """A mixture of experts."""


def model() -> nn.Module:
    return CuedModel()


def experts(**sizes: Any) -> nn.Module:
    return CuedExperts(MoEConfig(**sizes))
