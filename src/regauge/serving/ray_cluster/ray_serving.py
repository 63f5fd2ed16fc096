"""Serves models on a Ray cluster: deploys replicas with Ray Serve, and deletes them at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from regauge.config import build, dump
from regauge.serving.api_keys import ApiKeys
from regauge.serving.ray_cluster.ray_settings import RayServing
from regauge.serving.routes.health import find_status
from regauge.serving.runtime import TOKENIZER_THREADS, ServingRuntime
from regauge.serving.settings import Serve
from regauge.system import choices, log, stop_signals
from regauge.system.errors import (
    DataError,
    PreflightError,
    SettingsError,
    TransientError,
    first_line,
)
from regauge.system.log import logger
from regauge.system.processes import find_free_port
from regauge.system.timing import POLL_SECONDS, REMOTE_POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send


INSTALL_COMMAND = "pip install 'regauge[serve,ray]'"
START_ATTEMPTS = 2
"""Failed replica starts until the deployment fails."""
STOP_SECONDS = 15.0
"""Time for a drained replica to end the worker processes; Ray then kills it."""
STORE_BYTES = 256 << 20
"""Shared memory of a Ray started by the command; it holds large request bodies."""
PROBE_SECONDS = 10.0
"""Time limit for connecting to a cluster's head node."""
WATCH_SECONDS = 2.0
"""Polling interval for the application's state."""
ROUTER = "regauge.serving.ray_cluster.ray_router.BalancedRouter"
"""Class that selects a replica for a request."""
PROBLEM = re.compile(r"^regauge(?:\.\w+)+: (.+)$", re.MULTILINE)
"""A replica's error in a Ray Serve message."""
LAST_LINE = re.compile(r"^\w[\w.]*(?:Error|Exception): .+$", re.MULTILINE)


def run_on_ray(settings: Serve, options: RayServing) -> dict[str, Any]:
    """Deploy replicas, serve until a stop signal, and delete them; return the final state.

    Raises PreflightError if Ray Serve is not installed, TransientError if the cluster cannot be
    reached, SettingsError if the name or the route is taken, and DataError if a replica fails.
    """
    ray = _import_ray()
    serve = ray.serve
    keys = ApiKeys.read(settings.http.api_keys_file)
    keys.warn_if_open(settings.host)
    digests = keys.digests
    with (
        stop_signals.record_signals(),
        stop_signals.defer_stop(has_limit=False),
        _connect(ray, options),
        _start_serve(serve, settings, options) as address,
    ):
        start = time.monotonic()
        _check_names(serve.status(), options)
        try:
            if _deploy(serve, settings, options, digests):
                _log_ready(settings, options, address, time.monotonic() - start)
                _wait_until_stopped(serve, options, keys)
            logger.info("Draining: accepted requests are completed")
        finally:
            _delete(serve, options.name)
    return {"application": options.name, "state": "stopped"}


def _import_ray() -> Any:
    """Return the module `ray` with `ray.serve`; raises PreflightError if it is not installed."""
    try:
        import ray
        import ray.exceptions
        import ray.serve
        import ray.serve.config
        import ray.serve.exceptions
    except ImportError as error:
        problem = f"serve.workers.ray needs Ray Serve: {first_line(error)}"
        raise PreflightError(problem, f"install it: {INSTALL_COMMAND}") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray


@contextmanager
def _connect(ray: Any, options: RayServing) -> Iterator[None]:
    """Connect to the cluster, or start a Ray on this machine, until the block ends.

    Raises TransientError if the cluster cannot be reached, and SettingsError if this machine has
    too few CPUs.
    """
    is_local = options.address is None
    local_options = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _probe(options.address)
        ray.init(
            address="local" if is_local else options.address,
            log_to_driver=False,
            logging_level="warning",
            **(local_options if is_local else {}),
        )
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"the Ray cluster at '{options.address}' cannot be reached: {first_line(error)}"
        remedy = "start it with `ray start --head`, or correct serve.workers.ray.address"
        raise TransientError(problem, remedy) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
    try:
        _check_resources(ray.cluster_resources(), options)
        yield
    finally:
        ray.shutdown()


