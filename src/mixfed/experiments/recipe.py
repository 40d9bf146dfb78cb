"""A recipe: one experiment as one TOML file. This module is its schema, with every default.

Zero means "none" or "choose for me" where a setting may be absent (``steps``, ``epochs``, ``clip``, ``bound``,
``threads``, ``chunk``), because TOML has no null.

A recipe may have settings that hold only for one algorithm: ``[for.gradient_2way.client] learning_rate = 1.0``, and
lists of settings to choose from for each, ``[tune.gradient_2way.client] learning_rate = [0.3, 1.0]``
(:mod:`mixfed.experiments.tune`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from mixfed.core.delays import DELAYS
from mixfed.core.registry import OPTIMIZERS
from mixfed.data.scenario import GIVEN_BY_DATA, PARTITIONS
from mixfed.data.sources import SOURCES
from mixfed.experiments import schema as _schema
from mixfed.experiments.schema import Table, options_of
from mixfed.models import MODELS, ImageChange
from mixfed.ranges import Count, CountOrChosen, CountOrNone, NotNegative, PartOfOne, Positive, Share

if TYPE_CHECKING:
    from mixfed.core.optim import Optimizer


@dataclass(frozen=True)
class Partition:
    """How examples are dealt to clients; the partitioner ``kind`` brings its own settings.

    ``by`` is the field of labels that it goes by, where it goes by labels.
    """

    kind: str = "iid"
    by: str = "y"
    options: Table = field(default_factory=dict, metadata=options_of("kind", lambda: PARTITIONS, hidden=GIVEN_BY_DATA))


@dataclass(frozen=True)
class Central:
    """What the centre holds: nothing, all examples of labels that are not ``client_labels``, a random share of the
    examples or of the people, what the source has for it, what is in a ``file`` (of the source "files"; ``central =
    "lab.npz"`` is short for it), ``examples`` of the test part (which is then evaluated without them), or ``examples``
    of another ``source`` of images, made as large as the clients' (0: all).

    With ``labels``, clients hold the share ``inside`` of each of their labels and ``outside`` of each other label.
    ``validation`` is the share of the centre's examples that it keeps apart to tune on.
    """

    kind: Literal["none", "labels", "fraction", "people", "source", "file", "test", "other"] = "none"
    file: str = ""
    client_labels: list[Any] = field(default_factory=list)
    inside: Share = 1.0
    outside: Share = 0.0
    fraction: PartOfOne = 0.0
    examples: CountOrNone = 0
    source: str = ""
    validation: PartOfOne = 0.0


@dataclass(frozen=True)
class JoiningSection:
    """A device with turned images that joins in round ``round`` (0: none does), with examples of its own.

    From then on every round asks it, and the share ``fraction`` of the other clients. Where clients keep a part of the
    model, it learns its own part alone for ``settle`` rounds before the common one follows.
    """

    round: CountOrNone = 0
    fraction: Share = 0.1
    settle: CountOrNone = 0
    train: Count = 3000
    test: Count = 500
    degrees: Literal[90, 180, 270] = 90


@dataclass(frozen=True)
class Data:
    """Where the examples come from, and who holds them; the ``source`` may have settings of its own.

    For sources without a test set, ``held_out`` is the share of natural clients (people) whose examples are the test
    set, or ``test_share`` the share of all examples;
    ``validation`` is the share of the training part that is kept apart to tune on. ``own_test`` and
    ``own_validation`` are the shares of every client's own examples that its own model is tested and tuned on.
    ``label_noise`` is the share of the clients' training examples whose label is drawn at random. ``cache`` is a folder
    in which features (``model.cached``) are kept from run to run; without one they are computed in every run.
    """

    source: str = "digits"
    folder: str = ""
    cache: str = ""
    held_out: PartOfOne = 0.0
    test_share: PartOfOne = 0.0
    validation: PartOfOne = 0.0
    own_test: PartOfOne = 0.0
    own_validation: PartOfOne = 0.0
    label_noise: Share = 0.0
    partition: Partition = field(default_factory=Partition)
    central: Central = field(default_factory=Central)
    joining: JoiningSection = field(default_factory=JoiningSection)
    options: Table = field(
        default_factory=dict,
        metadata=options_of(
            "source",
            lambda: {name: info.load for name, info in SOURCES.items()},
            hidden=["folder", "centre"],
            or_own=True,
        ),
    )


SIZES = ("inputs", "outputs", "vocabulary", "characters", "items", "size", "channels")
"""Parameters of networks that the data determine, where a recipe does not."""


@dataclass(frozen=True)
class ModelSection:
    """The network ``name`` with its own settings; those that the data determine (inputs, outputs) may be left out.

    ``name`` and ``criterion`` may be of the user's own: ``"net.py:Net"``. The network starts from the ``weights`` in a
    file of that path, if there is one; ``weights_parts`` says which parts of it do
    (:func:`mixfed.models.weights.load_weights`). What matches a pattern in ``frozen`` is neither trained nor sent, and
    with ``buffers = "frozen"`` BatchNorm keeps the statistics that it starts with (:class:`mixfed.core.model.Model`).

    ``trained`` are the parts of the network that a run has, one after the other (none named: the whole network), and
    ``cached`` those before them: they are run once over all examples, whose place their answers take
    (:mod:`mixfed.experiments.features`). Steps are as :class:`mixfed.models.chain.Chain` has them.
    ``augment`` are random changes of images in training (:func:`mixfed.models.augment.augment`).
    """

    name: str = "mlp"
    criterion: str = "cross_entropy"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    buffers: Literal["average", "private", "server", "frozen"] = "average"
    weights: str = ""
    weights_parts: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    augment: list[ImageChange] = field(default_factory=list)
    options: Table = field(
        default_factory=dict, metadata=options_of("name", lambda: MODELS, or_own=True, left_open=SIZES)
    )


@dataclass(frozen=True)
class Auxiliary:
    """A model beside the network's head that looks at the representation after ``layers`` layers.

    Its loss counts with ``weight``. An adversary reads protected attributes, and ``weight`` is λ of the minimax, which
    begins after ``pretrain`` rounds and has ``steps`` of the adversary for each of its opponent's: before it, or with
    ``in_turn`` after one of the encoder and one of the head, as in the paper. The parameters are named ``encoder.``,
    ``head.`` and ``auxiliary.``.
    """

    kind: Literal["none", "supervised", "autoencoder", "rotation", "jigsaw", "adversary"] = "none"
    layers: Count = 1
    weight: NotNegative = 1.0
    hidden: list[Count] = field(default_factory=list)
    dropout: PartOfOne = 0.0
    pretrain: CountOrNone = 0
    steps: Count = 1
    in_turn: bool = False


@dataclass(frozen=True)
class Rule:
    """An optimizer with its own settings."""

    optimizer: str = "sgd"
    learning_rate: NotNegative = 1.0
    options: Table = field(
        default_factory=dict, metadata=options_of("optimizer", lambda: OPTIMIZERS, hidden=["learning_rate"])
    )


@dataclass(frozen=True)
class Training:
    """Local training, on clients or at the centre: an optimizer with its own settings, batches, steps or epochs."""

    optimizer: str = "sgd"
    learning_rate: NotNegative = 0.1
    batch_size: CountOrNone = 10
    steps: CountOrNone = 0
    epochs: CountOrNone = 0
    shuffle: bool = True
    clip: NotNegative = 0.0
    options: Table = field(
        default_factory=dict, metadata=options_of("optimizer", lambda: OPTIMIZERS, hidden=["learning_rate"])
    )


@dataclass(frozen=True)
class ClientTraining(Training):
    """Local training on clients, which drop an update whose norm is above ``bound`` (0: there is no bound).

    With ``keep_memory`` momentum, or Adam's moments, stay on the client from round to round.
    """

    bound: NotNegative = 0.0
    keep_memory: bool = False


@dataclass(frozen=True)
class Mixing:
    """The mixed loss w_f·f_f + w_c·f_c: the weights of the clients' and of the centre's loss."""

    w_f: NotNegative = 1.0
    w_c: NotNegative = 1.0


@dataclass(frozen=True)
class Regulariser:
    """A loss f_c of the parameters alone, ``scale``·spreadout of the model's table: mixed algorithms (parallel,
    gradient_1way, gradient_2way) minimise it at the centre, on its steps and with its optimizer, all others on every
    client beside its own loss.

    ``with_data`` lets the centre minimise the loss of the examples it holds as well. ``by_pairs`` computes spreadout
    from all pairs of rows, the way the paper counts its cost.
    """

    name: Literal["none", "spreadout"] = "none"
    scale: NotNegative = 1.0
    with_data: bool = False
    by_pairs: bool = False


@dataclass(frozen=True)
class RowExchange:
    """Whether clients exchange only the rows of tables that their data touch, and ``by_touch``: whether a row is
    averaged over the clients that touched it only. Clients that have a regulariser need, and get, whole tables."""

    exchange: bool = False
    by_touch: bool = False


LOCAL_PERCENTILES = {f"local_p{p}": p for p in (10, 50, 90)}
EVALUATION_SETS = (
    *("all", "clients", "centre", "local", *LOCAL_PERCENTILES, "new", "averaged", "old", "joined"),
    *("adversary", "postfit"),
)


@dataclass(frozen=True)
class EvaluateSection:
    """When, by what and on what the model is evaluated: test examples, or to tune those of ``data.validation`` or
    ``data.central.validation``. A run's figures are those of its last evaluation, or the best of so many last ones.

    ``sets`` are parts of the test (or validation) examples: all, those of the kind (the labels, the source's side)
    that is on clients, those of the kind that is at the centre. ``local`` asks every client's own model about its own
    examples, ``new`` all clients' models about all examples (the mean of their outputs), ``averaged`` the model with
    the mean of their weights; ``old`` and ``joined`` are the local test of those who were there and of the device that
    joins. ``local_p10``, ``local_p50`` and ``local_p90`` are percentiles over clients of the local test. ``adversary``
    asks clients' adversaries about protected attributes, ``postfit`` fresh ones.
    """

    every: Count = 10
    best_of_last: Count = 1
    metrics: list[str] = field(default_factory=lambda: ["loss", "accuracy"])
    on: Literal["test", "validation", "centre"] = "test"
    sets: list[str] = field(default_factory=lambda: ["all"])


@dataclass(frozen=True)
class StopSection:
    """When a run ends before its last round: once ``metric``, measured on the validation examples, was not better in
    ``patience`` evaluations in a row (the best model is kept too), after ``minutes``, or after ``bytes`` sent
    (0: never)."""

    metric: str = ""
    patience: Count = 5
    minutes: NotNegative = 0.0
    bytes: CountOrNone = 0


@dataclass(frozen=True)
class CheckpointSection:
    """A checkpoint every so many rounds (and at the end, and when the run is interrupted)."""

    every: Count = 10


@dataclass(frozen=True)
class SimulatorSection:
    """How clients are simulated; ``memory`` in bytes, ``private`` is where they keep what is theirs, and ``in_flight``
    where the messages to late clients are kept.

    ``cores`` is how many processor cores an operator may use (0: as many as PyTorch chooses), and ``chosen`` has the
    executions that ``auto`` chose, by source. A run writes both into its config.toml: they decide the last bits of its
    numbers, so that a run of that file repeats them. With ``deterministic_sum``
    the order of all additions is fixed, whatever the number of ranks. ``timeout`` is how many seconds ranks wait for
    each other.
    """

    executor: Literal["auto", "loop", "vmap", "factored"] = "auto"
    threads: CountOrChosen = 0
    chunk: CountOrChosen = 0
    memory: Count = 2 << 30
    private: Literal["memory", "disk"] = "memory"
    in_flight: Literal["device", "memory", "disk"] = "device"
    cores: CountOrChosen = 0
    deterministic_sum: bool = False
    timeout: Positive = 1800.0
    chosen: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FederationSection:
    """How long a federation waits, in seconds: a round of the schedule's clock lasts at most ``deadline``, a message
    that was not answered within ``ttl`` is lost, sites are waited for ``assemble`` at the beginning and when all have
    gone, and answers are looked for every ``poll``."""

    deadline: Positive = 60.0
    ttl: Positive = 3600.0
    assemble: Positive = 120.0
    poll: Positive = 0.1


@dataclass(frozen=True)
class ScheduleSection:
    """When clients report: their ``delay`` with its own settings, on a clock whose unit is a round.

    A client is slower by the factor in ``speeds`` of its class (of the size in ``shares``), and a job is lost with the
    probability ``dropout``. ``late`` updates are discarded or used, as the algorithm does by itself (auto) or as said.
    For ``buffer``, ``concurrency`` and ``patience`` see :class:`mixfed.core.schedule.Schedule`.
    """

    delay: str = "none"
    speeds: list[NotNegative] = field(default_factory=list)
    shares: list[NotNegative] = field(default_factory=list)
    dropout: PartOfOne = 0.0
    late: Literal["auto", "discard", "use"] = "auto"
    buffer: CountOrNone = 0
    concurrency: CountOrNone = 0
    patience: NotNegative = 0.0
    options: Table = field(default_factory=dict, metadata=options_of("delay", lambda: DELAYS))


@dataclass(frozen=True)
class Theory:
    """Linear models between local and global (:mod:`mixfed.experiments.theory`), a curve for each ``rho``."""

    rho: list[float] = field(default_factory=list)
    sigma: float = 1.5
    dimension: int = 20
    devices: int = 100
    examples: int = 2000
    test: int = 1000
    alphas: int = 11
    seeds: int = 6


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run. ``published`` are a paper's figures by algorithm and metric.

    ``backend`` is where clients run: in the simulator, or behind bytes as over a network (loopback), which is slower
    and gives the same numbers, or on the sites of a federation (flower), which ``mixfed flower`` and ``flwr run``
    start. ``home`` is the folder of the recipe's file, where relative paths begin, and ``methods`` says where
    algorithms of the user's own are: ``{"mine": "method.py:mine"}``. A run writes fingerprints of the user's files into
    ``inputs``: one that goes on, or repeats it, refuses files that have changed.
    """

    name: str = ""
    home: str = ""
    title: str = ""
    paper: str = ""
    algorithm: str = "fedavg"
    rounds: Count = 100
    cohort: Count = 10
    seed: int = 0
    device: str = "cpu"
    backend: Literal["simulator", "loopback", "flower"] = "simulator"
    data: Data = field(default_factory=Data)
    model: ModelSection = field(default_factory=ModelSection)
    auxiliary: Auxiliary = field(default_factory=Auxiliary)
    theory: Theory = field(default_factory=Theory)
    client: ClientTraining = field(default_factory=ClientTraining)
    server: Rule = field(default_factory=Rule)
    central: Training = field(default_factory=Training)
    merge: Rule = field(default_factory=Rule)
    mixing: Mixing = field(default_factory=Mixing)
    regulariser: Regulariser = field(default_factory=Regulariser)
    rows: RowExchange = field(default_factory=RowExchange)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    stop: StopSection = field(default_factory=StopSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    simulator: SimulatorSection = field(default_factory=SimulatorSection)
    federation: FederationSection = field(default_factory=FederationSection)
    methods: dict[str, str] = field(default_factory=dict)
    algorithms: dict[str, dict[str, Any]] = field(default_factory=dict)
    published: dict[str, dict[str, float]] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)

    def table(self) -> Table:
        """The whole recipe as a table; :func:`mixfed.experiments.toml.resolve` makes the same recipe of it."""
        return _schema.write(self)

    def toml(self) -> str:
        """The whole recipe as TOML."""
        return tomli_w.dumps(self.table())

    def algorithm_options(self) -> Table:
        """The settings of the chosen algorithm."""
        return self.algorithms.get(self.algorithm, {})


def optimizer_of(section: Rule | Training) -> Optimizer:
    """The optimizer that a section describes."""
    return OPTIMIZERS[section.optimizer](section.learning_rate, **section.options)
