"""A site in one process that stays warm: Flower's SuperNode, which runs its app itself.

``python -m mixfed.backends.flower.worker`` takes the options of ``flower-supernode``. A plain SuperNode starts a
process for every message and speaks to it over HTTP. It sleeps for half a second while it waits for an answer, and for
three seconds when there was no message. Here the loop is Flower's own, but its ``time`` is a :class:`Worker`: where the
loop would sleep, the app is run.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.servicer.runtime import runtime_handlers as common_handlers
from flwr.supernode import start_client_internal as node
from flwr.supernode.cli.flower_supernode import _parse_supernode_lifespan_config
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message
from flwr.supernode.servicer.runtime import runtime_handlers as handlers

from mixfed.backends.flower.tasks import finish, heartbeat

SHORTEST = 0.05
"""Seconds after which an idle site looks for a message at the earliest."""


class Here:
    """The Runtime API of the node in this process for one task: its handlers, without HTTP in between."""

    _CALLS: ClassVar[dict[str, Callable[..., Any]]] = {
        "PullTaskInput": handlers.pull_task_input,
        "PullMessages": handlers.pull_messages,
        "PullObject": handlers.pull_object,
        "ConfirmMessageReceived": handlers.confirm_message_received,
        "PushMessages": handlers.push_messages,
        "PushObject": handlers.push_object,
        "PushTaskOutput": handlers.push_task_output,
        "SendTaskHeartbeat": common_handlers.send_task_heartbeat,
    }

    def __init__(self, state: NodeState, task: Task) -> None:
        self._state, self._task = state, task

    def __getattr__(self, name: str) -> Any:
        return partial(self._CALLS[name], state=self._state, task=self._task)


class Worker:
    """Runs the ClientApp of a SuperNode, task after task, and keeps what it has loaded.

    It stands in for ``time`` in the node's loop. A node that has been idle for t seconds looks for a message again
    after t/10, so that waiting makes nothing longer by more than a tenth, and never later than Flower would.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._apps: dict[str, ClientApp] = {}
        self._busy = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Does the work that there is; without any it sleeps, at most for so many seconds."""
        asked = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        found = handlers.acquire_task(asked, self._state)
        if found.token:
            self._run(found.task)
            self._busy = time.monotonic()
        else:
            time.sleep(min(seconds, max(SHORTEST, (time.monotonic() - self._busy) / 10)))

    def _run(self, task: Task) -> None:
        client: Any = Here(self._state, task)
        try:
            with heartbeat(client, stops=False):
                message, context, run, fab = pull_task_input(client)
                status, details = SubStatus.COMPLETED, ""
                try:
                    if fab.hash_str not in self._apps:
                        self._apps = {fab.hash_str: load(fab.content, run.fab_id, run.fab_version, fab.hash_str)}
                    reply = self._apps[fab.hash_str](message=message, context=context)
                except Exception as error:
                    traceback.print_exc()
                    status, details = SubStatus.FAILED, f"{type(error).__name__}: {error}"
                    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                    reply = Message(Error(code=code, reason=details), reply_to=message)
                push_message(client, reply, context)
                finish(client, status, details)
        except FlowerError:  # the run has ended, and its task with it
            traceback.print_exc()


def load(content: bytes, name: str, version: str, mark: str) -> ClientApp:
    """The app in a bundle of Flower's. Those before it are forgotten: their modules have the same names."""
    apps = install_from_fab(content, skip_prompt=True).parent
    sys.path[:] = [folder for folder in sys.path if Path(folder).parent != apps]
    for module, loaded in [*sys.modules.items()]:
        if Path(getattr(loaded, "__file__", None) or "/").is_relative_to(apps):
            del sys.modules[module]
    return get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)(name, version, mark)


def main(arguments: list[str]) -> None:
    """Becomes a SuperNode with these options."""
    sys.argv = ["flower-supernode", "--isolation", "process", *arguments]
    options = vars(_parse_supernode_lifespan_config())
    factory = NodeStateFactory(ObjectStoreFactory())
    vars(node)["time"] = Worker(factory.state())
    taken = signature(node.start_client_internal).parameters
    node.start_client_internal(state_factory=factory, **{n: x for n, x in options.items() if n in taken})


if __name__ == "__main__":
    main(sys.argv[1:])