def _probe(address: str | None) -> None:
    """Raise OSError if nothing listens at an address, which Ray would try for minutes."""
    text = address or ""
    parts = urlsplit(text if "://" in text else f"//{text}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), PROBE_SECONDS).close()


def _check_resources(resources: dict[str, float], options: RayServing) -> None:
    """Warn if the cluster is too small for all replicas; raise SettingsError if it cannot grow."""
    demand = {"CPU": options.cpus, "GPU": options.gpus, **options.resources}
    for name, amount in demand.items():
        total, available = amount * options.replicas, resources.get(name, 0.0)
        if total <= available:
            continue
        problem = f"{options.replicas} replicas need {total:g} {name}, and Ray has {available:g}"
        if options.address is None:
            raise SettingsError(problem, "lower the table serve.workers.ray")
        logger.warning("%s; waiting for more machines", problem)


@contextmanager
def _start_serve(serve: Any, settings: Serve, options: RayServing) -> Iterator[str]:
    """Start Ray Serve until the block ends, unless it is running; return its address.

    The address is empty if it was running, because host and port then stay the same.
    """
    is_running = bool(serve.status().proxies)
    address = ""
    if is_running:
        logger.info("Ray Serve is already running; serve.host and serve.port have no effect")
    else:
        port = settings.port or find_free_port()
        keep_alive = settings.http.keep_alive_seconds
        http = {"host": settings.host, "port": port, "keep_alive_timeout_s": keep_alive}
        serve.start(proxy_location="EveryNode", http_options=http)
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{shown}:{port}{options.route_prefix.rstrip('/')}"
    try:
        yield address
    finally:
        if not is_running and options.address is not None:
            _stop_serve(serve)


def _stop_serve(serve: Any) -> None:
    """Stop Ray Serve, unless it has applications of other programs."""
    from ray.exceptions import RayError

    try:
        if not serve.status().applications:
            serve.shutdown()
    except (RayError, serve.exceptions.RayServeException) as error:
        logger.warning("Ray Serve was not stopped: %s", first_line(error))


def _check_names(status: Any, options: RayServing) -> None:
    """Raise SettingsError if the application exists, as Ray would replace it."""
    if options.name in status.applications:
        problem = f"an application called '{options.name}' is already running on the cluster"
        remedy = f"set serve.workers.ray.name, or run: serve delete {options.name}"
        raise SettingsError(problem, remedy)


def _deploy(serve: Any, settings: Serve, options: RayServing, digests: tuple[bytes, ...]) -> bool:
    """Deploy and wait until all replicas run; return False if a stop signal arrives first.

    Raises SettingsError if the route is taken, and DataError if a replica fails to start.
    """
    application = build_application(serve, settings, options, digests)
    with ThreadPoolExecutor(1, "deploy") as executor:
        future: Future[Any] = executor.submit(
            serve.run, application, name=options.name, route_prefix=options.route_prefix
        )
        while not wait([future], POLL_SECONDS).done:
            if stop_signals.find_signal() is not None:
                _delete(serve, options.name)
                future.exception()  # the application is gone
                return False
    if (error := future.exception()) is not None:
        raise _convert_error(_describe_failure(serve, error, options), options)
    return True


def _describe_failure(serve: Any, error: BaseException, options: RayServing) -> str:
    application = serve.status().applications.get(options.name)
    replicas = application.deployments.values() if application else ()
    return "\n".join([str(error), *(replica.message for replica in replicas)])


def build_application(
    serve: Any, settings: Serve, options: RayServing, digests: tuple[bytes, ...]
) -> Any:
    """Build the application for `serve.run`, with a deployment of the replicas.

    A replica's scheduler admits requests, so Ray limits only their number.
    """
    variables = choices.module_folders_environment()
    actor: dict[str, Any] = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    actor["resources"] = options.resources
    actor["runtime_env"] = {"env_vars": variables} if variables else {}
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        limits = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        target = {"target_ongoing_requests": options.target_requests}
        count = {"autoscaling_config": {**limits, **target}}
    if options.replicas_per_machine is not None:
        count["max_replicas_per_node"] = options.replicas_per_machine
    router = serve.config.RequestRouterConfig(request_router_class=ROUTER)
    deployment = serve.deployment(
        serve.ingress()(ModelReplica),
        name="replica",
        ray_actor_options=actor,
        request_router_config=router,
        max_ongoing_requests=settings.http.max_connections,
        graceful_shutdown_wait_loop_s=REMOTE_POLL_SECONDS,
        graceful_shutdown_timeout_s=settings.http.drain_seconds + STOP_SECONDS,
        max_constructor_retry_count=START_ATTEMPTS,
        **count,
    )
    return deployment.bind(dump(_resolve_paths(settings)), digests)


def _resolve_paths(settings: Serve) -> Serve:
    """Make the settings independent of the working folder, and drop the API key file."""
    artifacts = {name: _resolve(folder) for name, folder in settings.artifacts.items()}
    search = settings.search
    if search is not None:
        index = None if search.index_folder is None else _resolve(search.index_folder)
        changes = {"vectors": _resolve(search.vectors), "index_folder": index}
        search = search.model_copy(update=changes)
    http = settings.http.model_copy(update={"api_keys_file": None})
    return settings.model_copy(update={"artifacts": artifacts, "search": search, "http": http})


def _resolve(folder: str) -> str:
    """Return a folder's address for processes with another working folder."""
    return folder if "://" in folder else os.fspath(Path(folder).expanduser().resolve())


def _convert_error(text: str, options: RayServing) -> Exception:
    """Return a deployment error with the message line that describes the cause."""
    if "is being used by application" in text:
        problem = f"the route '{options.route_prefix}' is used by another application"
        return SettingsError(problem, "set serve.workers.ray.route_prefix")
    if matches := PROBLEM.findall(text):
        problem, _, remedy = matches[-1].rpartition("; ")
        return DataError(f"a replica failed to start: {problem}", remedy)
    lines = LAST_LINE.findall(text) or [first_line(text)]
    problem = f"the deployment on Ray failed: {lines[-1]}"
    return TransientError(problem, "see the logs of Ray Serve in /tmp/ray/session_latest/logs")


def _log_ready(settings: Serve, options: RayServing, address: str, seconds: float) -> None:
    names = ", ".join(settings.artifacts)
    shown = address or f"the path {options.route_prefix} of Ray Serve"
    logger.info("Serving %s at %s (ready after %.1f s)", names, shown, seconds)


def _wait_until_stopped(serve: Any, options: RayServing, keys: ApiKeys) -> None:
    """Log state changes, and warn of changed API keys, until a stop signal arrives.

    Raises TransientError if the application was deleted or the cluster was lost.
    """
    state, checked_at = "RUNNING", time.monotonic()
    while stop_signals.find_signal() is None:
        time.sleep(POLL_SECONDS)
        if time.monotonic() < checked_at + WATCH_SECONDS:
            continue
        previous, state, checked_at = state, _read_state(serve, options), time.monotonic()
        if state != previous:
            logger.info("The application on Ray is %s", state.lower())
        if keys.has_changed():
            logger.warning("The replicas keep the earlier API keys; start the command again")


def _read_state(serve: Any, options: RayServing) -> str:
    """Return the application's state; raises TransientError if it does not exist."""
    from ray.exceptions import RayError

    try:
        application = serve.status().applications.get(options.name)
    except (RayError, serve.exceptions.RayServeException) as error:
        problem = f"the Ray cluster was lost: {first_line(error)}"
        raise TransientError(problem, "start the cluster and the command again") from None
    if application is None:
        problem = f"the application '{options.name}' was deleted by another program"
        raise TransientError(problem, "run the command again to deploy it")
    return str(application.status.value)


def _delete(serve: Any, name: str) -> None:
    """Delete the application, and wait until the replicas have answered all requests."""
    from ray.exceptions import RayError

    try:
        if name not in serve.status().applications:
            return
        serve.delete(name, _blocking=False)
        while name in serve.status().applications:
            time.sleep(POLL_SECONDS)
    except (RayError, serve.exceptions.RayServeException) as error:
        logger.warning("the application '%s' was not deleted: %s", name, first_line(error))


REPLICA_HEADER = b"regauge-replica"
"""Answer header with the replica identifier."""


class ModelReplica:
    """Loads the models when Ray starts it, and stops them when Ray has drained it.

    Ray Serve calls the methods. Requests reach only the application.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, tables: dict[str, Any], digests: Sequence[bytes]
    ) -> None:
        """Load the models; the first error ends the deployment.

        `tables` is the table `serve`, and `digests` holds the API key hashes.
        """
        log.configure()
        settings = build(Serve, tables)
        self._executor = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
        self._runtime = ServingRuntime(settings, ApiKeys.from_digests(digests), self._executor)
        try:
            await self._runtime.start()
        except BaseException:
            await self._runtime.stop()
            raise
        self._watch = asyncio.create_task(self._runtime.watch())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; answers name this replica."""
        from ray.serve import get_replica_context

        name = get_replica_context().replica_id.unique_id
        return name_replica(self._runtime.app, name)

    async def check_health(self) -> None:
        """Raise an error if requests cannot be answered; Ray then replaces this replica."""
        if self._watch.done():
            self._watch.result()
        state, status = find_status(self._runtime.context)
        if status != 200:  # noqa: PLR2004 - the status of HTTP
            raise TransientError(f"the replica is not ready: {state}", "see the logs of Ray")

    async def __del__(self) -> None:
        """Stop the models; Ray calls it when all requests are answered."""
        self._runtime.drain()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await self._runtime.stop()
        self._executor.shutdown()


def name_replica(app: ASGIApp, name: str) -> ASGIApp:
    """Wrap an application so that answers have the header `Regauge-Replica`."""

    async def run_named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_message(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (REPLICA_HEADER, name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_message)

    return run_named
