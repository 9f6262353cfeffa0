"""Loggers in addition to metrics.jsonl: TensorBoard, W&B, trackio. The config switches each on."""

import contextlib
import hashlib
import html
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hacrl.config import Config
from hacrl.errors import UserError, first_line
from hacrl.logs.aliases import Trainer, with_aliases
from hacrl.safe_text import mask, printable
from hacrl.store.reader import read_replies
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]

COLUMNS = ("problem", "question", "answer", "reply", "reward", "status")
"""Columns of the tables of replies."""


class Logger(Protocol):
    def log(self, row: Row, replies: Sequence[Row]) -> None:
        """Take a metrics row. `replies` are some of an evaluation, for a table."""

    def close(self) -> None: ...


def numbers(row: Row, trainers: Sequence[Trainer] = ()) -> dict[str, float]:
    """The numeric fields of a metrics row, those of a training row also by their aliases."""
    found = {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and key != "step"
    }
    return with_aliases(found, trainers) if row["kind"] == "train" else found


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

    def __init__(self, run: RunDirectory, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.trainers = run.path / "tensorboard", config.log.aliases
        self.make, self.writers = SummaryWriter, dict[str, Any]()
        # Readers drop what an earlier file has from this step on.
        done, agents = run.steps_done(), [agent.name for agent in config.agents]
        self.first = {name: done if (self.folder / name).exists() else 0 for name in agents}
        for row in run.metric_rows():
            if row["step"] >= self.first.get(row["agent"], done):  # the last evaluation
                self.log(row, some_replies(run, row, config.log.table_rows))

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        agent, kind = row["agent"], row["kind"]
        if agent not in self.writers:
            first, folder = self.first.get(agent, 0), self.folder / agent
            # Readers sort files by name, and of one second the tenth comes before the ninth.
            while any(f".{int(time.time())}." in path.name for path in folder.glob("events.*")):
                time.sleep(0.05)
            self.writers[agent] = self.make(str(folder), purge_step=first)
        writer = self.writers[agent]
        for key, value in numbers(row, self.trainers).items():
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

    def __init__(self, module: Any, run: Any, trainers: Sequence[Trainer]) -> None:
        self.module, self.run, self.trainers = module, run, trainers

    def values(self, row: Row, replies: Sequence[Row]) -> dict[str, Any]:
        prefix = f"{row['kind']}/{row['agent']}"
        found: dict[str, Any] = numbers(row, self.trainers)
        if replies:
            found["replies"] = self.module.Table(columns=list(COLUMNS), data=_cells(replies))
        return {f"{prefix}/{key}": value for key, value in found.items()}

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


class WeightsAndBiases(Tracker):
    def __init__(self, run: RunDirectory, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("log.wandb needs wandb: pip install 'hacrl[wandb]'") from error
        try:
            made = wandb.init(
                project=config.log.wandb,
                name=run.path.name,
                dir=str(run.path),
                config=mask(config.model_dump(mode="json")),
                resume="allow",
                id=_id(run),
            )
        except Exception as error:  # no login, no network, an unknown project
            raise UserError(
                f"log.wandb = {config.log.wandb!r}: Weights & Biases cannot be used "
                f"({first_line(error)}). Run `wandb login`, set WANDB_MODE=offline, or remove log.wandb."
            ) from error
        made.define_metric("*", step_metric="step")
        super().__init__(wandb, made, config.log.aliases)

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        self.run.log({**self.values(row, replies), "step": row["step"]})


class Trackio(Tracker):
    """Metrics in trackio's local folder, which `trackio show` reads."""

    def __init__(self, run: RunDirectory, config: Config) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError("log.trackio needs trackio: pip install 'hacrl[trackio]'") from error
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it prints where the metrics are
                made = trackio.init(
                    project=config.log.trackio,
                    name=f"{run.path.name}-{_id(run)[:6]}",
                    config=mask(config.model_dump(mode="json")),
                    resume="allow" if run.metric_rows() else "never",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # a folder that cannot be written, a wrong project name
            raise UserError(
                f"log.trackio = {config.log.trackio!r}: trackio cannot be used "
                f"({first_line(error)}). Set TRACKIO_DIR to a folder of yours, or remove log.trackio."
            ) from error
        super().__init__(trackio, made, config.log.aliases)

    def log(self, row: Row, replies: Sequence[Row]) -> None:
        self.run.log(self.values(row, replies), step=row["step"])


def _id(run: RunDirectory) -> str:
    """The same for every resume of a run directory."""
    return hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=8).hexdigest()


LOGGERS: dict[str, Callable[[RunDirectory, Config], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""Key of the table [log] that turns a logger on -> the logger."""


def open_loggers(run: RunDirectory, config: Config) -> list[Logger]:
    return [make(run, config) for name, make in LOGGERS.items() if getattr(config.log, name)]
