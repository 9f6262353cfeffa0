"""Where metrics go besides metrics.jsonl. One dict; each logger is made from the config or not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hacrl.config import Config
from hacrl.errors import UserError, first_line
from hacrl.safe_text import mask
from hacrl.store.rundir import RunDirectory


class Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a metrics row, named kind/agent/field."""
    prefix = f"{row['kind']}/{row['agent']}"
    return {
        f"{prefix}/{key}": float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and key != "step"
    }


class TensorBoard:
    def __init__(self, run: RunDirectory) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / "tensorboard"
        # Readers drop what an earlier file has from this step on.
        first = run.steps_done() if folder.exists() else 0
        self.writer = SummaryWriter(str(folder), purge_step=first)
        for row in run.metrics():
            if row["step"] >= first:  # the evaluation after the last step
                self.log(row)

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row["step"])
        self.writer.flush()  # a kill loses no row of a saved step

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, run: RunDirectory, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("log.wandb needs wandb: pip install 'hacrl[wandb]'") from error
        try:
            self.run = wandb.init(
                project=config.log.wandb,
                name=run.path.name,
                dir=str(run.path),
                config=mask(config.model_dump(mode="json")),
                resume="allow",
                id=hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=8).hexdigest(),
            )
        except Exception as error:  # no login, no network, an unknown project
            raise UserError(
                f"log.wandb = {config.log.wandb!r}: Weights & Biases cannot be used "
                f"({first_line(error)}). Run `wandb login`, set WANDB_MODE=offline, or remove log.wandb."
            ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log({**numbers(row), "step": row["step"]})

    def close(self) -> None:
        self.run.finish()


LOGGERS: dict[str, Callable[[RunDirectory, Config], Logger | None]] = {
    "tensorboard": lambda run, config: TensorBoard(run) if config.log.tensorboard else None,
    "wandb": lambda run, config: WeightsAndBiases(run, config) if config.log.wandb else None,
}


def open_loggers(run: RunDirectory, config: Config) -> list[Logger]:
    made = (factory(run, config) for factory in LOGGERS.values())
    return [logger for logger in made if logger is not None]
