"""The app that ``mixfed flower init`` writes, as a user starts it: ``flwr run`` with the server inside the SuperLink,
and sites by ``mixfed flower site``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mixfed.backends.flower.local import LocalFederation, free_port, script
from mixfed.backends.parcels import Parcel, marks
from mixfed.experiments.app import write_app
from mixfed.experiments.federation import experiment_of, read_recipe, site_of
from mixfed.experiments.request import Request
from tests.algorithms.test_table import assert_equal
from tests.cli.tools import here, mixfed
from tests.warm import ROOT

pytestmark = pytest.mark.xdist_group("federation")

SMALL = ["--set", "data.partition.clients=6", "--set", "cohort=6", "--set", "evaluate.every=1"]
SMALL += ["--set", "simulator.executor=loop", "--set", "checkpoint.every=1"]


def wait_for(condition: Callable[[], bool], folder: Path, seconds: float = 150.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        logs = {log.name: log.read_text()[-2000:] for log in folder.glob("*.log")}
        assert time.monotonic() < until, logs
        time.sleep(0.1)


def test_flwr_run_with_the_server_in_the_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm site and a plain SuperNode. The run ends with the simulator's model, also when it goes on later with more
    rounds."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    app, out = tmp_path / "app", tmp_path / "out"
    here("flower", "init", app, "--recipe", "digits", "--algorithm", "parallel", "--rounds", "1", *SMALL)
    federation = LocalFederation(tmp_path / "federation", [])
    federation.folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    (federation.folder / "config.toml").write_text(f'[superlink.mine]\naddress = "{address}"\ninsecure = true\n')
    host, port = address.split(":")
    link = [script("flower-superlink"), "--insecure", "--host", host, "--port", port]
    node = ["--insecure", "--superlink", address, "--node-config"]
    warm = [sys.executable, "-m", "mixfed", "flower", "site", *node, f'clients="0-2" folder="{tmp_path / "kept"}"']
    plain = [script("flower-supernode"), *node, f'clients="3-5" folder="{tmp_path / "kept"}"']

    def run(config: str) -> None:
        words = [script("flwr"), "run", str(app), "mine", "--run-config", f'out="{out}" {config}']
        subprocess.run(words, check=True, env=dict(federation.environment()), capture_output=True)

    try:
        federation.start("superlink", [*link, "--disable-runtime-dependency-installation"])
        wait_for(lambda: "startup complete" in (federation.folder / "superlink.log").read_text(), federation.folder)
        federation.start("warm", warm)
        federation.start("plain", [*plain, "--host", host, "--port", str(free_port())])
        run("")
        wait_for((out / "federation.json").exists, federation.folder)
        first = json.loads((out / "result.json").read_text())
        (out / "federation.json").unlink()
        run('resume=true set="rounds=2"')
        wait_for((out / "federation.json").exists, federation.folder)
    finally:
        federation.stop()
    assert first["rounds"] == 1
    here("run", "digits", "--algorithm", "parallel", "--rounds", "2", *SMALL, "--out", tmp_path / "simulated")
    assert_equal(*(load_file(folder / "model.safetensors") for folder in (out, tmp_path / "simulated")))


NETWORK = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(64, 10)\n"


def test_another_version_of_the_users_own_code_is_refused(tmp_path: Path) -> None:
    """The network is in a file of the user's own beside the recipe, and the app has a copy."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "net.py").write_text(NETWORK)
    (home / "mine.toml").write_text('base = "digits"\n[model]\nname = "net.py:Net"\n')
    request = Request(str(home / "mine.toml"), backend="flower")
    recipe = request.on(request.base())
    write_app(tmp_path / "app", recipe)
    greeting = Parcel(marks(experiment_of(recipe)) | {"kind": "hello"})
    node = {"clients": "0", "folder": str(tmp_path / "kept")}

    def answer() -> dict[str, object]:
        return site_of(read_recipe(tmp_path / "app/federation/recipe.toml"), node).answer(greeting).header

    assert answer()["clients"] == {"clients": [0]}
    (tmp_path / "app/federation/net.py").write_text(NETWORK + "\n# another version\n")
    assert "code of your own that these name; start both from the same files." in str(answer()["refused"])


def test_a_site_with_wrong_options_says_so() -> None:
    assert "unrecognized arguments: --nonsense" in mixfed("flower", "site", "--nonsense", expect=2).stderr
