"""TLS and authentication, with the commands of docs/deploy.md; and the command that does all of it on one machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import mixfed as mf
from mixfed.backends.federation import Terms
from mixfed.backends.flower import FlowerBackend
from mixfed.backends.flower.local import Keys, LocalFederation
from tests.algorithms.test_table import FEDERATED, ROWS, assert_equal
from tests.cli.tools import lines, mixfed, refused, start, wait_for
from tests.flower.many import experiment_of, write_app
from tests.warm import ROOT

pytestmark = pytest.mark.xdist_group("secured")

SMALL = [
    "--set",
    "simulator.executor=loop",
    "--set",
    "data.partition.clients=6",
    "--set",
    "cohort=4",
    "--set",
    "evaluate.every=1",
    "--clients",
    "2",
]


def test_only_registered_sites_are_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sites one is registered: the run is encrypted, and only that site's clients train."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    link, site = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/deploy.md").read_text(), re.DOTALL)
    subprocess.run(link, shell=True, cwd=tmp_path, check=True, capture_output=True)
    for name in ("known", "unknown"):
        subprocess.run(site.replace("-f site", f"-f {name}"), shell=True, cwd=tmp_path, check=True)
    files = (tmp_path / name for name in ("ca.crt", "server.crt", "server.key"))
    keys = Keys(*files, [tmp_path / "known", tmp_path / "unknown"])
    nodes = [f'first={i} folder="{tmp_path / str(i)}"' for i in range(2)]
    federation = LocalFederation(tmp_path / "federation", nodes, keys)
    with federation:
        federation.register(0)
        federation.start_site(0)
        federation.start_site(1)
        with federation.grid(write_app(tmp_path / "app")) as grid:
            until = time.monotonic() + 60
            while not list(grid.get_node_ids()):
                assert time.monotonic() < until
                time.sleep(0.2)
            backend = FlowerBackend(grid, experiment_of("fedavg"), Terms(deadline=20.0, assemble=12.0))
            result = mf.run(ROWS["fedavg"].make(), FEDERATED, rounds=1, cohort=12, backend=backend)
    assert result.rounds == 1
    assert backend.traffic.jobs == 3
    assert "SuperNode ID" not in (federation.folder / "site-1.log").read_text()


def test_one_command_runs_stops_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-C after the first round leaves no process behind, and the run goes on to the simulator's model."""
    command = ["digits", "--algorithm", "parallel", "--rounds", "3", "--out"]
    process = start("flower", "local", *command, tmp_path / "there", *SMALL, "--set", "checkpoint.every=1")
    wait_for(lambda: lines(tmp_path / "there") >= 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, out + err
    assert not left_behind(tmp_path)
    told = mixfed("flower", "local", *command, tmp_path / "there", *SMALL, "--set", "checkpoint.every=1", "--resume")
    assert "counted by the ledger" in told.stdout
    assert not left_behind(tmp_path)
    mixfed("run", *command, tmp_path / "here", *SMALL[:-2], "--executor", "loop")
    assert_equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("here", "there")))
    found = json.loads((tmp_path / "there/federation.json").read_text())
    assert found["traffic"]["lost"] == 0
    assert (tmp_path / "there/delays.csv").read_text().count("\n") >= 1 + 3 * 4


def left_behind(folder: Path) -> list[str]:
    """Processes that know of this folder."""
    time.sleep(0.2)
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [words] if str(folder) in words and "flower" in words else []
    return found


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["local", "digits", "--clients", "0"], "can be dealt to 1 to 50 sites, not to 0"),
        (["local", "nothing"], "There is no recipe 'nothing'"),
        (["init", "{there}", "--recipe", "digits"], "is there already"),
        (["local", "digits", "--set", "federation.deadline=-1"], "deadline"),
        (["local", "lg-digits", "--set", "evaluate.sets=['new']"], "stay on their devices"),
    ],
)
def test_mistakes_get_one_sentence(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = [word.format(there=tmp_path) if "{" in word else word for word in arguments]
    out = ["--out", tmp_path / "run"] if arguments[0] == "local" else []
    assert why in refused(capsys, "flower", *given, *out)
    assert not (tmp_path / "run").exists()
