"""Data: any sample from its index alone, every sequence once a pass, and refusals that name the remedy."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.data import Corpus, Stream, check_corpus, open_corpus, open_stream
from recover.data.shuffle import Shuffle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECOVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "</s>": 4, "far": 900}
    built = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return str(path)


def counting(tokens: int) -> Corpus:
    """A corpus in which every token is its own position."""
    return Corpus(np.arange(tokens), tokens, "counting", "none")


def places(stream: Stream, samples: range) -> list[int]:
    return [sequence for i in samples for sequence in stream.sequences(i)]


@given(n=st.integers(1, 3000), key=st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_shuffle_is_a_bijection(n: int, key: str) -> None:
    shuffle = Shuffle(n, key)
    assert sorted(shuffle[i] for i in range(n)) == list(range(n))


def test_shuffle_leaves_no_trace_of_the_old_order() -> None:
    """Neighbours end up as far from each other as in a random order, and keys give unrelated orders."""
    n = 4000
    order = np.array([Shuffle(n, "a")[i] for i in range(n)])
    other = np.array([Shuffle(n, "b")[i] for i in range(n)])
    assert abs(np.abs(np.diff(order)).mean() / n - 1 / 3) < 0.02
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.06
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.06


@given(
    st.integers(2, 300), st.integers(1, 9), st.integers(1, 4), st.integers(0), st.sampled_from([0, 0.02, 0.3])
)
@settings(max_examples=60, deadline=None)
def test_data_pass_uses_each_sequence_at_most_once_and_none_held_out(
    sequences: int, seq_len: int, size: int, seed: int, fraction: float
) -> None:
    corpus = counting(sequences * (seq_len + 1))
    try:
        train = Stream(corpus, seq_len, size, seed, "train", fraction)
    except ValueError:
        assert sequences <= 2 * size  # no sequence is left besides the held-out ones
        return
    held: set[int] = set()
    if fraction:
        heldout = Stream(corpus, seq_len, size, seed + 1, "heldout", fraction)
        held = set(places(heldout, range(len(heldout) * 3)))
    for number in range(3):
        used = places(train, range(number * len(train), (number + 1) * len(train)))
        assert len(set(used)) == len(used) == len(train) * size
        assert (
            sequences - len(used) - len(held) < 2 * size
        )  # only sequences that do not fill a microbatch are left out
        assert held.isdisjoint(used)


def test_tokens_are_either_trained_on_or_held_out() -> None:
    corpus = counting(2000)
    splits = [Stream(corpus, 7, 2, 0, split, 0.1) for split in ("train", "heldout")]  # type: ignore[arg-type]
    train, heldout = (
        {int(t) for i in range(len(s)) for part in s[i].values() for t in part.flatten()} for s in splits
    )
    assert train.isdisjoint(heldout)
    assert len(train) + len(heldout) > 1950


def test_targets_are_the_next_tokens() -> None:
    sample = Stream(counting(1000), 9, 3, seed=5)[4]
    assert sample["tokens"].shape == sample["targets"].shape == (3, 9)
    assert str(sample["tokens"].dtype) == "torch.int64"
    assert (sample["targets"] == sample["tokens"] + 1).all()


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_sample_depends_on_its_index_only(indices: list[int]) -> None:
    stream = Stream(counting(500), 4, 2, seed=3)
    for index in indices:
        assert stream.sequences(index) == Stream(counting(500), 4, 2, seed=3).sequences(index)


def test_seeds_and_passes_change_the_order_and_not_the_held_out_set() -> None:
    one, two = (Stream(counting(5000), 4, 2, seed) for seed in (1, 2))
    first, second = range(len(one)), range(len(one), 2 * len(one))
    assert places(one, first) != places(two, first)
    assert places(one, first) != places(one, second)
    held = [Stream(counting(5000), 4, 2, seed, "heldout") for seed in (1, 2)]
    assert set(places(held[0], range(len(held[0])))) == set(places(held[1], range(len(held[1]))))


def test_text_is_tokenised_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, tokenizer: str
) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.txt").write_text("cat sat far")
    (folder / "one.jsonl").write_text('{"text": "the cat"}\n\n{"text": "sat"}\n')
    (folder / ".hidden").write_text("far far far")
    corpus = open_corpus(str(folder), tokenizer)
    assert corpus.tokens.tolist() == [
        2,
        3,
        900,
        4,
        1,
        2,
        4,
        3,
        4,
    ]  # b/two.txt, then one.jsonl; 4 ends a document
    assert corpus.vocab == 901
    written = [file for file in cache.iterdir() if file.suffix == ".uint16"]
    stamp = written[0].stat().st_mtime_ns
    open_corpus(str(folder), tokenizer)
    assert written[0].stat().st_mtime_ns == stamp
    (folder / "b" / "two.txt").write_text("the")
    assert open_corpus(str(folder), tokenizer).tokens.tolist() == [1, 4, 1, 2, 4, 3, 4]
    assert not list(cache.glob("*.tmp"))


def test_long_texts_are_cut_between_lines(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recover.data.sources._PIECE", 5)
    (tmp_path / "long.txt").write_text("the cat\nsat\nfar far\n" * 50)
    assert open_corpus(str(tmp_path / "long.txt"), tokenizer).tokens.tolist() == [1, 2, 3, 900, 900] * 50 + [
        4
    ]


def test_token_files_are_mapped_without_a_copy(tmp_path: Path) -> None:
    ids = np.arange(200)
    np.save(tmp_path / "t.npy", ids)
    ids.astype(np.uint16).tofile(tmp_path / "t.bin")
    ids.astype(np.uint32).tofile(tmp_path / "wide.bin")
    (tmp_path / "wide.bin.json").write_text('{"dtype": "uint32"}')
    for name in ("t.npy", "t.bin", "wide.bin"):
        corpus = open_corpus(str(tmp_path / name), "bytes")
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.tokens.tolist() == ids.tolist()
        check_corpus(str(tmp_path / name), "bytes", 4, 2, 8)


def hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> list[tuple[str, str | None]]:
    """A stand-in for the datasets library."""
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        assert (split, streaming) == ("train", True)
        asked.append((name, config))
        return rows

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_hub_dataset_is_streamed_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, [{"text": "abc"}] * 1000)
    assert len(open_corpus("hf:someone/some:en", "bytes").tokens) == 4000
    limited = open_corpus("hf:someone/some@1K", "bytes")
    assert len(limited.tokens) == 1336  # the document that reaches the limit is the last
    assert open_stream("hf:someone/some:en", "bytes", 3, 1, 0).vocab == 256
    assert asked == [("someone/some", "en"), ("someone/some", None)]
    hub(monkeypatch, [{"content": "abc"}])
    with pytest.raises(ValueError, match="column 'text'"):
        open_corpus("hf:other", "bytes")


def refuse(match: str, path: Path | str | None, tokenizer: str = "bytes") -> None:
    with pytest.raises(ValueError, match=match) as refusal:
        check_corpus(str(path) if path else None, tokenizer, seq_len=32, microbatch_size=2, global_batch=4)
    assert "\n" not in str(refusal.value)


def test_unusable_data_is_refused_with_the_remedy(tmp_path: Path, tokenizer: str) -> None:
    text, tokens = tmp_path / "text.txt", tmp_path / "t.npy"
    text.write_text("the cat sat " * 1000)
    refuse("no_such.txt' does not exist; name", tmp_path / "no_such.txt")
    refuse("no_such.npy' does not exist; name", tmp_path / "no_such.npy")
    (tmp_path / "nothing").mkdir()
    refuse("without files; put", tmp_path / "nothing")
    for name, content, reason in (
        ("empty.txt", b"", "is empty; let data.path"),
        ("empty.bin", b"", "is empty; let data.path"),
        ("empty.jsonl", b"\n", "is empty; let data.path"),
        ("small", b"x" * 329, "holds 329 tokens .bytes., too few for one step of 4 microbatches"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}', "line 2 is not a JSON object with a string"),
        ("b.jsonl", b"plain text", "line 1 is not a JSON object"),
        ("wrong.npy", b"plain text", "is not a .npy file of tokens"),
        ("odd.bin", b"xyz", "no multiple of 2 bytes"),
    ):
        refuse(reason, _file(tmp_path / name, content))
    refuse("is not UTF-8 text .*; fix", _file(tmp_path / "latin.txt", b"\xe4\xf6" * 999), tokenizer)
    refuse(r"holds the token file \w+\.(bin|npy); name that file", tmp_path)
    _file(tmp_path / "odd.bin.json", b'{"dtype": "words"}')
    refuse("must be like", tmp_path / "odd.bin")
    np.save(tokens, np.zeros((9, 9)))
    refuse("not one row of integers", tokens)
    np.save(tokens, np.full(5000, 256))
    refuse("token id 256, but tokenizer='bytes' ends at 255; name the tokenizer", tokens)
    np.save(tokens, np.full(5000, -1))
    refuse("token id -1", tokens)
    refuse("hf:NAME", "hf:a:b:c")
    refuse("cannot be read .No such file.*; write 'bytes'", text, str(tmp_path / "no.json"))
    refuse("is not a file of the tokenizers library", text, str(text))


def test_hub_dataset_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse(r"pip install 'recover-train\[datasets\]'", "hf:allenai/c4:en")


def test_token_out_of_range_is_refused_when_it_is_used() -> None:
    tokens = np.zeros(1000, np.int64)
    tokens[500:] = 300
    stream = Stream(Corpus(tokens, 256, "mine.npy", "bytes"), 8, 40, 0)
    with pytest.raises(ValueError, match=r"mine\.npy holds the token id 300"):
        stream[0]


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOVER_CACHE", str(_file(tmp_path / "occupied", b"")))
    with pytest.raises(ValueError, match=r"occupied .*set RECOVER_CACHE"):
        open_corpus(str(_file(tmp_path / "a.jsonl", json.dumps({"text": "x"}).encode())), "bytes")


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
