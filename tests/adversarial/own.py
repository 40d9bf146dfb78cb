"""Networks, criteria, metrics and algorithms of the user's own, whole and broken in some way."""

from __future__ import annotations

from tests.adversarial.options import TINY
from tests.adversarial.trial import Trial, Wrong, judged, must_refuse

CODE = """
import torch
from torch import nn
import mixfed as mf

class Net(nn.Module):
    def __init__(self, inputs, outputs, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, x):
        return self.layers(x.flatten(1))

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["y"], reduction="none")

def certain(outputs, batch):
    return outputs.softmax(-1).amax(-1)

def slow(client: mf.LocalTrainer):
    return mf.fedavg(client, mf.sgd(0.5), name="slow")
"""
USES = {
    "network": ["--set", "model.name=mine.py:Net"],
    "criterion": ["--set", "model.criterion=mine.py:loss"],
    "metric": ["--set", "evaluate.metrics=['accuracy', 'mine.py:certain']"],
}
BREAKS: dict[str, tuple[str, str]] = {
    "a syntax error": ("class Net(nn.Module):", "class Net(nn.Module:"),
    "an import of nothing": ("import torch\n", "import no_such_module_at_all\n"),
    "an error at import": ("import mixfed as mf", "import mixfed as mf\n1 / 0"),
    "an exit at import": ("import mixfed as mf", "import mixfed as mf\nraise SystemExit(7)"),
    "no such name": ("Net(nn.Module)", "Other(nn.Module)"),
    "no network": ("class Net(nn.Module):", "class Net:"),
    "no class": ("class Net(nn.Module):", "Net = 3\nclass Other(nn.Module):"),
    "a parameter that nobody gives": ("inputs, outputs, width", "inputs, outputs, depth, width"),
    "an error in its making": ("super().__init__()", "super().__init__()\n        raise KeyError('x')"),
    "an error in its forward pass": ("return self.layers(x", "return self.layers(x[:, :, 0, 7]"),
    "outputs of another width": ("nn.Linear(width, outputs)", "nn.Linear(width, 3)"),
    "no parameters": ("nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs)", "nn.Flatten()"),
    "outputs that are a list": ("return self.layers(x.flatten(1))", "return [self.layers(x.flatten(1))]"),
    "losses that are averaged": (', reduction="none")', ")"),
    "losses that are none": ("return nn.functional.cross_entropy", "nn.functional.cross_entropy"),
    "losses that need no weights": ("return nn", "return torch.zeros(len(outputs))\n    return nn"),
    "metrics of another shape": (".amax(-1)", ""),
    "an error in the metric": ("return outputs.softmax(-1)", "return outputs.nosuch()"),
    "markup in an error": ("return self.layers(x", "raise ValueError('[/] [bold]') if 1 else (x"),
    "bytes that are no text": ("import torch\n", "import torch\n# \udcff\n"),
}  # fmt: skip
HARMLESS = {"losses that need no weights", "bytes that are no text"}


def case(trial: Trial) -> str:
    """A run with code of the user's own, sound or with one mistake in it."""
    broken = trial.draw.random() < 0.9
    what = trial.one_of(list(BREAKS)) if broken else "nothing wrong"
    text = CODE.replace(*BREAKS[what]) if broken else CODE
    (trial.folder / "mine.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    uses = sorted(trial.draw.sample(list(USES), trial.one_of([1, 2, 3])))
    options = [word for use in uses for word in USES[use]]
    trial.note(what, "in", ", ".join(uses))
    verb = trial.one_of([["run"], ["run"], ["run", "--backend", "loopback"], ["compare", "--algorithms", "fedavg"]])
    out = trial.folder / "out"
    told = trial.command(verb[0], "digits", *verb[1:], "--rounds", "1", *TINY, *options, "--out", out)
    if not broken and told.code:
        raise Wrong(f"a good run ended with {told.code}: {told.err[-300:]}")
    concerned = what == "nothing wrong" or _touches(what, uses)
    return must_refuse(told) if broken and concerned and what not in HARMLESS else judged(told)


def _touches(what: str, uses: list[str]) -> bool:
    """Whether a run that uses these parts of the file comes upon the mistake."""
    if what.startswith("losses"):
        return "criterion" in uses
    if "metric" in what:
        return "metric" in uses
    everywhere = ("a syntax error", "an import of nothing", "an error at import", "an exit at import")
    return what in everywhere or "network" in uses
