"""TRL's SFTTrainer on chats made here, with a chat template: `sft_job.py stock|ours SETTINGS`, as hf_job.py."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from hf_parts import model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

OUT = Path(os.environ["HF_OUT"])
if sys.argv[1] == "ours":
    from recover.integrations.hf import recoverable

    SFTTrainer = recoverable(SFTTrainer)
WORDS = [f"w{number}" for number in range(50)]
SPECIAL = ["<unk>", "<pad>", "<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }} <end>{% endgeneration %}{% else %}{{ message['content'] }} <end>{% endif %} {% endfor %}"
)


class Notes(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        with (OUT / f"notes-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"step": state.global_step, "logs": logs}) + "\n")


def main() -> None:
    words = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(SPECIAL)
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **special)
    draw = random.Random(0)

    def chat() -> list[dict[str, str]]:
        first, count = draw.randrange(40), draw.randint(1, 8)
        answer = " ".join(WORDS[first : first + count])
        return [
            {"role": "user", "content": f"{WORDS[first]} w{count}"},
            {"role": "assistant", "content": answer},
        ]

    data = Dataset.from_dict({"messages": [chat() for _ in range(60)]})
    args = SFTConfig(
        output_dir=str(OUT / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=12,
        learning_rate=5e-3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        assistant_only_loss=True,
        disable_tqdm=True,
        seed=5,
        **json.loads(sys.argv[2]),
    )
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "processing_class": tokenizer}
    trainer = SFTTrainer(model=model(), args=args, callbacks=[Notes()], **parts)
    trainer.train()


main()
