"""Flower's two apps, made of a site and of a server's main function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mixfed.backends.flower.post import from_record, to_record
from mixfed.backends.site import Site

Config = Mapping[str, Any]
"""What ``--node-config`` said to a node, or ``--run-config`` to a run."""


def client_app(make: Callable[[Config, Config], Site]) -> ClientApp:
    """The app of a node. ``make(node_config, run_config)`` makes its site, once in a process for every run."""
    app = ClientApp()
    made: dict[int, Site] = {}

    def answer(message: Message, context: Context) -> Message:
        if context.run_id not in made:
            made.clear()
            made[context.run_id] = make(dict(context.node_config), dict(context.run_config))
        return Message(to_record(made[context.run_id].answer(from_record(message.content))), reply_to=message)

    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def server_app(main: Callable[[Grid, Config], None]) -> ServerApp:
    """The app of the server: ``main(grid, run_config)`` has the loop."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, dict(context.run_config))

    return app
