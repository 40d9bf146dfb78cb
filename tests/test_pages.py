"""Every Python snippet of every page runs, one after the other as the page has them, and what a page says holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import mixfed as mf
from mixfed import data
from mixfed.backends.parcels import Parcel, marks
from mixfed.experiments.app import write_app
from mixfed.experiments.federation import experiment_of, read_recipe, site_of
from mixfed.experiments.request import Request
from tests.movies import problem
from tests.problems import blobs, small_mlp

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]}
Names = dict[str, Any]


def snippets(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def mixed_names() -> Names:
    """A model and data as the page on mixed learning takes them for granted."""
    model = small_mlp()
    clients, central, _ = blobs(clients=25)
    trainer = mf.LocalTrainer(model, mf.sgd(0.1), mf.Batching(10, steps=2))
    trainers = dict.fromkeys(("phones", "cars", "corpus"), trainer)
    sources = {"phone_data": clients, "car_data": clients, "corpus_data": central}
    return {"model": model, "client_data": clients, "central_data": central} | trainers | sources


def movie_names() -> Names:
    """A model with a table, as the page on movies takes it for granted."""
    from mixfed.models.recommender import DualEncoder
    from mixfed.transforms.rows.exchange import exchange_rows

    model = problem.model()
    centre = mf.Centre(problem.regulariser(model), needs_data=False)
    module = DualEncoder(problem.ITEMS, problem.WIDTH)
    trainers = {"clients": problem.on_clients(model), "centre": centre, "parallel": mf.parallel}
    return {"Model": mf.Model, "module": module, "hinge": problem.hinge, "exchange_rows": exchange_rows} | trainers


def own_files() -> Names:
    """Files of the shape that the page on own data reads: weather and prices that follow from a number, and reviews."""
    draw = np.random.default_rng(0)
    warm, kinds = draw.normal(size=150), np.array(["drizzle", "fog", "rain", "snow", "sun"])
    weather = {"precipitation": -warm, "temp_max": warm, "temp_min": draw.normal(size=150), "wind": draw.random(150)}
    weather["weather"] = kinds[np.digitize(warm, [-1, -0.5, 0.5, 1])]
    pandas.DataFrame(weather).to_csv("seattle-weather.csv", index=False)
    houses = pandas.DataFrame(draw.normal(size=(300, 8)), columns=[f"x{n}" for n in range(8)])
    prices = houses.assign(MedHouseVal=houses["x0"] + 3)
    prices.to_parquet("california_housing.parquet.brotli", compression="brotli")
    return reviews()


def reviews() -> Names:
    """Two departments, each with a letter of its own."""
    about = [n % 2 for n in range(120)]
    texts = {"Review Text": ["ab"[n] * 30 for n in about], "Department Name": [["Dresses", "Tops"][n] for n in about]}
    table = pandas.DataFrame(texts | {"Age": [20 + n // 10 for n in range(120)]})
    table.to_parquet("WomensClothingE-CommerceReviews.parquet.brotli", compression="brotli")
    return {}


GIVEN: dict[str, Callable[[], Names]] = {
    "docs/deploy.md": lambda: {"__file__": "app/federation/client_app.py"},
    "docs/mixed.md": mixed_names,
    "docs/movies.md": movie_names,
    "docs/own-data.md": own_files,
}
"""Names (and files) that a page takes for granted."""


def learnt(names: Names) -> None:
    assert names["result"].metrics["accuracy"] > 0.9


def held(names: Names) -> None:
    assert names["oracle"].examples == 700
    assert len(names["data"]) == 30
    assert Path("holdings.png").exists()


def by_rows(names: Names) -> None:
    assert mf.run(names["algorithm"], problem.clients(), rounds=1, cohort=2).rounds == 1


def sparse(names: Names) -> None:
    """The page's last algorithm sends a twentieth of the numbers, each with its place."""
    plain = mf.fedavg(names["clients"])
    sent = [mf.run(a, names["client_data"], rounds=1, cohort=2).ledger["bytes_up"] for a in (names["algorithm"], plain)]
    assert sent[0] < sent[1] / 4


def forgets_and_mixes(names: Names) -> None:
    """This is also examples/bring_your_own.py, line by line (another test compares the two)."""
    found = re.findall(r"(\w+): accuracy ([\d.]+)", names["printed"])
    accuracy = {name: float(value) for name, value in found}
    assert accuracy["fedavg"] < 0.55  # it has never seen the other five digits
    assert accuracy["gradient_2way"] > 0.85


def decided(names: Names) -> None:
    """FedAvg has never seen the other class, and the mixed methods have."""
    means = {name: entry["metrics"]["accuracy"]["mean"] for name, entry in names["comparison"].algorithms.items()}
    assert means["fedavg"] < 0.75 < 0.85 < means[names["comparison"].best("accuracy")]
    assert Path("runs/task-compare/report.html").exists()
    assert sum(1 for line in snippets("docs/python.md")[0].splitlines() if line.strip()) <= 25


def from_files_to_decisions(names: Names) -> None:
    """Three datasets, each in at most 25 lines and with a report."""
    whole = [snippet for snippet in snippets("docs/own-data.md") if "mixfed.Task(" in snippet]
    assert len(whole) == 3
    assert all(sum(1 for line in snippet.splitlines() if line.strip()) <= 25 for snippet in whole)
    reports = [Path("runs", folder, "report.html") for folder in ("weather", "prices-compare", "task-compare")]
    assert all(report.exists() for report in reports)


def holds_its_own(names: Names) -> None:
    """A site of the page's own examples greets, and refuses a server with another recipe."""
    write_app(Path("app"), Request("digits").on(Request("digits").base()))
    recipe = read_recipe(names["RECIPE"])
    site = site_of(recipe, {"clients": "4,8,9", "folder": "kept"}, data=names["examples"], classes=10)
    greeting = {"kind": "hello"} | marks(experiment_of(recipe))
    assert site.answer(Parcel(greeting)).header["clients"] == {"clients": [4, 8, 9]}
    assert "recipes differ" in site.answer(Parcel(greeting | {"experiment": "another"})).header["refused"]


EXPECTED: dict[str, Callable[[Names], None]] = {
    "README.md": forgets_and_mixes,
    "docs/adding-an-algorithm.md": learnt,
    "docs/asynchronous.md": learnt,
    "docs/data.md": held,
    "docs/deploy.md": holds_its_own,
    "docs/mixed.md": sparse,
    "docs/movies.md": by_rows,
    "docs/own-data.md": from_files_to_decisions,
    "docs/python.md": decided,
}
"""What holds once a page's snippets have run; ``printed`` is what they printed."""


def hasty(advise: Callable[..., Any], task: mf.Task, minutes: float) -> Any:
    """Advice in less time than a page takes for it."""
    return advise(task, minutes=minutes / 20)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_snippets_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mf, "advise", partial(hasty, mf.advise))
    names = GIVEN.get(page, dict)()
    for snippet in snippets(page):
        exec(compile(snippet, page, "exec"), names)
    EXPECTED.get(page, lambda names: None)(names | {"printed": capsys.readouterr().out})


def test_expectations_are_of_pages_with_snippets() -> None:
    assert all(snippets(page) for page in {*GIVEN, *EXPECTED})


def test_links_between_pages_lead_somewhere() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_every_source_and_reader_is_on_the_page_of_data() -> None:
    page = PAGES["docs/data.md"]
    assert all(f"`{name}`" in page for name in data.SOURCES)
    assert all(name in page for name in data.__all__ if "from_" in name)
    assert all(hasattr(data, name) for name in data.__all__)
