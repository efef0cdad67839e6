"""Client of a run: it finds the controller's HTTP address and token in control.json in the run's folder.

Standard library only, so that `vescale-ray status` answers at once.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Protocol

from vescale_ray.runfolder import FINAL_STATES, RunFolder, RunFolderError


class RunNotAlive(RuntimeError):
    """No controller answers for the run; the message is one line with its last known state and how to continue.

    Args:
        folder: folder of the run.
        elsewhere: another machine on whose loopback the run's controller listens; this machine can't tell whether the run is alive.

    ``again``: the driver lives, so its controller is starting or restarting, and the caller may ask again.
    """

    def __init__(self, folder: RunFolder, elsewhere: str | None = None) -> None:
        final = (folder.read_state() or {}).get("state") in FINAL_STATES
        owner = None if final else folder.owner()
        self.elsewhere = None if final else elsewhere
        self.again = owner is not None and self.elsewhere is None
        super().__init__(_unreached(folder, self.elsewhere) if self.elsewhere else _why_not_alive(folder, owner))


class Readable(Protocol):
    """An HTTP response that can be read in parts."""

    def read1(self, n: int = ..., /) -> bytes: ...


def body_of(answer: Readable, seconds: float) -> bytes:
    """Read a whole response within ``seconds``. A socket's own timeout restarts with every byte.

    Raises:
        TimeoutError: it was not complete within ``seconds``.
    """
    parts, deadline = [], time.monotonic() + seconds
    while part := answer.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no whole answer within {seconds:g} s")
    return b"".join(parts)


class CommandRefused(RuntimeError):
    """The run answered with a refusal; the message is its reason."""


def request(folder: RunFolder, action: str, body: dict[str, Any] | None = None, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """Call the controller of the run in ``folder``: ``status`` is a GET, ``stop`` and ``rescale`` are commands with the run's token.

    Raises:
        RunNotAlive: control.json is missing, or no controller answers within ``timeout_s``.
        CommandRefused: the controller answered with an error.
        RunFolderError: control.json is not a run's.
    """
    control = folder.read_control()
    if control is None:
        raise RunNotAlive(folder)
    url, token = control.get("url"), control.get("token")
    if not (isinstance(url, str) and url.startswith("http") and url.isprintable() and isinstance(token, str) and token.isprintable()):
        raise RunFolderError(f"{folder.path / 'control.json'}: holds no address and token of a run; the file was changed from outside")
    elsewhere = _elsewhere(url, control.get("host"))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None and action == "status" else json.dumps(body or {}).encode()
    call = urllib.request.Request(f"{url.rstrip('/')}/{action}", data=data, headers=headers)
    # The controller is inside the cluster's network; a proxy for the internet must not see the token.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(call, timeout=timeout_s) as answer:
            value = json.loads(body_of(answer, timeout_s))
    except urllib.error.HTTPError as error:
        reason = _reason(error)
        if elsewhere is not None and (reason is None or error.code == 401):  # another run or program answered
            raise RunNotAlive(folder, elsewhere) from None
        foreign = f"{url} answers HTTP {error.code} {error.reason}, as no run does: is its port another program's? See the driver's log"
        raise CommandRefused(reason or foreign) from None
    except (OSError, http.client.HTTPException, ValueError):
        raise RunNotAlive(folder, elsewhere) from None
    if not isinstance(value, dict):
        raise RunNotAlive(folder, elsewhere)
    if action == "status" and value.get("run") != folder.path.name:
        # Another run or program has this port: the run has died, or it lives on another machine whose loopback address this is.
        raise RunNotAlive(folder, elsewhere)
    return value


def _elsewhere(url: str, host: object) -> str | None:
    """Return the machine that wrote a loopback address, if it is not this one."""
    name = urllib.parse.urlsplit(url).hostname or ""
    try:
        loopback = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        loopback = False
    return host if loopback and isinstance(host, str) and host.isprintable() and host != socket.gethostname() else None


def _reason(error: urllib.error.HTTPError) -> str | None:
    """Return the controller's reason for a refusal; None if no controller answered."""
    try:
        return str(json.loads(body_of(error, 3.0))["error"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return None


def _unreached(folder: RunFolder, host: str) -> str:
    state = folder.read_state() or {}
    return (
        f"{folder.path}: its controller listens on the loopback of {host} alone, and this is {socket.gethostname()}: ask there, or start "
        f"the run with metrics.host=0.0.0.0; its last known state is {state.get('state')} at step {state.get('step')}"
    )


def _why_not_alive(folder: RunFolder, owner: str | None) -> str:
    state = folder.read_state()
    if owner is not None:
        return f"{folder.path}: its controller does not answer now, but its driver lives (process {owner}) and starts it; ask again"
    if state is None:
        return (
            f"{folder.path}: the run is not alive, and never got to its first state; start it with `vescale-ray train {folder.config_path}`"
        )
    name, step = state.get("state"), state.get("step")
    if name == "DONE":
        return f"{folder.path}: the run is not alive: it is done, with {step} steps"
    if name in FINAL_STATES:
        return f"{folder.path}: the run is not alive: {name} at step {step}; resume it with `vescale-ray train {folder.config_path}`"
    return (
        f"{folder.path}: the run is not alive: nothing answers, its last known state is {name} at step {step}; "
        f"resume it with `vescale-ray train {folder.config_path}`"
    )
