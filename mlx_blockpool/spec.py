"""The shapes of one model's caches, and their sizes in bytes.

Knows layer kinds, shapes and arithmetic. Does not know mlx, models or pools.
A provider (see hooks) makes a ModelCacheSpec; everything else reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

from .config import GROUP_SIZES, KVBits
from .errors import SpecError

BLOCK_TOKENS = 256

# mlx's name -> the name in safetensors files.
SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_MLX = {name: mlx for mlx, name in SAFETENSORS.items()}


def bytes_of(dtype: str) -> int:
    """Bytes of one element, by any of the names."""
    return int("".join(filter(str.isdigit, dtype)) or 8) // 8


# By the names in safetensors files.
ITEM_BYTES = {name: bytes_of(name) for name in SAFETENSORS.values()}


def safetensors_name(dtype: Any) -> str:
    """The name of an mx.Dtype in safetensors files.

    Raises KeyError for a type that they do not have (complex64).
    """
    return SAFETENSORS[str(dtype).rpartition(".")[2]]


def numpy_name(safetensors: str) -> str:
    """The numpy type for such elements; uint16 for the bits of BF16.

    Raises KeyError for other names.
    """
    return "uint16" if safetensors == "BF16" else _MLX[safetensors]


# Bytes of the types that keys and values may have.
DTYPE_BYTES = {name: bytes_of(name) for name in ("float32", "float16", "bfloat16")}


class Form(NamedTuple):
    """How mlx quantises: each `group_size` neighbouring values of a row have a scale and a bias."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class TokenArray:
    """One array of a layer with a row for each token: [1, heads, tokens, dim].

    name:         in records and messages: an identifier in ASCII.
    dtype:        as mlx names it; None: that of the spec.
    quantisable:  whether blocks may hold it in few bits. Only floats are.

    Raises SpecError for values that no array can have.
    """

    name: str
    heads: int
    dim: int
    dtype: str | None = None
    quantisable: bool = True

    def __post_init__(self) -> None:
        name = self.name
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise SpecError(f"The name of an array must be an identifier (got {name!r})")
        # A layer may have no keys or no values.
        least = 0 if name in ("keys", "values") else 1
        if not all(type(size) is int and size >= least for size in (self.heads, self.dim)):
            raise SpecError(
                f"{self.name}: heads and dim must be positive integers (got {self.heads!r} and "
                f"{self.dim!r})"
            )
        if not (self.dtype is None or (isinstance(self.dtype, str) and self.dtype in SAFETENSORS)):
            raise SpecError(
                f"{self.name}: dtype must be one of {', '.join(sorted(SAFETENSORS))} (got "
                f"{self.dtype!r})"
            )


# By which mlx-lm's caches append rows and count their tokens.
STOCK_NAMES = ("update_and_fetch", "offset")


