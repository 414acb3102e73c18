"""Packed attention: Transformers' own numbers, static shapes, no reads by the host; compacted: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss import modeling_gpt_oss

from leapahead.core.errors import Refused
from leapahead.core.tree import TokenTree
from leapahead.models.transformers import compacted, families, packed
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.kv_cache import KVCache

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "masked_select", "unique", "equal"}
Attention = Callable[..., tuple[Tensor, None]]
BOTH = pytest.mark.parametrize("forward", [packed.forward, compacted.forward], ids=["packed", "compacted"])


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def tree_mask(random: torch.Generator, batch: int, rows: int, cells: int, window: int | None = None) -> Tensor:
    """bool [batch, 1, rows, cells]: committed entries of several lengths, then a random tree each."""
    mask = torch.zeros(batch, 1, rows, cells, dtype=torch.bool)
    for one in mask:
        length = int(torch.randint(1, cells - rows + 1, (), generator=random))
        one[0, :, :length] = True
        depths: list[int] = []
        for row in range(rows):
            if row:
                parent = int(torch.randint(row, (), generator=random))
                one[0, row, length:] = one[0, parent, length:]
            depths.append(depths[parent] + 1 if row else 0)
            one[0, row, length + row] = True
            if window is not None:
                one[0, row, : max(0, length + depths[row] + 1 - window)] = False
    return mask


def layer(
    group: int,
    batch: int = 2,
    rows: int = 7,
    cells: int = 2 * compacted.BLOCK,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, Any]:
    """What a layer gives its attention, with two key heads and a random tree mask."""
    random = torch.Generator().manual_seed(group * 100 + rows)

    def values(heads: int, length: int, dim: int) -> Tensor:
        return torch.randn(batch, heads, length, dim, generator=random, dtype=dtype)

    return {
        "query": values(2 * group, rows, 8),
        "key": values(2, cells, 8),
        "value": values(2, cells, 4),
        "attention_mask": tree_mask(random, batch, rows, cells, **options),
        "scaling": 0.3,
    }


def eager(given: dict[str, Any], forward: Any = eager_attention_forward, **module: Any) -> Tensor:
    """Transformers' eager attention, which takes a mask that is added."""
    query, mask = given["query"], given["attention_mask"]
    numbers = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    own: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // 2, training=False, **module)
    found: Tensor = forward(own, **{**given, "attention_mask": numbers})[0]
    return found


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}  # eager attention has its softmax in float32


@BOTH
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numbers_are_those_of_eager_attention(
    forward: Attention, group: int, rows: int, dtype: torch.dtype
) -> None:
    for options in ({}, {"window": 5}):
        given = layer(group, rows=rows, dtype=dtype, **options)
        found, _ = forward(torch.nn.Identity(), **given)
        assert found.shape == (2, rows, 2 * group, 4)
        assert found.is_contiguous()
        torch.testing.assert_close(found, eager(given), rtol=0, atol=TOLERANCE[dtype])


@BOTH
def test_scores_are_capped_and_sinks_take_part(forward: Attention) -> None:
    given = layer(4)
    found, _ = forward(torch.nn.Identity(), **given, softcap=2.0)
    torch.testing.assert_close(found, eager({**given, "softcap": 2.0}), rtol=0, atol=1e-6)
    assert not torch.allclose(found, eager(given), atol=1e-3)
    sinks = torch.linspace(-2, 3, 8, dtype=torch.float64)
    found, _ = forward(torch.nn.Identity(), **given, s_aux=sinks)
    theirs = eager(given, modeling_gpt_oss.eager_attention_forward, sinks=sinks)
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-12)


def test_masks_by_head_and_masks_of_numbers_are_taken() -> None:
    given = layer(2, rows=5)
    mask = given["attention_mask"].repeat(1, 4, 1, 1)
    mask[:, 1, :, 0] = False
    mask[:, 1, :, -1] = True
    found, _ = packed.forward(torch.nn.Identity(), **{**given, "attention_mask": mask})
    torch.testing.assert_close(found, eager({**given, "attention_mask": mask}), rtol=0, atol=1e-6)
    numbers = packed.added(mask, torch.float64)
    again, _ = packed.forward(torch.nn.Identity(), **{**given, "attention_mask": numbers})
    assert torch.equal(found, again)


