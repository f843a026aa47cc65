"""Models of users: blocks are found, values packed, and unsupported models refused, without any process."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from constructs import Net, Tied
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from recover.parallel.blocks import blocks_of, recompute_blocks, refuse_ties_across
from recover.step.joining.packing import NamedTensors, pack, unpack
from recover.step.model_checks import ModelAndOptimizer, refuse_scheduler


class Deep(torch.nn.Module):
    """A model whose blocks are three levels down, with lists inside of them, one block used twice, and one without
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [
            torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])}) for _ in range(3)
        ]
        inner = torch.nn.ModuleDict(
            {"h": torch.nn.ModuleList([*self.blocks, self.blocks[0], torch.nn.Tanh()])}
        )
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"transformer": inner}))
        self.more = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


@pytest.mark.guarantee(
    "User code",
    "Blocks are found at any depth, recomputed blocks have the same gradients, and misplaced recomputation "
    "is refused.",
)
def test_blocks_are_found_at_any_depth() -> None:
    assert (deep := Deep()).blocks + list(deep.more) == blocks_of(deep)
    assert blocks_of(Tied()) == []


class TiedAcross(torch.nn.Module):
    """A model with a head in a list that is tied to the embedding, or with two blocks that share a matrix."""

    def __init__(self, across: str) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(4, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.out = torch.nn.Linear(4, 4, bias=False)
        self.out.weight = self.tokens.weight  # both are in the model's own unit
        self.again = self.layers[1]  # one block, used twice
        if across == "head":
            self.heads[0].weight = self.tokens.weight
        if across == "blocks":
            self.layers[2].weight = self.layers[0].weight


@pytest.mark.parametrize(
    ("across", "named"),
    [("head", "tokens.weight and heads.0.weight"), ("blocks", "layers.0.weight and layers.2.weight")],
)
def test_weights_tied_across_units_are_refused_by_name(across: str, named: str) -> None:
    fine, tied = TiedAcross(""), TiedAcross(across)
    refuse_ties_across(fine, blocks_of(fine))
    with pytest.raises(ValueError, match=f"{named} are one parameter in 2 units .* leave their blocks out"):
        refuse_ties_across(tied, blocks_of(tied))
    refuse_ties_across(tied, [tied.layers[1]])


@pytest.mark.guarantee(
    "User code",
    "Blocks are found at any depth, recomputed blocks have the same gradients, and misplaced recomputation "
    "is refused.",
)
def test_recomputation_that_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no ModuleList was found in Tied; name the modules with blocks="):
        recompute_blocks(Tied())
    for foreign in ([torch.nn.Linear(2, 2)], [*(model := Net()).layers, model]):
        with pytest.raises(
            ValueError, match=r"activations of 1 block\(s\) \(\w+, ...\) cannot be recomputed: they are no"
        ):
            recompute_blocks(model if len(foreign) > 1 else Net(), foreign)
    assert len(recompute_blocks(Net())) == 2


@pytest.mark.guarantee(
    "User code",
    "Every construct on the porting page ends with the parameters of one process to 1e-5 through two "
    "deaths, or is refused.",
)
def test_optimizer_or_scheduler_that_step_cannot_call_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match="LBFGS calls the model again inside of its step"):
        ModelAndOptimizer(model, torch.optim.LBFGS(model.parameters()), None)
    optimizer = torch.optim.AdamW(model.parameters())
    ModelAndOptimizer(model, optimizer, None)
    with pytest.raises(
        ValueError, match=r"ReduceLROnPlateau.step\(\) takes a metric; .* scheduler.step\(step.loss\) after"
    ):
        refuse_scheduler(ReduceLROnPlateau(optimizer))
    refuse_scheduler(CosineAnnealingLR(optimizer, 3))
    refuse_scheduler(None)


KEYS = st.one_of(st.text(max_size=4), st.integers(), st.just("recover"))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=4),
        st.just("tensor"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


def with_tensors(value: Any, numbers: Iterator[int]) -> Any:
    """Replace each string "tensor" by a tensor with a number of its own."""
    if isinstance(value, dict):
        return {key: with_tensors(each, numbers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(each, numbers) for each in value)
    return torch.tensor([next(numbers)]) if value == "tensor" else value


@pytest.mark.guarantee(
    "User code",
    "Plain replicas resume a checkpoint of sharded ones with `extra=` included, and user values are "
    "restored unchanged.",
)
@settings(max_examples=150, deadline=None)
@given(VALUES)
@example({"a": {"b": "tensor"}, "a.b": "tensor", 1: "tensor", "1": "tensor"})
def test_user_values_survive_a_checkpoint(value: Any) -> None:
    """Values travel through JSON, with tensors apart, including keys that are no strings, tuples, and our own
    marker."""
    value = with_tensors(value, count())
    tensors = NamedTensors()
    packed = json.loads(json.dumps(pack(value, "extra.x", tensors)))
    found = unpack(packed, tensors.__getitem__)
    assert repr(found) == repr(value)


VALUES_OF_ALL_KINDS: dict[str, Any] = {
    "set": {3, 1},
    "frozenset": frozenset({"a"}),
    "bytes": b"\x00\xff",
    "complex": 1 - 2j,
    "nan": float("nan"),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "deque": deque([1, 2], maxlen=4),
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter({3: 2}),
    "default": defaultdict(list, {"a": [1]}),
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "scalar": np.int64(7),
    "single": np.float64(0.1),
    "state": np.random.RandomState(3).get_state(),
    "python": random.Random(3).getstate(),
}


@pytest.mark.parametrize("kind", VALUES_OF_ALL_KINDS)
def test_packed_values_keep_their_type(kind: str) -> None:
    value, tensors = VALUES_OF_ALL_KINDS[kind], NamedTensors()
    found = unpack(json.loads(json.dumps(pack(value, "x", tensors))), tensors.__getitem__)
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_packed_module_state_keeps_the_versions_of_its_parts() -> None:
    state, tensors = torch.nn.BatchNorm1d(2).state_dict(), NamedTensors()
    found = unpack(json.loads(json.dumps(pack(state, "x", tensors))), tensors.__getitem__)
    assert found._metadata == state._metadata  # type: ignore[attr-defined]


@pytest.mark.guarantee(
    "Joining",
    "Nested optimizer state is saved and resumed, and a value that no file can hold is refused by name.",
)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "extra.x.seen.0 is a object, which has no form as JSON and tensors; give tensors, numpy"),
        (
            namedtuple("Pair", "a b")(1, 2),
            "extra.x.seen.0 is the named tuple Pair, .* make it a tuple or a dict",
        ),
        (np.array([object()]), "extra.x.seen.0 is a numpy array of object"),
        (defaultdict(lambda: 3), "extra.x.seen.0 is a defaultdict of "),
        (torch.eye(2).to_sparse(), "extra.x.seen.0 is a tensor of layout torch.sparse_coo, .* make it dense"),
        (lambda: 3, "extra.x.seen.0 is a function"),
    ],
)
def test_unsupported_values_are_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        pack({"seen": [value]}, "extra.x", NamedTensors())