@dataclass(frozen=True, repr=False)
class FullLayer:
    """Keys and values of every token: [1, kv_heads, tokens, key_dim | value_dim].

    names: the method by which the model appends rows to its cache, which returns all, and the
    attribute that counts the tokens.
    more: further arrays with a row for each token, as an indexer's keys. A layer with no keys and
    no values, both of dimension 0, has these alone.

    Raises SpecError if two arrays have the same name or one in `more` is empty.
    """

    kind: ClassVar[str] = "full"
    kv_heads: int
    key_dim: int
    value_dim: int
    more: tuple[TokenArray, ...] = field(default=(), kw_only=True)
    names: tuple[str, str] = field(default=STOCK_NAMES, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if self.more == ():
            return
        if not (isinstance(self.more, tuple) and all(isinstance(a, TokenArray) for a in self.more)):
            raise SpecError(f"`more` must be a tuple of TokenArrays (got {self.more!r})")
        names = {array.name for array in self.arrays}
        if len(names) < len(self.arrays) or not all(a.heads * a.dim for a in self.more):
            raise SpecError(
                "The arrays of a layer must have different names, and those in `more` at least one "
                f"number for each token (got {self})"
            )

    def __repr__(self) -> str:
        # Layers without `more` are named as before there was any: ranks compare names.
        hidden = {"names"} if self.more else {"names", "more"}
        shown = [f.name for f in fields(self) if f.name not in hidden]
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"

    @cached_property
    def arrays(self) -> tuple[TokenArray, ...]:
        """All arrays with a row for each token: keys, values, then `more`."""
        if self.more and not self.key_dim and not self.value_dim:
            return self.more
        keys = TokenArray("keys", self.kv_heads, self.key_dim)
        return keys, TokenArray("values", self.kv_heads, self.value_dim), *self.more

    @property
    def values_per_token(self) -> int:
        return sum(array.heads * array.dim for array in self.arrays)

    @property
    def max_blocks(self) -> int | None:
        """The most blocks of one sequence; None: they grow with the context."""
        return None


@dataclass(frozen=True, repr=False)
class WindowLayer(FullLayer):
    """Keys and values of the last `max_size` tokens, and always of the first `keep`."""

    kind: ClassVar[str] = "window"
    max_size: int
    keep: int = 0

    @property
    def max_blocks(self) -> int | None:
        return blocks_for(self.max_size)


@dataclass(frozen=True, repr=False)
class ChunkLayer(FullLayer):
    """Keys and values of every token, of which a chunk of `chunk_size` is read; a prefix can be
    resumed at any token.
    """

    kind: ClassVar[str] = "chunk"
    chunk_size: int


@dataclass(frozen=True)
class StateLayer:
    """Arrays that each step replaces: (shape, dtype) of each for one sequence.

    own:      the adapter of a cache class that mlx-lm does not have, and an empty cache; `arrays`
              is one array of as many bytes as a state takes besides `growth`. None: mlx-lm's class.
    growth:   bytes more for each token.
    saved_by: names how such a class is saved: records of other code are not read. It is needed next
              to `own`.

    Raises SpecError for `own` without `saved_by`.
    """

    kind: ClassVar[str] = "state"
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    own: tuple[Any, Any] | None = field(default=None, kw_only=True, repr=False, compare=False)
    growth: int = field(default=0, kw_only=True)
    saved_by: str = field(default="", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.own is not None and not self.saved_by:
            raise SpecError("A state of another cache class needs `saved_by`.")

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence, without those that grow."""
        return sum(bytes_of(dtype) * math.prod(shape) for shape, dtype in self.arrays)


@dataclass(frozen=True)
class CompositeLayer:
    """Several caches in one layer."""

    kind: ClassVar[str] = "composite"
    parts: tuple[LayerSpec, ...]


LayerSpec: TypeAlias = "FullLayer | WindowLayer | ChunkLayer | StateLayer | CompositeLayer"


@dataclass(frozen=True)
class LayerGroup:
    """Equal leaves: one block id addresses the same 256 tokens in each.

    `layers`: their places in spec.leaves.
    """

    layer: FullLayer
    layers: tuple[int, ...]

    @property
    def kind(self) -> str:
        """What must be alike in the groups of all ranks: all but the number of layers."""
        return f"{self.layer.kind} {self.layer}"

    @property
    def name(self) -> str:
        layer = self.layer
        window = f" {layer.max_size}" if isinstance(layer, WindowLayer) else ""
        dims = (
            []
            if layer.arrays == layer.more
            else list(dict.fromkeys((layer.key_dim, layer.value_dim)))
        )
        arrays = [f"{layer.kv_heads} heads, dim {'/'.join(map(str, dims))}"] if dims else []
        arrays += [f"{array.name} {array.heads}x{array.dim}" for array in layer.more]
        return f"{layer.kind}{window} x{len(self.layers)} ({', '.join(arrays)})"


@dataclass(frozen=True)
class Counted:
    """Bytes as all ranks of a group count them: the most of any rank, so that all have the same
    blocks and evict the same ones.

    kinds:   the kind of each layer group, in the order that is the same on all ranks.
    blocks:  the bytes of a block of each.
    state:   the bytes of the states of one sequence.
    """

    kinds: tuple[str, ...]
    blocks: tuple[int, ...]
    state: int


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens of one growing layer group occupy."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class ModelCacheSpec:
    """The caches of one model: `layers` has one entry per cache that mlx-lm makes, in order.

    dtype:       of keys, values and arrays without another one: float32, float16 or bfloat16.
    batches:     whether a batch gives the same replies as each sequence by itself; if not, the
                 model runs one at a time.
    max_kv_size: mlx-lm's option that bounds full layers, which are windows then.
    bits:        how blocks store keys and values; None: as they are. Providers leave it None.
                 States are never quantised.
    counted:     in a group of ranks, the sizes that its blocks and states are counted with.
                 Providers leave it None.
    source:      the installed plugin that describes the model, by name; None: the bundled
                 provider. Providers leave it None.

    Sizes are bytes, as blocks hold them.
    """

    model_id: str
    layers: tuple[LayerSpec, ...]
    dtype: str = "float16"
    batches: bool = True
    max_kv_size: int | None = None
    bits: KVBits | None = None
    counted: Counted | None = field(default=None, repr=False)
    source: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(
                f"{self.model_id}: dtype must be one of {', '.join(sorted(DTYPE_BYTES))} (got "
                f"{self.dtype!r})"
            )
        if not self.layers:
            raise SpecError(f"{self.model_id}: a spec needs at least one layer.")

    @cached_property
    def leaves(self) -> tuple[LayerSpec, ...]:
        """The layers, each composite one replaced by its parts."""
        return tuple(leaf for layer in self.layers for leaf in leaves_of(layer))

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the leaves whose caches are in blocks, in order of their first leaf, or in
        the order of all ranks.
        """
        members: dict[FullLayer, list[int]] = {}
        for index, layer in enumerate(self.leaves):
            # A model may make caches that it never uses.
            if isinstance(layer, FullLayer) and layer.values_per_token:
                members.setdefault(layer, []).append(index)
        groups = [LayerGroup(layer, tuple(layers)) for layer, layers in members.items()]
        if self.counted is not None:
            kinds = self.counted.kinds
            groups.sort(key=lambda group: kinds.index(group.kind))
        return tuple(groups)

    @property
    def needs_checkpoints(self) -> bool:
        """True if a prefix can be resumed only where its windows and states were stored."""
        return any(isinstance(leaf, WindowLayer | StateLayer) for leaf in self.leaves)

    def dtype_of(self, array: TokenArray) -> str:
        """As mlx names it."""
        return array.dtype or self.dtype

    def forms(self, layer: FullLayer) -> tuple[Form | None, ...]:
        """How blocks store each of layer.arrays; None: as it is. Arrays other than `values` are in
        the bits of keys.
        """
        return tuple(map(self._form_of, layer.arrays))

    def _form_of(self, array: TokenArray) -> Form | None:
        if self.bits is None or not array.quantisable or self.dtype_of(array) not in DTYPE_BYTES:
            return None
        bits = self.bits.values if array.name == "values" else self.bits.keys
        return form_of(array.dim, bits, self.bits.group_size)

    def bytes_per_token_per_layer(self, leaf: LayerSpec) -> int:
        """All arrays of one token in one leaf."""
        if not isinstance(leaf, FullLayer):
            return 0
        return sum(
            array.heads * _row_bytes(array.dim, bytes_of(self.dtype_of(array)), form)
            for array, form in zip(leaf.arrays, self.forms(leaf), strict=True)
        )

    def bytes_per_block_per_layer(self, leaf: LayerSpec) -> int:
        return BLOCK_TOKENS * self.bytes_per_token_per_layer(leaf)

    def bytes_per_block(self, group: LayerGroup) -> int:
        """One block in all layers of its group."""
        if self.counted is not None:
            return self.counted.blocks[self.groups.index(group)]
        return len(group.layers) * self.bytes_per_block_per_layer(group.layer)

    def bytes_per_token(self) -> int:
        """What one more token takes once every window is full."""
        growing = (
            leaf for leaf in self.leaves if isinstance(leaf, FullLayer) and leaf.max_blocks is None
        )
        return sum(map(self.bytes_per_token_per_layer, growing)) + self.state_growth

    @cached_property
    def state_growth(self) -> int:
        """Bytes by which the states of one sequence grow with each token."""
        return sum(leaf.growth for leaf in self.leaves if isinstance(leaf, StateLayer))

    def state_bytes(self, tokens: int) -> int:
        """The states of one sequence of up to `tokens` tokens."""
        growth = self.state_growth
        return self.fixed_bytes_per_agent() + growth * BLOCK_TOKENS * blocks_for(tokens)

    def fixed_bytes_per_agent(self) -> int:
        """The state arrays of one sequence, without what grows."""
        if self.counted is not None:
            return self.counted.state
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, StateLayer))

    def bytes_per_checkpoint(self) -> int:
        """What one checkpoint takes at most: full windows and states; 0: prefixes need none."""
        windows = (
            self.bytes_per_block(g) * g.layer.max_blocks
            for g in self.groups
            if g.layer.max_blocks is not None
        )
        return sum(windows) + self.fixed_bytes_per_agent()

    def blocks(self, tokens: int, leaf: LayerSpec) -> int:
        """Blocks that one leaf holds for a sequence of `tokens` tokens."""
        if not isinstance(leaf, FullLayer):
            return 0
        return (
            blocks_for(tokens)
            if leaf.max_blocks is None
            else min(blocks_for(tokens), leaf.max_blocks)
        )

    def bytes_per_agent(self, tokens: int) -> int:
        """What one sequence of `tokens` tokens takes, in whole blocks, nothing shared."""
        return self.state_bytes(tokens) + sum(
            self.blocks(tokens, e) * self.bytes_per_block_per_layer(e) for e in self.leaves
        )

    def fingerprint(self) -> str:
        """32 hex digits that name the shapes, dtypes and forms of the caches, but not the model."""
        content: list[object] = [
            BLOCK_TOKENS,
            self.dtype,
            [[layer.kind, figures_of(layer)] for layer in self.layers],
        ]
        if self.bits is not None:
            content.append(
                [self.forms(leaf) for leaf in self.leaves if isinstance(leaf, FullLayer)]
            )
        return hashlib.blake2b(
            json.dumps(content, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    def kinds(self) -> str:
        """What must be alike in the parts of one model that the ranks of a group have, whatever
        the number of layers.
        """
        groups = sorted(group.kind for group in self.groups)
        has_states = any(isinstance(leaf, StateLayer) for leaf in self.leaves)
        return json.dumps(
            [groups, has_states, self.dtype, self.batches, self.max_kv_size, repr(self.bits)]
        )

    def name_on_all_ranks(self) -> str:
        """A name of the caches that is the same on all ranks of a group, whose parts of a model
        may have other fingerprints.
        """
        return self.fingerprint() if self.counted is None else self.kinds()

    def with_dtype(self, dtype: str) -> ModelCacheSpec:
        return replace(self, dtype=dtype, counted=None)

    def with_windows(self, max_kv_size: int, keep: int) -> ModelCacheSpec:
        """The same model with windows of `max_kv_size` tokens in place of full layers."""
        layers = tuple(
            WindowLayer(
                layer.kv_heads, layer.key_dim, layer.value_dim, max_kv_size, keep, more=layer.more
            )
            if type(layer) is FullLayer
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers, max_kv_size=max_kv_size, counted=None)

    def with_bits(self, bits: KVBits | None) -> ModelCacheSpec:
        """The same model with blocks of `bits`; its own `bits` are None if nothing of it can be
        quantised that way.
        """
        if bits == self.bits:
            return self
        found = replace(self, bits=bits, counted=None)
        return (
            found
            if any(form for group in found.groups for form in found.forms(group.layer))
            else replace(found, bits=None)
        )


def form_of(dim: int, bits: int | None, group_size: int) -> Form | None:
    """How rows of `dim` values are quantised: in groups of `group_size`, or of 32 if only that
    divides `dim`; None if not.
    """
    if bits is None or not dim:
        return None
    return next(
        (Form(bits, size) for size in (group_size, min(GROUP_SIZES)) if dim % size == 0), None
    )


def figures_of(layer: LayerSpec) -> dict[str, Any]:
    """The fields of a layer in types of JSON; of a layer without further arrays or growth those
    that it had before there were any, which fingerprints depend on.
    """

    def shown(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        hidden = ("more", ()), ("growth", 0), ("saved_by", "")
        return {n: of for n, of in pairs if (n, of) not in hidden and n not in ("names", "own")}

    layer = _without_own(layer)

    return asdict(layer, dict_factory=shown)


def _without_own(layer: LayerSpec) -> LayerSpec:
    """The layer without its adapters and caches, which are not copied well."""
    if isinstance(layer, CompositeLayer):
        return CompositeLayer(tuple(map(_without_own, layer.parts)))
    return replace(layer, own=None) if isinstance(layer, StateLayer) else layer


def writes_of(spec: ModelCacheSpec) -> set[str]:
    """The methods by which the model appends rows to its caches."""
    return {leaf.names[0] for leaf in spec.leaves if isinstance(leaf, FullLayer)}


def leaves_of(layer: LayerSpec) -> Iterator[LayerSpec]:
    """The layer itself, or the leaves of a composite layer's parts."""
    if isinstance(layer, CompositeLayer):
        for part in layer.parts:
            yield from leaves_of(part)
    else:
        yield layer


def _row_bytes(dim: int, dtype_bytes: int, form: Form | None) -> int:
    """An array's row of one head and token; scales and biases have the array's dtype."""
    return (
        dim * dtype_bytes
        if form is None
        else dim * form.bits // 8 + 2 * dtype_bytes * (dim // form.group_size)
    )
