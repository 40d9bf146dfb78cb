"""Flower as the post of a federation (extra ``mixfed[flower]``). Only this package imports flwr.

Flower carries bytes, keeps sites apart, encrypts and authenticates. The loop, the policy and the algorithm are those of
the simulator: nothing of Flower's strategies is used.
"""

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mixfed.backends.flower.apps import client_app, server_app
from mixfed.backends.flower.post import FlowerBackend

__all__ = ["ClientApp", "FlowerBackend", "Grid", "ServerApp", "client_app", "server_app"]
