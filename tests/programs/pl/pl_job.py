"""A small training run with Lightning: alone (`stock`), or with RecoverStrategy under `recover run`."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment

import recover

BATCH, STEPS_OF_EPOCH, SIZE = 6, 8, 4  # microbatches of a step, steps of an epoch, items of a microbatch


class Model(L.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self.net(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", (output.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if self.trainer.global_step == self.options.kill_validation and not self.trainer.sanity_checking:
            die(self.options, 0)
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The norm of the clipped gradient; Lightning alone calls this before it clips."""
        squares = [each.grad.square().sum() for each in self.parameters() if each.grad is not None]
        self.log("norm", torch.stack(squares).sum().sqrt())

    def configure_optimizers(self) -> Any:
        kind = self.options.schedule
        if kind == "two":  # weights and biases
            groups = [[p for p in self.parameters() if p.ndim == n] for n in (2, 1)]
            optimizers = [torch.optim.AdamW(groups[0], lr=1e-2), torch.optim.SGD(groups[1], lr=1e-2)]
            return optimizers, [torch.optim.lr_scheduler.StepLR(each, 3) for each in optimizers]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedulers: dict[str, Any] = {
            "step": {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
                "interval": "step",
            },
            "epoch": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)},
            "plateau": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
                "monitor": "val_loss",
            },
        }
        return {"optimizer": optimizer, "lr_scheduler": schedulers[kind]}


class Watch(Callback):
    """Writes what callbacks see: one file for each process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._losses, self.count = options, list[float](), 0
        self._file = Path(options.out, f"seen-{os.getpid()}.jsonl")

    def write(self, **what: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.write(epoch=trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self._losses.append(float(outputs["loss"]))
        if len(self._losses) < trainer.accumulate_grad_batches:
            return
        loss, self._losses = sum(self._losses), []
        self.count += 1
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.write(step=trainer.global_step, loss=loss, rate=rate, index=index, count=self.count)
        world = getattr(trainer.strategy, "world", None)
        while trainer.global_step in self._options.wait and len(world.replicas) < world.grid.replicas:
            if world.asking:
                break
            time.sleep(0.01)
        time.sleep(self._options.pace)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.write(validated=trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.write(saved=trainer.global_step)


class HalfWritten(TorchCheckpointIO):
    """The first replica dies when half of the checkpoint of a step is on disk."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if checkpoint["global_step"] == self._options.kill_writer:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(b"half of it")
            die(self._options, 0)
        super().save_checkpoint(checkpoint, path, storage_options)


def die(options: argparse.Namespace, replica: int) -> None:
    """SIGKILL, if this is that replica and none has died here before."""
    if options.mode == "stock":
        return
    mark = Path(options.out, "died")
    if recover.init().replica == replica and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def digest(model: torch.nn.Module) -> str:
    whole = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
    return hashlib.sha256(whole).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["stock", "recover"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--schedule", default="step")
    parser.add_argument("--resume")
    parser.add_argument("--checkpoints")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--monitor")
    parser.add_argument("--patience", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--items", type=int, default=BATCH * STEPS_OF_EPOCH * SIZE)
    parser.add_argument("--kill-writer", type=int, default=-1)
    parser.add_argument("--kill-validation", type=int, default=-1)
    parser.add_argument(
        "--wait", type=int, nargs="*", default=[]
    )  # after these steps, for a lost replica to ask
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--logger", default="csv")
    parser.add_argument("--trainer", type=json.loads, default={})
    parser.add_argument("--strategy", type=json.loads, default={})
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(7, verbose=False)
    draw = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(options.items + 40, 16, generator=draw),
        torch.randint(0, 4, (options.items + 40,), generator=draw),
    )
    train, held = torch.utils.data.random_split(data, [options.items, 40])
    model = Model(options)
    kinds = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
    saver = ModelCheckpoint(
        dirpath=options.checkpoints or options.out / "checkpoints",
        filename="{step}",
        save_top_k=-1 if options.monitor is None else 2,
        monitor=options.monitor,
        every_n_train_steps=options.save_every if options.monitor is None else None,
    )
    callbacks = [Watch(options), LearningRateMonitor(), saver]
    if options.patience is not None:
        callbacks.append(EarlyStopping("val_loss", patience=options.patience, min_delta=0.02))
    settings: dict[str, Any] = {
        "max_steps": options.steps,
        "max_epochs": options.epochs,
        "logger": kinds[options.logger](options.out, name="logs"),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "callbacks": callbacks,
    }
    if options.mode == "recover":
        from recover.integrations.lightning import RecoverStrategy

        strategy = RecoverStrategy(**{"global_batch": BATCH, **options.strategy})
        trainer = L.Trainer(strategy=strategy, plugins=HalfWritten(options), **settings, **options.trainer)
    else:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        plugins = LightningEnvironment()
        trainer = L.Trainer(
            accumulate_grad_batches=BATCH, plugins=plugins, devices=1, **settings, **options.trainer
        )
    loaders = [
        torch.utils.data.DataLoader(train, SIZE, shuffle=True, num_workers=options.workers),
        torch.utils.data.DataLoader(held, 8),
    ]
    trainer.fit(model, *loaders, ckpt_path=options.resume)
    end = {"digest": digest(model), "step": trainer.global_step, "epoch": trainer.current_epoch}
    end |= {"best": saver.best_model_path, "score": float(saver.best_model_score or 0)}
    Path(options.out, f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
