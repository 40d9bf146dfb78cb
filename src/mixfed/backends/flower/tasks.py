"""Tasks of Flower in a process that lives on: what ``flower-superexec`` does, without a new process for every message.

Flower's isolation mode ``process`` leaves it to others to run the apps of a SuperLink or a SuperNode. Whoever does asks
their Runtime API for a task, and gets a token with which the task's input is pulled and its output pushed. Flower's own
SuperExec starts Python (and PyTorch) anew for each task, which takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

POLL = 0.1
"""Seconds after which a task is asked for again."""


def connect(
    address: str, token: str = "", name: str = "SuperExec", authority: bytes | None = None
) -> RuntimeHttpClient:
    """A client of a Runtime API, for a task if a token is given; encrypted if there is an ``authority`` to trust."""
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name=name)]
    if token:
        interceptors.append(RuntimeTokenHttpInterceptor(token))
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=authority is None,
        root_certificates=authority,
        interceptors=interceptors,
        retry_invoker=make_simple_http_retry_invoker(),
    )


def tokens(
    address: str,
    kind: TaskType,
    *,
    stopped: Callable[[], bool] = lambda: False,
    authority: bytes | None = None,
) -> Iterator[str]:
    """The tokens of tasks of this kind, as they come, until somebody has ``stopped`` this."""
    client = connect(address, authority=authority)
    try:
        while not stopped():
            try:
                token = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token
            except httpx.HTTPError:
                token = ""  # not up yet, or on its way down
            if token:
                yield str(token)
            else:
                time.sleep(POLL)
    finally:
        client.close()


@contextmanager
def heartbeat(client: RuntimeHttpClient, *, stops: bool) -> Iterator[None]:
    """Tells Flower that the task is alive, from another thread.

    If Flower has given the task up, a process that is there for this task alone ``stops``: it is sent SIGINT.
    """

    def only_tell() -> bool:
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    sender = HeartbeatSender(make_task_heartbeat_fn_http(client) if stops else only_tell)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def finish(client: RuntimeHttpClient, status: str, details: str) -> None:
    """Tells Flower how a task has ended."""
    client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))


def pull_input(client: RuntimeHttpClient) -> Any:
    """The context, the run and the app of a task."""
    return client.PullTaskInput(PullTaskInputRequest())
