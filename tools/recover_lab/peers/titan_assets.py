"""A tokenizer of words and a set of texts for torchtitan, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(400)]


def make_assets(place: Path) -> Path:
    """Documents have very different lengths, so that the slots of a step read at different rates."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (place / "texts").mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS[: 20 + n % 50], k=draw.randint(3, 120))) for n in range(400)]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (place / "texts" / "train.jsonl").write_text("".join(lines))
    return place
