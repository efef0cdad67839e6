"""What the controller tells the world: Prometheus metrics, a status, and the two commands, on one small HTTP server.

    GET  /metrics                       Prometheus or OpenMetrics text, made from one snapshot
    GET  /status                        the same snapshot as JSON
    POST /stop                          checkpoint and end      } need "Authorization: Bearer TOKEN"
    POST /rescale  {"workers": n}       train on with n workers }

One custom collector over an immutable snapshot: a rank that left the snapshot is gone from the next scrape, so nothing stale
is left after a shrink, and no metric object lives outside the server (research/deploy.md 2.4). Names follow Prometheus'
rules: base units, ``_total`` for counters, labels ``run`` and small enums only, ``rank`` on per-worker families alone.
"""

from __future__ import annotations

import errno
import hmac
import json
import math
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from vescale_ray.errors import BadInput

STATES = ("PENDING", "STARTING", "RUNNING", "RESCALING", "CHECKPOINTING", "STOPPING", "DONE", "FAILED")
SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
MAX_BODY = 65536
Control = Callable[[str, dict[str, Any]], dict[str, Any]]


class PortInUse(BadInput):
    """Another process listens on the port; the message is one line with it and the remedy."""


@dataclass(frozen=True)
class Histogram:
    """Counts of observed seconds per bucket; a value: :meth:`observe` gives the next one."""

    counts: tuple[int, ...] = (0,) * (len(SECONDS_BUCKETS) + 1)
    sum: float = 0.0

    def observe(self, seconds: float) -> Histogram:
        """This histogram with one observation more; one that is not finite is left out."""
        if not math.isfinite(seconds):
            return self
        place = bisect_left(SECONDS_BUCKETS, seconds)
        counts = tuple(count + (index == place) for index, count in enumerate(self.counts))
        return replace(self, counts=counts, sum=self.sum + max(0.0, seconds))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus wants them."""
        bounds = [*(str(bound) for bound in SECONDS_BUCKETS), "+Inf"]
        return [(bound, float(sum(self.counts[: index + 1]))) for index, bound in enumerate(bounds)]


@dataclass(frozen=True)
class RunSnapshot:
    """The run at one moment; None or empty: not known (yet), and then not exported either.

    Attributes:
        productive_seconds: spent in steps that count; ``lost_seconds``: all other time since ``started``, by cause (``goodput.Loss``).
        step: completed steps; falls back when a rollback undoes some.
        steps: steps of the whole run.
        steps_executed: steps ever executed, replayed ones included: never falls.
        tokens: tokens ever trained on, replayed ones included: never falls.
        loss: of the last step, in nats per token; ``bpb``: the same in bits per byte.
        world_target, world_min, world_max: workers wanted, and the bounds.
        spares, spares_target: warm workers beside those that train; how many are wanted.
        places_wanted: places that Ray's autoscaler is shown as wanted.
        rescales: count by (direction, reason).
        rescale_phase_seconds: seconds spent in each phase of the rescales.
        worker_failures: count by reason.
        failures: times that something went wrong, by cause (``budget.Cause``); ``failures_in_a_row``: since the last new step.
        memory: resident bytes of each rank's process.
        workers: of each rank, what identifies its worker: ``worker``, ``node``.
        slot_seconds: of each rank, its own time for a slot in the last step; ``slowness``: how many times as long as the usual rank it
            takes, of late; ``slots``: how many it does in the next step.
        stragglers: workers that are slow: ``rank``, ``factor``, ``since_step``, ``node``.
        checkpoint_bytes: bytes ever written in committed checkpoints.
        checkpoint_stall: seconds that training waited for the copy of the newest checkpoint.
        checkpoint_interval: seconds between checkpoints, with ``checkpoint.every: auto``; ``_text``: what it came from.
    """

    run: str
    state: str
    step: int = 0
    steps: int = 0
    steps_executed: int = 0
    tokens: int = 0
    loss: float | None = None
    bpb: float | None = None
    tokens_per_second: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    world: int = 0
    world_target: int = 0
    world_min: int = 0
    world_max: int = 0
    spares: int = 0
    spares_target: int = 0
    places_wanted: int = 0
    generation: int = 0
    started: float | None = None
    productive_seconds: float = 0.0
    lost_seconds: Mapping[str, float] = field(default_factory=dict)
    last_step_time: float | None = None
    step_seconds: Histogram = Histogram()
    rescales: Mapping[tuple[str, str], int] = field(default_factory=dict)
    rescale_seconds: Histogram = Histogram()
    rescale_phase_seconds: Mapping[str, float] = field(default_factory=dict)
    replayed_steps: int = 0
    worker_failures: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    failures_in_a_row: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[int, int] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    slot_seconds: Mapping[int, float] = field(default_factory=dict)
    slowness: Mapping[int, float] = field(default_factory=dict)
    slots: Mapping[int, int] = field(default_factory=dict)
    stragglers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    checkpoint_path: str | None = None
    checkpoint_bytes: int = 0
    checkpoint_failures: int = 0
    checkpoint_seconds: Histogram = Histogram()
    checkpoint_stall: float | None = None
    checkpoint_interval: float | None = None
    checkpoint_interval_text: str | None = None
    error: str | None = None
    info: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The snapshot as plain JSON values; pairs become ``direction/reason``, figures that are not finite become null."""
        tree = asdict(self)
        tree["rescales"] = {f"{direction}/{reason}": count for (direction, reason), count in self.rescales.items()}
        for name in ("step_seconds", "rescale_seconds", "checkpoint_seconds"):
            histogram: Histogram = getattr(self, name)
            tree[name] = {"count": histogram.count, "sum": histogram.sum}
        return _plain(tree)


