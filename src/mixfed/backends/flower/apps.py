"""Flower's two apps, made of a site and of a server's main function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mixfed.backends.flower.post import from_record, to_record
from mixfed.backends.parcels import Parcel
from mixfed.backends.site import Site
from mixfed.errors import InputError, RunStopped

Config = Mapping[str, Any]
"""What ``--node-config`` said to a node, or ``--run-config`` to a run."""


def client_app(make: Callable[[Config, Config], Site]) -> ClientApp:
    """The app of a node. ``make(node_config, run_config)`` makes its site, once in a process for every run.

    A site that cannot be made (its data are missing, say) tells the server why.
    """
    app = ClientApp()
    made: dict[int, Site] = {}

    def answer(message: Message, context: Context) -> Message:
        try:
            if context.run_id not in made:
                made.clear()
                made[context.run_id] = make(dict(context.node_config), dict(context.run_config))
            found = made[context.run_id].answer(from_record(message.content))
        except InputError as error:
            print(error, flush=True)
            found = Parcel({"refused": str(error)})
        return Message(to_record(found), reply_to=message)

    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def server_app(main: Callable[[Grid, Config], None]) -> ServerApp:
    """The app of the server: ``main(grid, run_config)`` has the loop."""
    app = ServerApp()
    logging.getLogger("flwr").addFilter(_only_the_sentence)

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, dict(context.run_config))

    return app


def _only_the_sentence(record: logging.LogRecord) -> bool:
    """Flower logs what ended an app with a traceback; where the user made a mistake, the sentence says enough."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, InputError | RunStopped):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True
