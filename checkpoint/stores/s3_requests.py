"""Requests to an S3 service through s3fs: the file system, retries and time limits.

s3fs signs, finds credentials and parses, on fsspec's event loop, which runs in a thread of its own. Its own retries are off: :func:`call`
retries temporary failures (throttling, 5xx, timeouts, broken connections, damaged or short bodies) with full jitter until a deadline.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from .s3_errors import Cancelled, Transient, Undecided, judge
from .s3_options import S3Options

Answer = dict[str, Any]
Accept = Callable[[Answer], memoryview | None]

_SLICE_BYTES = 256 << 10
"""Bytes of a body that are handed to the socket at once. A larger slice delays the event loop, and its rest is copied."""


def file_system(o: S3Options) -> Any:
    from aiobotocore.session import AioSession
    from s3fs import S3FileSystem

    session = AioSession(profile=o.profile)
    session.register_component("data_loader", _loader())
    fs = S3FileSystem(
        session=session,
        key=o.access_key,
        secret=o.secret_key,
        token=o.session_token,
        endpoint_url=o.endpoint,
        config_kwargs={
            "region_name": o.region,
            "connect_timeout": o.connect_timeout_s,
            "read_timeout": o.timeout_s,
            "max_pool_connections": 0,  # no limit, since the time of a request would also pass in a queue
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "parameter_validation": False,  # botocore's check would refuse a _Body
            # Bodies carry our own CRC-32 in a signed header. Signing their SHA-256 as well would cost 0.7 CPU seconds per GB.
            "s3": {
                "addressing_style": "path" if o.addressing == "auto" and o.endpoint else o.addressing,
                "payload_signing_enabled": False,
            },
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    fs.retries = 1
    fs.close_session = partial(_close_session, os.getpid())
    return fs


@cache
def _loader() -> Any:
    """botocore's service descriptions, parsed once per process. With them a client takes 10 ms, without 70 ms."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def call(
    fs: Any,
    o: S3Options,
    what: str,
    method: str,
    *,
    accept: Accept | None = None,
    cancel: threading.Event | None = None,
    conflict_again: bool = True,
    **params: Any,
) -> Answer:
    """Make a request again until it succeeds, fails for good, or ``retry_s`` have passed.

    Args:
        what: description for messages, such as ``"PUT s3://bucket/key"``.
        method: name of the request in botocore, which ``params`` are for.
        accept: check of an answer, which may raise Transient. It may return the memory that the answer's body is to fill.
        cancel: event that other threads set to stop the retries.
        conflict_again: whether to retry a 409 (conflict of two conditional requests).

    Raises:
        KeyMissing, PreconditionFailed, NotSupported, UploadGone: the service's answer.
        OSError: the service refused for good; the message has the remedy. Undecided: it never answered properly.
    """
    began = time.monotonic()
    stop = cancel or threading.Event()
    tries = 0
    while True:
        if stop.is_set():
            raise Cancelled(errno.ECANCELED, f"{what} was given up: another part of it failed")
        tries += 1
        future = asyncio.run_coroutine_threadsafe(_request(fs, o, method, params, accept, stop), fs.loop)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()  # for example on Ctrl-C
            problem = judge(error, what, params["Bucket"], conflict_again)
            if problem is None:
                raise
            if not isinstance(problem, Transient):
                raise problem from error
            spent = time.monotonic() - began
            if spent >= o.retry_s:
                text = f"{what}: {problem.strerror} ({tries} tries in {spent:.1f} s)"
                raise Undecided(errno.ETIMEDOUT if "timed out" in text else errno.EIO, text) from error
        limit = min(10.0, o.pause_s * 2 ** min(tries - 1, 20))
        stop.wait(min(random.uniform(0, limit), max(0.0, o.retry_s - spent)))


async def _request(fs: Any, o: S3Options, method: str, params: dict[str, Any], accept: Accept | None, stop: threading.Event) -> Answer:
    """Make one request.

    aiohttp limits the wait for a connection, for an answer and for its next bytes. It limits neither the wait until the service takes a
    body, so each slice of one may take ``timeout_s`` here, nor a download that is slow but steady, which may take ``part_timeout_s``.
    """
    loop = asyncio.get_running_loop()
    await fs.set_session()  # the first call parses descriptions and looks for credentials; both have time limits of their own
    async with asyncio.timeout(o.part_timeout_s if method == "get_object" else None) as limit:

        def sent() -> None:
            with suppress(RuntimeError):  # the answer came before the body was sent
                limit.reschedule(loop.time() + o.timeout_s)

        if "Body" in params:
            params = {**params, "Body": _Body(params["Body"], sent)}
        answer: Answer = await fs._call_s3(method, **params)
        if "Body" not in answer:
            if accept:
                accept(answer)
            return answer
        async with answer["Body"] as body:
            view = accept(answer) if accept else None
            answer["Body"] = await _receive(body, memoryview(bytearray(answer["ContentLength"])) if view is None else view, stop)
    return answer


class _Body:
    """A request's body. Reports each slice that is about to be sent. Each iteration, so each attempt, begins at the start."""

    def __init__(self, data: bytes | memoryview, sent: Callable[[], None]) -> None:
        self._data = memoryview(data)
        self._sent = sent

    def __len__(self) -> int:
        return len(self._data)

    def seek(self, _position: int) -> None:
        """Do nothing; botocore calls it before it follows a redirection."""

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._data), _SLICE_BYTES):
            self._sent()
            yield self._data[start : start + _SLICE_BYTES]


async def _receive(body: Any, view: memoryview, stop: threading.Event) -> memoryview:
    done = 0
    while done < len(view):
        data = await body.read(len(view) - done)
        if not data or stop.is_set():
            raise Transient(errno.EIO, f"only {done} of {len(view)} bytes arrived")
        view[done : done + len(data)] = data
        done += len(data)
    return view


def _close_session(owner: int, loop: Any, session: Any) -> None:
    """Close the connections of a file system that is collected, unless it was inherited from the process that forked this one.

    A child shares its parent's sockets and epoll object. If it closed its copies, the parent would not hear of answers any more.
    """
    from s3fs import S3FileSystem

    if os.getpid() == owner:
        S3FileSystem.close_session(loop, session)
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # never collected, not even at exit
