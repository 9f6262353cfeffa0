"""Loggers in addition to metrics.jsonl: TensorBoard, W&B, trackio. The config switches each on."""

import contextlib
import hashlib
import html
import importlib
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hacrl.config import Config
from hacrl.errors import UserError, first_line
from hacrl.safe_text import mask, printable
from hacrl.store.files import write_atomic
from hacrl.store.reader import read_replies
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]

COLUMNS = ("problem", "question", "answer", "reply", "reward", "status")
"""Columns of the tables of replies."""
ALIASES = {
    "reply_tokens": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "own/clipped": "clip_ratio/region_mean",
    "agreement/mean_gap": "sampling/sampling_logp_difference/mean",
    "agreement/max_gap": "sampling/sampling_logp_difference/max",
}
"""Metric of a training row -> its name in TRL, for charts that users already have."""


class Logger(Protocol):
    name: str  # its key in the table [log]

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        """Take a metrics row. `replies` are some of an evaluation, for a table."""

    def close(self) -> None: ...


def numbers(row: Row, config: Config) -> dict[str, float]:
    """The numeric fields of a metrics row, those of a training row also by their names in TRL."""
    values = {k: float(v) for k, v in row.items() if isinstance(v, (int, float)) and k != "step"}
    if row["kind"] != "train" or not config.log.aliases:
        return values
    parts = [key.removeprefix("reward/") for key in values if key.startswith("reward/")]
    names = ALIASES | {f"reward/{part}": f"rewards/{part}/mean" for part in parts}
    return values | {alias: values[key] for key, alias in names.items() if key in values}


def some_replies(run: RunDirectory, row: Row, count: int) -> Sequence[Row]:
    """The first replies to the first `count` problems of an evaluation: the same problems every time.
    Empty for other rows."""
    folder = run.evaluation(row["step"], row["agent"])
    if row["kind"] != "evaluation" or not count or not (folder / "replies.jsonl").is_file():
        return []
    return [reply for reply in read_replies(folder, "") if reply["index"] == 0][:count]


def _cells(replies: Sequence[Row]) -> list[list[Any]]:
    """The rows of a table of replies."""
    return [
        [printable(v) if isinstance(v, str) else v for v in (reply[name] for name in COLUMNS)]
        for reply in replies
    ]


class TensorBoard:
    """One writer per agent, with the same tags: charts show all agents of a team."""

    name = "tensorboard"

    def __init__(self, run: RunDirectory, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.config = run.path / "tensorboard", config
        self.make, self.writers = SummaryWriter, dict[str, Any]()
        # Readers drop what an earlier file has from this step on.
        self.first = run.steps_done() if self.folder.exists() else 0
        for row in run.metric_rows():
            if row["step"] >= self.first:  # the last evaluation
                self.log(row, some_replies(run, row, config.log.table_rows))

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        agent, kind = row["agent"], row["kind"]
        if agent not in self.writers:
            folder = self.folder / agent
            # Readers sort files by name, and of one second the tenth comes before the ninth.
            while any(f".{int(time.time())}." in path.name for path in folder.glob("events.*")):
                time.sleep(0.05)
            self.writers[agent] = self.make(str(folder), purge_step=self.first)
        writer = self.writers[agent]
        for key, value in numbers(row, self.config).items():
            writer.add_scalar(f"{kind}/{key}", value, row["step"])
        if replies:
            writer.add_text(f"{kind}/replies", _markdown(replies), row["step"])
        writer.flush()  # a kill loses no row of a saved step

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


def _markdown(replies: Sequence[Row]) -> str:
    """A table of replies as Markdown. Replies are hostile text: nothing in them is markup."""

    def escaped(value: Any) -> str:
        text = html.escape(str(value))
        for mark in "\\`*_[]|":
            text = text.replace(mark, f"&#{ord(mark)};")
        return text.replace("\n", "<br>")

    lines = [COLUMNS, ["---"] * len(COLUMNS), *_cells(replies)]
    return "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)


class Tracker:
    """Base of the W&B and trackio loggers: one run, keys KIND/AGENT/METRIC, tables of replies."""

    name, way_out = "", ""  # key of the table [log], and name of the module; what else to try

    def __init__(self, run: RunDirectory, config: Config) -> None:
        name, self.config = self.name, config
        project = getattr(config.log, name)
        try:
            self.module = importlib.import_module(name)
            settings = mask(config.model_dump(mode="json"))
            with contextlib.redirect_stdout(sys.stderr):  # trackio prints where the metrics are
                self.run = self.start(run, project=project, config=settings)
        except ImportError as error:
            raise UserError(f"log.{name} needs {name}: pip install 'hacrl[{name}]'") from error
        except Exception as error:  # no login, no network, an unknown project, no permission
            raise UserError(
                f"log.{name} = {project!r}: {name} cannot be used ({first_line(error)}). "
                f"{self.way_out}, or remove log.{name}."
            ) from error

    def start(self, run: RunDirectory, **options: Any) -> Any:
        """Begin or continue the run at the tracker."""
        raise NotImplementedError

    def values(self, row: Row, replies: Sequence[Row]) -> dict[str, Any]:
        """What is logged of a row."""
        found: dict[str, Any] = numbers(row, self.config)
        if replies:
            found["replies"] = self.module.Table(columns=list(COLUMNS), data=_cells(replies))
        return {f"{row['kind']}/{row['agent']}/{key}": value for key, value in found.items()}

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


class WeightsAndBiases(Tracker):
    name, way_out = "wandb", "Run `wandb login`, set WANDB_MODE=offline"

    def start(self, run: RunDirectory, **options: Any) -> Any:
        place = {"name": run.path.name, "dir": str(run.path)}
        made = self.module.init(**options, **place, resume="allow", id=wandb_id(run))
        made.define_metric("*", step_metric="step")
        return made

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        self.run.log({**self.values(row, replies), "step": row["step"]})


class Trackio(Tracker):
    """Metrics in trackio's local folder, which `trackio show` reads."""

    name, way_out = "trackio", "Set TRACKIO_DIR to a folder of yours"

    def start(self, run: RunDirectory, **options: Any) -> Any:
        name = f"{run.path.name}-{_id(run)[:6]}"
        resume = "allow" if run.metric_rows() else "never"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return self.module.init(**options, name=name, resume=resume, **quiet)

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        self.run.log(self.values(row, replies), step=row["step"])


def wandb_id(run: RunDirectory) -> str:
    """The same for every resume of a run directory. A new run at the same path, after the old one was
    deleted or on another machine, has another id: else W&B would add its rows to the old run."""
    path = run.path / "wandb" / "hacrl_id"
    if not path.is_file() and not run.metric_rows():  # a run of an older version has none
        write_atomic(path, uuid.uuid4().hex)
    return _id(run, path.read_text() if path.is_file() else "")


def _id(run: RunDirectory, mark: str = "") -> str:
    """The same for every resume of a run directory with this mark."""
    return hashlib.blake2b(f"{run.path.resolve()}{mark}".encode(), digest_size=8).hexdigest()


def open_loggers(run: RunDirectory, config: Config) -> list[Logger]:
    """The loggers that the config switches on."""
    kinds: list[type[TensorBoard | WeightsAndBiases | Trackio]]
    kinds = [TensorBoard, WeightsAndBiases, Trackio]
    return [kind(run, config) for kind in kinds if getattr(config.log, kind.name)]
