"""A model whose workers fail at an appointed moment: in the n-th forward of the k-th generation that they build, while they build it, or
while they write the last checkpoint. Where it does not matter which process takes which part, each takes the next that is left; a part may
also be a rank's, and several may be for the same moment."""

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
from torch import Tensor, nn

from tests.controller.hanging import act
from tests.controller.runs import parents
from tests.workers.tiny import DropoutModel

CONTROLLER = b"ray::Controller"
FOLDER = "VESCALE_TEST_CUES"
"""Environment variable: the folder of the parts, for workers of a Ray that has a session of its own."""


@dataclass(frozen=True)
class Cue:
    """When ``way`` is to happen to whoever takes it: in the forward of this number (from 1; 0: while the model is built) of the first
    generation from ``build`` (from 1) on that gets so far; or when it has the last checkpoint ``save``d.

    ``rank``: who it is in that moment; None: any one process. ``together``: so many parts of this moment wait for each other, and then
    happen at once."""

    way: str
    build: int = 1
    forward: int = 0
    save: bool = False
    rank: int | None = None
    together: int = 1


def _folder() -> Path:
    # Ray's workers leave the process group of whoever started Ray, not the session.
    return Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / f"vescale-test-cues-{os.getsid(0)}")


@contextmanager
def cues(*parts: Cue, folder: Path | None = None) -> Iterator[None]:
    """Lay out the parts for a run of :func:`model`; ``folder``: what its workers have as :data:`FOLDER`."""
    folder = folder or _folder()
    folder.mkdir()
    (folder / "director").write_text(str(os.getpid()))
    for number, part in enumerate(parts):
        (folder / f"{'cue' if part.rank is None else 'role'}-{number}").write_text(json.dumps(asdict(part)))
    try:
        yield
    finally:
        shutil.rmtree(folder)


def played(folder: Path | None = None) -> int:
    """How many parts have been played."""
    return len(list((folder or _folder()).glob("played-*")))


class _Player:
    """The part that this process has taken."""

    def __init__(self) -> None:
        self.builds = 0
        self.watches = False
        self.cue: Cue | None = None
        self.name = ""

    def watch(self) -> None:
        """A model is made, which is ahead of its generation: what follows is to be seen, too."""
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
        if cue.way == "node":
            _end_node()
        if cue.way in ("kill", "controller and worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif cue.way == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif cue.way != "controller":
            act(cue.way)

    def _now(self, cue: Cue, forward: int, save: bool) -> bool:
        return cue.save == save and (save or (self.builds >= cue.build and forward == cue.forward))

    def _take_role(self, forward: int, save: bool) -> None:
        """A part of the rank that this process is now, if it is due."""
        for path in sorted(_folder().glob("role-*")):
            try:
                cue = Cue(**json.loads(path.read_text()))
            except FileNotFoundError:
                continue  # its rank has just taken it
            if cue.rank == dist.get_rank() and self._now(cue, forward, save):
                path.rename(path.with_name(f"taken-{path.name}"))
                self.name, self.cue = path.name, cue

    def _gather(self, cue: Cue) -> None:
        """Wait for the others of the same moment."""
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

        whole = trainer._build

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.built()
            return whole(*args, **kwargs)

        setattr(trainer, "_build", watched)  # noqa: B010

    def _watch_saving(self) -> None:
        from vescale_ray.workers.resharding import reshard

        whole = reshard.write_checkpoint_shard

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.at(-1, save=True)
            return whole(*args, **kwargs)

        setattr(reshard, "write_checkpoint_shard", watched)  # noqa: B010


_PLAYER = _Player()  # of this process: its models come and go with the generations


def _end_controller() -> None:
    """SIGKILL the controller on this node: the worker's raylet is its parent, too."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{name}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if title.startswith(CONTROLLER) and parent == os.getppid():
            os.kill(int(name), signal.SIGKILL)


def _end_node() -> None:
    """SIGKILL this process' node: the raylet, and all that it has started; this process last."""
    raylet = os.getppid()
    for pid in [*(pid for pid, its in parents().items() if its == raylet and pid != os.getpid()), raylet, os.getpid()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class CuedModel(DropoutModel):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.on_stage = _folder().exists() and (_folder() / "director").read_text() != str(os.getpid())
        if self.on_stage:
            _PLAYER.watch()

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        if self.on_stage:
            _PLAYER.at(self.forwards)
        return super().forward(tokens)


def model() -> nn.Module:
    return CuedModel()