@pytest.mark.parametrize("cells", [16, 37, 512])
def test_rows_of_the_mask_begin_where_the_efficient_kernel_needs_it(cells: int) -> None:
    mask = tree_mask(torch.Generator().manual_seed(0), 2, 3, cells)
    numbers = packed.added(packed.pack_mask(mask, 2, 4), torch.bfloat16)
    assert numbers.shape == (2, 1, 6, cells)
    assert all(stride % packed.ALIGNED == 0 for stride in numbers.stride()[:-1])
    assert torch.equal(numbers == 0, mask.repeat(1, 1, 2, 1))


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"s_aux": torch.ones(4, dtype=torch.float64)}])
def test_recorded_on_one_tree_it_is_right_on_others(forward: Attention, options: dict[str, Any]) -> None:
    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return forward(torch.nn.Identity(), query, key, value, mask, scaling=0.3, **options)[0]

    def inputs(seed: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(2, heads, n, 8, generator=random, dtype=torch.float64) for heads, n in SHAPE]
        return [*tensors, tree_mask(random, 2, 6, SHAPE[1][1], window=[None, 9][seed % 2])]

    recorded = make_fx(run)(*inputs(0))
    for seed in (1, 2, 3):
        given = inputs(seed)
        with Operations() as seen:
            expected = run(*given)
        assert torch.equal(recorded(*given), expected)
        assert not HOST_READS & seen.names


SHAPE = ((4, 6), (2, 2 * compacted.BLOCK), (2, 2 * compacted.BLOCK))  # heads and rows of queries, keys and values


@BOTH
def test_all_of_it_is_computed_where_the_tensors_are(forward: Attention) -> None:
    """On a device that is simulated: an operation on tensors of two devices is an error."""
    given = layer(2)
    with FakeTensorMode() as mode:
        there = {name: mode.from_tensor(each).to("meta") for name, each in given.items() if isinstance(each, Tensor)}
        found, _ = forward(torch.nn.Identity(), **{**given, **there})
        assert found.device.type == "meta"


def test_layers_of_one_forward_share_the_mask() -> None:
    given = layer(2)
    config: Any = SimpleNamespace(_attn_implementation="sdpa")
    with packed.attention(config):
        assert config._attn_implementation == packed.NAME
        first, _ = packed.forward(torch.nn.Identity(), **given)
        with Operations() as seen:
            second, _ = packed.forward(torch.nn.Identity(), **given)
    assert config._attn_implementation == "sdpa"
    assert torch.equal(first, second)
    assert "where" not in seen.names


@BOTH
def test_what_is_something_else_is_refused_by_name(forward: Attention) -> None:
    given = layer(2)
    with pytest.raises(Refused, match="Identity asks for position_bias"):
        forward(torch.nn.Identity(), **given, position_bias=torch.zeros(1))
    with pytest.raises(Refused, match="is given no mask"):
        forward(torch.nn.Identity(), **{**given, "attention_mask": None})
    with pytest.raises(Refused, match="asks for dropout"):
        forward(torch.nn.Identity(), **given, dropout=0.1)


def test_compaction_needs_whole_blocks_of_cells() -> None:
    with pytest.raises(Refused, match=r"a multiple of 1024 cells; that of Identity is .* of shape"):
        compacted.forward(torch.nn.Identity(), **layer(2, cells=500))


class WholeBlocks(MaskedExecutor):
    """Whose masks have as many cells as its cache gives, in whole blocks."""

    def masks(self, batch: Any) -> Any:
        def whole(mask: Tensor) -> Tensor:
            return torch.nn.functional.pad(mask, (0, -mask.shape[-1] % compacted.BLOCK))

        found = super().masks(batch)
        return {kind: whole(mask) for kind, mask in found.items()} if isinstance(found, dict) else whole(found)


