"""report.html: everything about runs in one file, tried as a person would, in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains

from mixfed.experiments.report.view import Group, View
from mixfed.experiments.reporting import report
from mixfed.experiments.request import Request
from tests.cli.tools import TINY, here, refused

from .browser import browser

METHODS = ["fedavg", "feddle", "lg_fedavg"]
LATE = ["--set", "schedule.delay=half_normal", "--set", "schedule.sd=1.0"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of three methods, one with diagnostics and one whose clients have models of their own."""
    out = tmp_path_factory.mktemp("report") / "cmp"
    settings = [*TINY, "--set", "data.own_test=0.3", "--set", 'title="Digits <b>& co</b>"', "--no-probe"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        here("compare", "digits", "--algorithms", ",".join(METHODS), "--seeds", "0,1", "--rounds", "6", *settings,
             "--executor", "loop", *LATE, "--out", out)  # fmt: skip
    return out


def test_the_page_needs_nothing_but_itself(comparison: Path) -> None:
    page = (comparison / "report.html").read_text()
    assert len(page.encode()) < 5_000_000
    outside = re.sub(r"<script.*?</script>", lambda found: found[0].partition(">")[0], page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", outside)
    assert "<h1>Digits &lt;b&gt;&amp; co&lt;/b&gt;</h1>" in page


def test_curves_have_the_interval_of_the_mean() -> None:
    """Seeds of 0.4 and 0.6: half a width of t₀.₉₇₅(1)·0.1414/√2 = 12.706·0.1."""
    recipe = Request("digits").on(Request("digits").base())
    views = [View(recipe, Path(), {}, [{"round": 1, "accuracy": value}]) for value in (0.4, 0.6)]
    found = Group(views).curve("accuracy")
    assert found["surely_below"] - found["mean"] == pytest.approx([1.2706], rel=1e-4)
    assert found["high"] - found["mean"] == pytest.approx([0.1414], rel=1e-3)


def test_a_report_can_be_made_anew_and_of_several_folders(comparison: Path, tmp_path: Path) -> None:
    """It has the same sections and tables; only the names that the library draws for its charts are new."""
    before = _words(comparison / "report.html")
    report([comparison])
    assert _words(comparison / "report.html") == before
    both = report([comparison / "fedavg-seed0", comparison / "feddle-seed1"], tmp_path / "both.html")
    words = _words(both)
    assert "fedavg, feddle" in words
    assert "lg_fedavg" not in words


def test_a_browser_draws_every_chart(comparison: Path, tmp_path: Path) -> None:
    """No error is logged, every chart has a canvas with something on it, and a click on a legend hides a curve."""
    with browser(tmp_path) as window:
        if window is None:
            return
        window.get((comparison / "report.html").as_uri())
        charts = window.find_elements("css selector", ".chart")
        assert len(charts) >= 12
        drawn = window.execute_script(_DRAWN)
        assert drawn == [True] * len(charts)

        name = window.execute_script("return document.documentElement.dataset.theme || ''")
        window.find_element("id", "theme").click()
        assert window.execute_script("return document.documentElement.dataset.theme") != name

        place = window.execute_script(_LEGEND)
        ActionChains(window).move_to_element_with_offset(charts[0], place["x"], place["y"]).click().perform()
        hidden = window.execute_script(_HIDDEN)
        assert hidden == [place["label"]]
        problems = [entry for entry in window.get_log("browser") if entry["level"] == "SEVERE"]
        assert problems == []


def test_facts_are_what_the_files_say(comparison: Path) -> None:
    """The confusion matrix has every test example once, and costs grow with the rounds."""
    facts: dict[str, Any] = json.loads((comparison / "fedavg-seed0" / "facts.json").read_text())
    result = json.loads((comparison / "fedavg-seed0" / "result.json").read_text())
    table = facts["confusion"]["table"]
    right, every = sum(table[i][i] for i in range(10)), sum(map(sum, table))
    assert right / every == pytest.approx(result["metrics"]["accuracy"], abs=1e-6)
    spent = [entry["bytes"] for entry in facts["costs"]]
    assert [entry["round"] for entry in facts["costs"]] == [1, 2, 3, 4, 5, 6]
    assert spent == sorted(spent)
    assert spent[-1] == result["ledger"]["bytes_down"] + result["ledger"]["bytes_up"]
    assert facts["clients"]["on"] == "own test examples"
    assert sum(map(sum, facts["holdings"]["table"])) > 0


def test_folders_without_a_finished_run_are_refused(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "There is no folder" in refused(capsys, "report", tmp_path / "none")
    assert "holds no finished run" in refused(capsys, "report", tmp_path)
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "config.toml").write_bytes((comparison / "fedavg-seed0" / "config.toml").read_bytes())
    assert "has not finished" in refused(capsys, "report", unfinished)


def _words(page: Path) -> str:
    """What a reader reads."""
    body = page.read_text().rpartition("<body>")[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)))


_DRAWN = """
const inside = (root) => [...root.querySelectorAll("*")].flatMap(
  (e) => [...(e.tagName === "CANVAS" ? [e] : []), ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
const painted = (canvas) => canvas.width > 50 && canvas.getContext("2d")
  .getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value !== 0);
return [...document.querySelectorAll(".chart")].map((chart) => inside(chart).some(painted));
"""
_LEGEND = """
const view = Object.values(Bokeh.index.roots ? [...Bokeh.index.roots] : Bokeh.index)
  .find((v) => v.el && document.querySelector(".chart").contains(v.el));
const legend = [...view.model.below, ...view.model.center].find((m) => m.type === "Legend");
const box = Bokeh.index.find_one(legend) || view.views.find_one(legend);
const area = document.querySelector(".chart").getBoundingClientRect();
const item = [...box.el.shadowRoot.querySelectorAll(".bk-item")][0].getBoundingClientRect();
return {x: item.x + item.width / 2 - area.x - area.width / 2, y: item.y + item.height / 2 - area.y - area.height / 2,
        label: legend.items[0].label.value};
"""
_HIDDEN = """
const view = [...Bokeh.index.roots].find((v) => v.el && document.querySelector(".chart").contains(v.el));
return [...new Set(view.model.renderers.filter((r) => !r.visible).map((r) => r.name))];
"""