class MetricsServer:
    """Serves the snapshot on ``host:port`` from a thread of its own until :meth:`close`.

    Args:
        port: 0 takes any free port; the real one is :attr:`port`.
        snapshot: called once per scrape, from the server's threads; must not block.
        control: called with ``("stop", {})`` or ``("rescale", {"workers": n})``, from the server's threads; its result is the
            answer. What it raises as ``ValueError`` is answered with 400 and its message, anything else with 500. None: no commands.
        token: what commands must bring.

    Raises:
        PortInUse: another process has the port.
        BadInput: the address can't be listened on.
    """

    def __init__(self, host: str, port: int, snapshot: Callable[[], RunSnapshot], control: Control | None, token: str) -> None:
        handler = type("Handler", (_Handler,), {"snapshot": staticmethod(snapshot), "token": token, "timeout": 10.0})
        handler.control = staticmethod(control) if control is not None else None  # type: ignore[attr-defined]
        server_type = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server: ThreadingHTTPServer = server_type((host, port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"metrics.port = {port}: in use on {host}; choose another, or 0 for any free port") from None
            raise BadInput(f"metrics.host = {host}, metrics.port = {port}: can't be listened on ({error.strerror or error})") from None
        self.host = host
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="vescale-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def url(self, host: str | None = None) -> str:
        """Base address; ``host`` replaces the one listened on, for servers on ``0.0.0.0``."""
        name = host or ("127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host)
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    def close(self) -> None:
        """Stop listening and free the port; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that holds its connection must not hold up the end of the run


class _Handler(BaseHTTPRequestHandler):
    snapshot: Callable[[], RunSnapshot]
    control: Control | None
    token: str
    server_version = "vescale-ray"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            try:
                body, content_type = exposition(self.snapshot(), self.headers.get("Accept", ""))
            except Exception as error:
                return self._json(500, {"error": f"no snapshot: {_one_line(error)}"})
            return self._send(200, body, content_type)
        if path == "/status":
            try:
                return self._json(200, self.snapshot().to_json())
            except Exception as error:
                return self._json(500, {"error": f"no snapshot: {_one_line(error)}"})
        return self._json(404, {"error": f"{path}: there are /metrics, /status, and POST /stop and /rescale"})

    def do_POST(self) -> None:
        action = self.path.partition("?")[0].removeprefix("/")
        if action not in ("stop", "rescale"):
            return self._json(404, {"error": f"/{action}: the commands are /stop and /rescale"})
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
            return self._json(401, {"error": "the token is missing or not this run's; it stands in control.json in the run's folder"})
        if self.control is None:
            return self._json(405, {"error": "this run takes no commands"})
        try:
            body = self._body(action)
            return self._json(200, _plain(type(self).control(action, body) or {}))  # type: ignore[misc]
        except ValueError as error:
            return self._json(400, {"error": _one_line(error)})
        except Exception as error:
            return self._json(500, {"error": f"{type(error).__name__}: {_one_line(error)}"})

    def _body(self, action: str) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MAX_BODY:
            raise ValueError(f"Content-Length = {length}: give at most {MAX_BODY} bytes of JSON")
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw) if raw.strip() else {}
        except ValueError:
            raise ValueError("the body is not JSON") from None
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        if action == "rescale":
            workers = body.get("workers")
            if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
                raise ValueError(f"workers = {workers!r}: give a whole number of at least 1")
        return body

    def _json(self, status: int, value: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(value).encode() + b"\n", "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client went away

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes come every few seconds: they are no news."""


class RankFamily(Metric):
    """A family with one sample for each rank, written fast: prometheus_client takes 25 ms for the five families of 1,024 ranks."""

    def __init__(self, name: str, text: str, kind: str, run: str, rows: Sequence[tuple[int, Mapping[str, str], float]]) -> None:
        super().__init__(name, text, kind)
        self._series = f"{name}_info" if kind == "info" else name
        self._run, self._rows = run, rows
        self.samples = _Samples(self._sample, rows)  # type: ignore[assignment]

    def _sample(self, row: tuple[int, Mapping[str, str], float]) -> Sample:
        rank, more, value = row
        return Sample(self._series, {"run": self._run, "rank": str(rank), **more}, value)

    def lines(self, openmetrics: bool) -> str:
        """The family as text."""
        about, kind = (self.name, self.type) if openmetrics or self.type != "info" else (self._series, "gauge")
        begin = f'{self._series}{{run="{_escaped(self._run)}",rank="'
        head = f"# HELP {about} {self.documentation}\n# TYPE {about} {kind}\n"
        if not any(more for _, more, _ in self._rows):
            return head + "".join([f'{begin}{rank}"}} {value!r}\n' for rank, _, value in self._rows])
        rest = ["".join([f',{key}="{_escaped(text)}"' for key, text in more.items()]) for _, more, _ in self._rows]
        return head + "".join([f'{begin}{row[0]}"{more}}} {row[2]!r}\n' for row, more in zip(self._rows, rest, strict=True)])


class _Samples(Sequence[Sample]):
    """Samples that are made when they are asked for."""

    def __init__(self, make: Callable[[Any], Sample], rows: Sequence[Any]) -> None:
        self._make, self._rows = make, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return [self._make(row) for row in self._rows[index]] if isinstance(index, slice) else self._make(self._rows[index])


class _Given:
    """What prometheus_client's encoders want of a registry."""

    def __init__(self, members: Sequence[Metric]) -> None:
        self._members = members

    def collect(self) -> Sequence[Metric]:
        return self._members


def exposition(snapshot: RunSnapshot, accept: str) -> tuple[bytes, str]:
    """The snapshot as Prometheus' text or OpenMetrics, whichever ``accept`` (of HTTP) asks for; and the content type."""
    encode, content_type = choose_encoder(accept)
    everything = list(families(snapshot))
    body: bytes = encode(_Given([family for family in everything if not isinstance(family, RankFamily)]))  # type: ignore[arg-type]
    openmetrics = "openmetrics" in content_type
    ranks = "".join([family.lines(openmetrics) for family in everything if isinstance(family, RankFamily)]).encode()
    if openmetrics:
        return body.removesuffix(b"# EOF\n") + ranks + b"# EOF\n", content_type
    return body + ranks, content_type


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") if not text.isalnum() else text


def families(s: RunSnapshot) -> Iterator[Metric]:
    """Every metric family that the snapshot has values for."""
    run = ["run"]
    labels = [s.run]

    def gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            family = GaugeMetricFamily(name, text, labels=run)
            family.add_metric(labels, float(value))
            yield family

    def counter(name: str, text: str, value: float) -> Iterator[Metric]:
        family = CounterMetricFamily(name, text, labels=run)
        family.add_metric(labels, float(value))
        yield family

    def counters(name: str, text: str, keys: Sequence[str], values: Mapping[Any, float]) -> Iterator[Metric]:
        family = CounterMetricFamily(name, text, labels=[*run, *keys])
        for key, value in sorted(values.items()):
            family.add_metric([*labels, *key], float(value))
        yield family

    def by_rank(name: str, text: str, values: Mapping[int, float]) -> Iterator[Metric]:
        yield RankFamily(name, text, "gauge", s.run, [(rank, {}, float(value)) for rank, value in sorted(values.items())])

    def histogram(name: str, text: str, value: Histogram, **extra: str) -> Iterator[Metric]:
        family = HistogramMetricFamily(name, text, labels=[*run, *extra])
        family.add_metric([*labels, *extra.values()], buckets=value.buckets(), sum_value=value.sum)
        yield family

    info = InfoMetricFamily("vescale_run", "What the run is.", labels=run)
    info.add_metric(labels, {key: str(value) for key, value in s.info.items()})
    yield info
    # Not a StateSet family: its label would have to be called vescale_run_state, which reads badly in every query.
    state = GaugeMetricFamily("vescale_run_state", "1 for the state that the run is in.", labels=[*run, "state"])
    for one in dict.fromkeys((*STATES, s.state)):
        state.add_metric([*labels, one], float(one == s.state))
    yield state

    yield from gauge("vescale_step", "Completed optimizer steps; falls when steps are replayed.", s.step)
    yield from gauge("vescale_step_target", "Optimizer steps of the whole run.", s.steps)
    yield from counter("vescale_steps", "Optimizer steps executed, replayed ones included.", s.steps_executed)
    yield from counter("vescale_tokens", "Tokens trained on, replayed ones included.", s.tokens)
    yield from gauge("vescale_tokens_per_second", "Tokens per second in the last step, all workers together.", s.tokens_per_second)
    yield from gauge("vescale_last_step_timestamp_seconds", "When the last step was completed.", s.last_step_time)
    yield from histogram("vescale_step_duration_seconds", "Wall time of one optimizer step.", s.step_seconds)
    yield from gauge("vescale_loss", "Training loss of the last step, nats per token.", s.loss)
    yield from gauge("vescale_loss_bpb", "Training loss of the last step, bits per byte.", s.bpb)
    yield from gauge("vescale_grad_norm", "Norm of the gradient of the last step, before clipping.", s.grad_norm)
    yield from gauge("vescale_learning_rate", "Learning rate of the last step.", s.learning_rate)

    yield from gauge("vescale_world_size", "Workers that train now.", s.world)
    yield from gauge("vescale_world_size_target", "Workers that are wanted.", s.world_target)
    yield from gauge("vescale_world_size_min", "Fewest workers that still train.", s.world_min)
    yield from gauge("vescale_world_size_max", "Most workers.", s.world_max)
    yield from gauge("vescale_spares", "Warm workers beside those that train.", s.spares)
    yield from gauge("vescale_spares_target", "Spares that are wanted.", s.spares_target)
    yield from gauge("vescale_places_wanted", "Places for workers that Ray's autoscaler is shown as wanted.", s.places_wanted)
    yield from gauge("vescale_generation", "Number of the set of workers; goes up at every rescale.", s.generation)
    yield from counters("vescale_rescales", "Rescales that were completed.", ("direction", "reason"), s.rescales)
    yield from histogram("vescale_rescale_duration_seconds", "Time without training, from the event to the next step.", s.rescale_seconds)
    phases = {(phase,): seconds for phase, seconds in s.rescale_phase_seconds.items()}
    yield from counters("vescale_rescale_phase_seconds", "Seconds that rescales spent in each phase.", ("phase",), phases)
    yield from counter("vescale_replayed_steps", "Steps that were executed again after a rollback.", s.replayed_steps)
    failures = {(reason,): count for reason, count in s.worker_failures.items()}
    yield from counters("vescale_worker_failures", "Workers that were lost.", ("reason",), failures)

    causes = {(cause,): count for cause, count in s.failures.items()}
    yield from counters("vescale_failures", "Recoveries, and restarts of the controller, by cause.", ("cause",), causes)
    row = GaugeMetricFamily("vescale_failures_in_a_row", "Recoveries since the last new step.", labels=[*run, "kind"])
    for kind, count in sorted(s.failures_in_a_row.items()):
        row.add_metric([*labels, kind], float(count))
    yield row

    yield from counter("vescale_goodput_seconds", "Seconds spent in steps that count.", s.productive_seconds)
    lost = {(cause,): seconds for cause, seconds in s.lost_seconds.items()}
    yield from counters("vescale_badput_seconds", "All other seconds since the run began, by what they were lost to.", ("cause",), lost)

    yield from by_rank("vescale_worker_host_rss_bytes", "Resident memory of the worker's process.", s.memory)
    yield from by_rank("vescale_worker_slot_seconds", "The rank's own time for a slot in the last step, without waiting.", s.slot_seconds)
    yield from by_rank("vescale_worker_slowness_ratio", "The rank's own time for a slot, relative to the usual rank's.", s.slowness)
    yield from by_rank("vescale_worker_slots", "Slots of the global batch that the rank does.", s.slots)
    yield from gauge("vescale_stragglers", "Workers that have been slower than the others for long.", len(s.stragglers))
    who = [(rank, {key: str(value) for key, value in about.items()}, 1.0) for rank, about in sorted(s.workers.items())]
    yield RankFamily("vescale_worker", "Which worker holds the rank, and on which node.", "info", s.run, who)

    yield from gauge("vescale_checkpoint_last_step", "Step of the newest committed checkpoint.", s.checkpoint_step)
    yield from gauge("vescale_checkpoint_last_success_timestamp_seconds", "When the newest checkpoint was committed.", s.checkpoint_time)
    yield from counters("vescale_checkpoint_bytes", "Bytes of committed checkpoints.", ("op",), {("save",): s.checkpoint_bytes})
    yield from counters("vescale_checkpoint_failures", "Checkpoints that failed.", ("op",), {("save",): s.checkpoint_failures})
    yield from histogram("vescale_checkpoint_duration_seconds", "Time to write and commit a checkpoint.", s.checkpoint_seconds, op="save")
    yield from gauge("vescale_checkpoint_stall_seconds", "How long training waited for the newest checkpoint's copy.", s.checkpoint_stall)
    yield from gauge("vescale_checkpoint_interval_seconds", "Time between checkpoints that was chosen.", s.checkpoint_interval)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
