"""Prints, for each setting that RecoverStrategy refuses, what it says: one line of JSON for each."""

from __future__ import annotations

import json
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from recover.integrations.lightning import RecoverStrategy, compatibility

torch.set_num_threads(1)
warnings.filterwarnings("ignore", module="lightning")


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Model):
    automatic_optimization = False


class Clips(Model):
    def configure_gradient_clipping(self, *arguments: Any, **named: Any) -> None:
        pass


class Skips(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()  # and no optimizer.step(closure)


class ReturnsNone(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class LogsText(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("words", {"a": 1})
        return super().training_step(batch, batch_idx)


class CallsLogger(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"a": 1.0})
        return super().training_step(batch, batch_idx)


class InOrder(IterableDataset):
    def __iter__(self) -> Any:
        return iter([torch.zeros(2)] * 8)


ITEMS = TensorDataset(torch.randn(8, 2))
LOADER = DataLoader(ITEMS, batch_size=2)


def attempt(name: str, model: Any = None, loader: Any = LOADER, strategy: Any = (), **settings: Any) -> None:
    try:
        trainer = L.Trainer(
            strategy=RecoverStrategy(**{"global_batch": 2, **dict(strategy)}),
            max_epochs=1,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            **{"logger": False, **settings},
        )
        trainer.fit(model or Model(), loader)
        said = "done"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps({"name": name, "said": said}), flush=True)


attempt("plain")
attempt("manual", Manual())
attempt("devices", devices=2)
attempt("nodes", num_nodes=2)
attempt("accumulate", accumulate_grad_batches=4)
attempt("clip-value", gradient_clip_val=1.0, gradient_clip_algorithm="value")
scaler = torch.amp.GradScaler("cpu")
attempt("scaler", plugins=MixedPrecision("16-mixed", "cpu", scaler))
attempt("batchnorm", sync_batchnorm=True)
attempt("reload", reload_dataloaders_every_n_epochs=1)
attempt("clock", val_check_interval="00:00:10:00", check_val_every_n_epoch=None)
attempt("asynchronous", plugins=AsyncCheckpointIO())
attempt("clipping-hook", Clips())
attempt("optimizer-step", Skips())
attempt("callback", callbacks=[GradientAccumulationScheduler({0: 2})])
attempt("iterable", loader=DataLoader(InOrder(), batch_size=2))
attempt("worker-init", loader=DataLoader(ITEMS, batch_size=2, num_workers=1, worker_init_fn=print))
attempt("remainder", strategy={"global_batch": 3})
attempt("dropped", strategy={"global_batch": 3, "drop_remainder": True})
attempt("no-step", strategy={"global_batch": 5, "drop_remainder": True})
attempt("several-loaders", loader={"a": LOADER, "b": LOADER})
attempt("one-loader-in-a-dict", loader={"a": LOADER})
attempt("none", ReturnsNone())
attempt("text", LogsText())
attempt("logger", CallsLogger(), logger=L.pytorch.loggers.CSVLogger("."))
attempt("bf16", precision="bf16-mixed", gradient_clip_val=0.5)
compatibility.TESTED = ("2.0.0",)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    attempt("untested")
    print(json.dumps({"name": "warning", "said": " ".join(str(each.message) for each in caught)}))
compatibility.SIGNATURES["barrier"] = "self"
attempt("signature")