@pytest.mark.parametrize("name", [packed.NAME, compacted.NAME])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "mixtral", "gpt2", "phi"]
)
def test_models_give_their_eager_logits(family: str, name: str) -> None:
    """Trees of different sizes, over sequences of different lengths."""
    trees = [TokenTree(np.array([3, 4, 5, 6, 7]), np.array([-1, 0, 0, 2, 1])), TokenTree.chain(9, [8, 7])]
    found = []
    has_experts = family in ("gpt_oss", "mixtral")
    dtype = torch.float32 if has_experts else torch.float64  # whose products torch has not in float64
    for attention in ("eager", name):
        model = BY_NAME[family].build(dtype, attention="eager")
        families.text_config(model)._attn_implementation = attention
        patterns = families.patterns(families.text_config(model))
        assert patterns is not None
        executor: MaskedExecutor = MaskedExecutor(model, KVCache(), patterns, boolean=attention != "eager")
        if attention == compacted.NAME:
            executor = WholeBlocks(model, KVCache(block=compacted.BLOCK), patterns, boolean=True)
        with torch.no_grad():
            states = [executor.open(list(range(3, 3 + length))) for length in (18, 5)]
            for state in states:
                executor.prefill(state, len(state.tokens) - 1)
            found.append([each.logits for each in executor.forward(states, trees)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def plain_and_drafted(
    random: torch.Generator, length: int, path: list[int], rows: int, cells: int, window: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Keys, values and masks of plain decoding at the end of a path, and of a tree that holds the path.

    Returns:
        The two, and the rows of the tree on the path.
    """
    entries = torch.randn(2, 1, 2, 2048, 8, generator=random)[..., :cells, :].contiguous()
    last = length + len(path)  # entries that the end of the path sees
    there = torch.arange(cells)

    def seen(position: int) -> Tensor:
        return (there <= position) & (there > position - (window or cells))

    plain_mask = torch.zeros(1, 1, rows, cells, dtype=torch.bool)
    plain_mask[..., 0, :] = seen(last - 1)
    plain_mask[..., 1:, 0] = True
    moved = torch.randn(2, 1, 2, 2048, 8, generator=random)[
        ..., :cells, :
    ].contiguous()  # other entries, where there is nothing to be seen
    moved[..., :length, :] = entries[..., :length, :]
    tree_mask = torch.zeros(1, 1, rows, cells, dtype=torch.bool)
    tree_mask[..., 0] = True
    for depth, node in enumerate(path):
        moved[..., length + node, :] = entries[..., length + depth, :]
        tree_mask[0, 0, node] = seen(length + depth) & (there < length)
        for above in range(depth + 1):
            tree_mask[0, 0, node, length + path[above]] = bool(seen(length + depth)[length + above])
    sides = [
        {"key": each[0], "value": each[1], "attention_mask": mask}
        for each, mask in ((entries, plain_mask), (moved, tree_mask))
    ]
    return sides[0], sides[1], path


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("length", [5, 60, 127, 190, 500])
def test_compacted_a_node_has_the_bits_of_plain_decoding(length: int, window: int | None) -> None:
    """Also where the cache of one of them has grown."""
    rows, path = 8, [0, 2, 3, 6]
    found, others = [], []
    for cells in (1024, 2048):
        random = torch.Generator().manual_seed(length)
        plain, drafted, path = plain_and_drafted(random, length, path[: 1 if length == 500 else 4], rows, cells, window)
        query = torch.randn(1, 4, 8, generator=random)
        in_plain, in_tree = (torch.randn(1, 4, rows, 8, generator=random) for _ in range(2))
        in_plain[:, :, 0] = in_tree[:, :, path[-1]] = query
        found.append(compacted.forward(torch.nn.Identity(), in_plain, **plain)[0][0, 0])
        found.append(compacted.forward(torch.nn.Identity(), in_tree, **drafted)[0][0, path[-1]])
        others.append(packed.forward(torch.nn.Identity(), in_tree, **drafted)[0][0, path[-1]])
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], others[0], rtol=0, atol=1e-5)
