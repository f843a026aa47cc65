"""A run with what pl_job.py leaves out: a data module, a sampler with set_epoch, an epoch with a remainder and a
limit, validation inside epochs, monitored values of training, a test after the fit, a replica that raises."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from pl_job import Watch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import recover
from recover.integrations.lightning import RecoverStrategy

BATCH, STEPS_OF_EPOCH, ITEMS = 4, 8, 150


class ByEpoch(Sampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Any:
        return iter(torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Data(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 3, (ITEMS,), generator=draw)
        self.items = TensorDataset(torch.randn(ITEMS, 8, generator=draw), labels)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.items, 3, sampler=ByEpoch())

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.items, 7)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.items, 7)


class Model(L.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        return 1.5 * inputs, labels

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:  # without batch_idx
        failing = self.trainer.global_step + 1 == self.options.fail and self.options.mode == "recover"
        if failing and recover.init().replica == 0:
            raise ValueError("on purpose")
        loss = self.loss(batch)
        self.log_dict({"mean": loss, "twice": 2 * loss.detach()}, on_step=False, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.02)
        return [optimizer], [{"scheduler": plateau, "monitor": "twice"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["stock", "recover"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wait", type=int, nargs="*", default=[])
    parser.add_argument("--fail", type=int, default=-1)
    options = parser.parse_args()
    options.pace = 0.0
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(3, verbose=False)
    saver = ModelCheckpoint(
        options.out / "checkpoints",
        "{step}",
        monitor="twice",
        save_top_k=2,
        save_on_train_epoch_end=True,
        save_on_exception=True,
    )
    settings: dict[str, Any] = {
        "max_epochs": 5,
        "logger": CSVLogger(options.out, name="logs"),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "callbacks": [Watch(options), saver],
    }
    if options.mode == "recover":
        strategy = RecoverStrategy(BATCH, drop_remainder=True)
        limits = {"limit_train_batches": STEPS_OF_EPOCH, "val_check_interval": 3}
        trainer = L.Trainer(strategy=strategy, **limits, **settings)
    else:
        limits = {"limit_train_batches": STEPS_OF_EPOCH * BATCH, "val_check_interval": 3 * BATCH}
        settings |= {"accumulate_grad_batches": BATCH, "plugins": LightningEnvironment(), "devices": 1}
        trainer = L.Trainer(**limits, **settings)
    model, data = Model(options), Data()
    trainer.fit(model, datamodule=data)
    tested = trainer.test(model, datamodule=data, verbose=False)[0]["test_loss"]
    end = {"step": trainer.global_step, "epoch": trainer.current_epoch, "tested": tested}
    end |= {"best": Path(saver.best_model_path).name}
    Path(options.out, f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
