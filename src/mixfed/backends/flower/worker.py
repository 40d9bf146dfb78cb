"""A site in one process that stays warm: a SuperNode, and beside it, in a thread, what runs its app.

``python -m mixfed.backends.flower.worker`` takes the options of ``flower-supernode``.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from itertools import pairwise

import httpx
from flwr.app import Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from mixfed.backends.flower.apps import stays_warm
from mixfed.backends.flower.tasks import connect, finish, heartbeat, tokens


class Worker:
    """Runs the ClientApp of one SuperNode, task after task, and keeps what it has loaded."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._apps: dict[str, ClientApp] = {}

    def work(self) -> None:
        """Runs tasks for as long as the process lives; an error that is not the app's ends the process."""
        try:
            for token in tokens(self.address, TaskType.CLIENT_APP):
                try:
                    self._run(token)
                except httpx.HTTPError:  # the run has ended, and its task with it
                    traceback.print_exc()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _run(self, token: str) -> None:
        client = connect(self.address, token, "flwr-clientapp")
        try:
            with heartbeat(client, stops=False):
                message, context, run, fab = pull_task_input(client)
                status, details = SubStatus.COMPLETED, ""
                try:
                    if fab.hash_str not in self._apps:
                        install_from_fab(fab.content, skip_prompt=True)
                        load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
                        self._apps = {fab.hash_str: load(run.fab_id, run.fab_version, fab.hash_str)}
                    reply = self._apps[fab.hash_str](message=message, context=context)
                except Exception as error:
                    traceback.print_exc()
                    status, details = SubStatus.FAILED, f"{type(error).__name__}: {error}"
                    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                    reply = Message(Error(code=code, reason=details), reply_to=message)
                push_message(client, reply, context)
                finish(client, status, details)
        finally:
            client.close()


def main(arguments: list[str]) -> None:
    """Starts the worker, and becomes a SuperNode with these options."""
    given = dict(pairwise(arguments))
    address = f"{given.get('--host', '127.0.0.1')}:{given.get('--port', '9094')}"
    stays_warm()
    threading.Thread(target=Worker(address).work, daemon=True).start()
    sys.argv = ["flower-supernode", "--isolation", "process", *arguments]
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
