"""Prompt-cache files of mlx-lm: CacheFileWriter writes one piece by piece, CacheFile reads one and proves what it holds.

Files of this store are signed, and are imported by content, for all agents to share. A file of another origin is proven neither
by its metadata nor by a few tokens that are computed again: one agent alone continues from it, under a salt of its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
)

from ..claims import head_of
from ..config import KVBits, kv_bits
from ..dtypes import ITEM_BYTES, safetensors_name
from ..errors import BlockpoolError, StoreError
from ..formatting import Report, line_of
from ..kv.parts import leaves_of
from ..kv.rows import as_rows, columns, dense
from ..prefix.salts import MARK_BYTES, SHARED, is_of_import, mark_of
from ..spec import ChunkLayer, FullLayer, LayerSpec, ModelCacheSpec, StateLayer, WindowLayer
from ..store.agent_files import shown
from ..store.signing import UNSIGNED, is_signed
from ..tier.pieces import CachePieces, as_saved

# Of a file whose metadata names no weights, these many tokens are computed and compared ...
COMPARED_TOKENS = 16
# ... and may be so far off, as rounding in bfloat16 and to 8 bits is, or to 4 bits; those of other weights or tokens are off by
# about 1.
TOLERANCE, TOLERANCE_OF_4_BITS = 0.05, 0.2
# mlx-lm's class for each kind of layer; QuantizedKVCache or KVCache for the others.
STOCK: dict[type[LayerSpec], type] = {StateLayer: ArraysCache, WindowLayer: RotatingKVCache, ChunkLayer: ChunkedKVCache}
# In the metadata: the mark of the cache_salt under which the prefix was computed, in hexadecimal, ...
MARK = "cache_salt"
# ... and the bits of keys, of values, and the group size, of a pool that quantises.
POOL_BITS = "kv_bits"
# The header is filled up with spaces to a multiple of this.
ALIGNMENT = 8


def privacy_report(why: str | None) -> Report:
    """Who may continue from an imported file, and why, for reports and HTTP responses. `why`: as why_private() says it."""
    return {"private": why is not None, "why": why or "this store has signed the file, and it is as it was"}


def check_agent(agent: str, salt: bytes | None, why: str) -> None:
    """Raises StoreError if a file for one agent alone would replace what this store has computed for that agent.

    `salt`: of the agent's path; None: there is no such agent. `why`: as why_private() says it.
    """
    if salt is not None and not is_of_import(salt):
        raise StoreError(
            f"An agent {shown(agent)} exists already, and {why}. Import it under another name, or delete that agent first."
        )


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a piece is in a file: one head of an array; None: all of it. It begins `start` bytes from the file's beginning for
    the first rank, and `stride` bytes later for each other one.
    """

    name: str
    head: int | None
    start: int
    stride: int

    def offset(self, rank: int) -> int:
        return self.start + rank * self.stride


class CacheFileWriter:
    """A safetensors file of `nbytes` bytes, in pieces: `head`, then those at `places`. close() gives the caches' blocks back.

    `pieces`: of one sequence that holds `tokens`; `spec`, `bits`: of their pool and of its store; `salt`: what they are cached
    under; `ranks`: so many have as many heads of each array. Owned by the generation thread.
    """

    def __init__(
        self,
        pieces: CachePieces,
        model: str,
        weights: str,
        spec: ModelCacheSpec,
        bits: int | None,
        tokens: Sequence[int],
        salt: bytes = SHARED,
        ranks: int = 1,
    ) -> None:
        self._pieces = pieces
        arrays, texts = as_saved(
            pieces.caches,
            {
                # mlx-lm's generate reads the first two; the others prove later whose keys and values these are.
                "model": model,
                "tokenizer_config": "{}",
                "tokens": ",".join(map(str, tokens)),
                "weights": weights,
                "bits": str(bits or 0),
                "signature": UNSIGNED,
            }
            | ({MARK: mark_of(salt).hex()} if mark_of(salt) else {})
            | ({} if spec.bits is None else {POOL_BITS: _text_of(spec.bits)}),
        )
        described, places, end = _laid_out(arrays, ranks)
        text = json.dumps({"__metadata__": texts, **described}).encode()
        text += b" " * (math.ceil(len(text) / ALIGNMENT) * ALIGNMENT - len(text))
        self.head = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.head) + end
        self.places = [replace(place, start=len(self.head) + place.start) for place in places]

    def __iter__(self) -> Iterator[bytes]:
        """The bytes of the file of one rank, in order."""
        yield self.head
        yield from (self._pieces.piece(place.name, place.head) for place in self.places)

    def close(self) -> None:
        """May be called again."""
        self._pieces.close()


def _laid_out(arrays: dict[str, mx.array], ranks: int) -> tuple[dict[str, Any], list[Place], int]:
    """The arrays as a header describes them, the places of their pieces from the header's end on, and the bytes of all."""
    described: dict[str, Any] = {}
    places: list[Place] = []
    end = 0
    for name, array in arrays.items():
        shape, start = list(array.shape), end
        by_head = array.ndim == 4 and array.shape[0] == 1
        if by_head:
            size = array.nbytes // shape[1]
            places += [Place(name, head, start + head * size, array.nbytes) for head in range(shape[1])]
            shape[1] *= ranks
        else:
            # Equal on all ranks.
            places.append(Place(name, None, start, 0))
        end += array.nbytes * (ranks if by_head else 1)
        described[name] = {"dtype": safetensors_name(array.dtype), "shape": shape, "data_offsets": [start, end]}
    return described, places, end


def loses_words(spec: ModelCacheSpec) -> bool:
    """Return whether mlx-lm has no cache for the words of some layer, as windows: quantised again its numbers would be others."""
    layers = (leaf for leaf in spec.leaves if isinstance(leaf, FullLayer) and leaf.values_per_token)
    return any(spec.forms(leaf) != (None, None) and _stock_of(spec, leaf) is not QuantizedKVCache for leaf in layers)


def _stock_of(spec: ModelCacheSpec, leaf: LayerSpec) -> Any:
    """mlx-lm's class for a layer."""
    if type(leaf) is not FullLayer:
        return STOCK.get(type(leaf), KVCache)
    keys, values = spec.forms(leaf)
    return KVCache if keys is None or keys != values else QuantizedKVCache


def _text_of(bits: KVBits) -> str:
    return f"{bits.keys or 16},{bits.values or 16},{bits.group_size}"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class CacheFile:
    """The caches of one sequence in a file, not evaluated; its metadata, and the token ids that the caches hold.

    Every method raises StoreError for a file that is not of the model and tokens that it names.
    """

    path: Path
    caches: list[Any]
    metadata: dict[str, Any]
    tokens: list[int]

    @classmethod
    def read(cls, path: Path, tokens: list[int] | None = None) -> CacheFile:
        """`tokens`: the prompt's, if its metadata need not name them."""
        if not path.is_file():
            raise StoreError(f"There is no file {path}. Give one of mlx-lm's save_prompt_cache.")
        _check_header(path)
        try:
            caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise StoreError(f"Cannot read {path}: {line_of(error)}. Give a file of mlx-lm's save_prompt_cache.") from error
        metadata = metadata if isinstance(metadata, dict) else {}
        return cls(path, caches, metadata, tokens or _tokens_in(metadata, path))

    def check(self, spec: ModelCacheSpec, vocab_size: int) -> None:
        """The model must have every token, or it is a piece of an image, whose ids are negative; the caches must fit its spec."""
        self._check_bits(spec)
        highest = max(self.tokens, default=0)
        if highest >= vocab_size:
            raise StoreError(f"The file has token {highest}; the model's last one is {vocab_size - 1}.")
        _check_shapes(spec, self.caches, self.tokens)

    def _check_bits(self, spec: ModelCacheSpec) -> None:
        """A file that names its weights was computed by attention over keys and values in the bits that it names."""
        text = self.metadata.get(POOL_BITS)
        if text is None and "weights" not in self.metadata:
            return
        try:
            bits = None if text is None else kv_bits(None, *map(int, text.split(",")))
        except (BlockpoolError, ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"The file's metadata names no bits of keys and values: {line_of(error)}.") from error
        # Not the bits themselves: several group sizes may mean the same for a model's heads.
        if spec.with_bits(bits).fingerprint() != spec.fingerprint():
            what = f"{bits}. Give {bits.options}" if bits else "keys and values as the model computes them. Leave out --kv-bits"
            raise StoreError(f"The file has {what}.")

    def names_weights(self, model: str, weights: str, bits: int | None) -> bool:
        """Return whether its metadata say that it is of these weights and tokens; if they say nothing, compare() it.

        Keys and values of other weights would give wrong replies: a file of others, or of another quantisation, is an error.
        """
        found = str(self.metadata.get("bits", "0"))
        if found not in ("0", str(bits or 0)):
            raise StoreError(f"The file's keys and values were stored in {found} bits. Give --store-bits {found}.")
        if "weights" in self.metadata and self.metadata["weights"] != weights:
            raise StoreError(f"The file is of other weights ({self.metadata.get('model')}) than those of {model}.")
        return "weights" in self.metadata and self.metadata.get("tokens") == ",".join(map(str, self.tokens))

    def compare(self, name: str, model: Any, spec: ModelCacheSpec) -> None:
        """Compute the first tokens with the model `name`, whose spec this is: the caches must hold about the same."""
        count = min(len(self.tokens), COMPARED_TOKENS)
        fresh = make_prompt_cache(model)
        model(mx.array([self.tokens[:count]]), cache=fresh)
        pairs = enumerate(zip(leaves_of(fresh), leaves_of(self.caches), strict=True))
        compared = [(i, mine, theirs) for i, (mine, theirs) in pairs if type(mine) is KVCache and mine.keys is not None]
        if not compared:
            raise StoreError("The file names no weights, and its layers forget. Import a file that store export has written.")
        for index, mine, theirs in compared:
            leaf = spec.leaves[index]
            assert isinstance(leaf, FullLayer)
            for needed, found, form in zip((mine.keys, mine.values), (theirs.keys, theirs.values), spec.forms(leaf), strict=True):
                if isinstance(theirs, QuantizedKVCache):
                    found = dense(as_rows(list(found), form))
                needed, found = (array[..., :count, :].astype(mx.float32) for array in (needed, found))
                off: Any = mx.sqrt(mx.mean((needed - found) ** 2) / mx.mean(needed**2)).item()
                if not off <= (TOLERANCE_OF_4_BITS if form is not None and form.bits == 4 else TOLERANCE):
                    raise StoreError(
                        f"Layer {index}: the keys and values of the first {count} tokens are off by {off:.0%} from those of "
                        f"{name}. Import a file of the same weights and tokens."
                    )

    @property
    def mark(self) -> bytes:
        """The mark of the cache_salt under which the prefix was computed; empty without one. To be believed of a signed file."""
        try:
            mark = bytes.fromhex(self.metadata.get(MARK, ""))
        except (ValueError, TypeError):
            return b""
        return mark if len(mark) == MARK_BYTES else b""

    def why_private(self, names_weights: bool, key: bytes, spec: ModelCacheSpec) -> str | None:
        """Why one agent alone may continue from it: no name of its weights, no signature with `key`, no words; None: all may."""
        if not (names_weights and is_signed(self.path, key)):
            return "this store did not sign the file as it is, so that one agent alone can continue from it"
        if loses_words(spec):
            return "mlx-lm's files hold no words of some layers, so that one agent alone can continue from it"
        return None


def _tokens_in(metadata: dict[str, Any], file: Path) -> list[int]:
    """The token ids that the metadata names. Raises StoreError."""
    try:
        return list(ids_in(metadata["tokens"]))
    except (KeyError, ValueError, AttributeError) as error:
        raise StoreError(
            f"The metadata of {file} names no token ids. Give those of its prompt: --tokens 1,2,3 or --prompt-file."
        ) from error


def ids_in(text: str) -> tuple[int, ...]:
    """'1,2,3' as token ids. Raises ValueError."""
    ids = tuple(int(part) for part in text.split(","))
    if not all(-(1 << 63) <= token < 1 << 63 for token in ids):
        raise ValueError("a token id of more than 64 bits")
    return ids


# -- what a file may hold ---------------------------------------------------------------------------------------------


def _check_header(file: Path) -> None:
    """Raises StoreError unless each array lies in the file and is as long as its shape says, and every text is one.

    mlx makes lists as long as a number in a name is large: a few bytes could take all memory.
    """
    try:
        with file.open("rb") as opened:
            head = head_of(opened)
            left = os.fstat(opened.fileno()).st_size - len(head)
        header = dict(json.loads(head[8:]))
        texts = header.pop("__metadata__", {})
        if not (isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())):
            raise ValueError("metadata that is no object of texts")
        for name, entry in header.items():
            _check_entry(name, entry, left)
        _check_names([*header, *texts])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"Cannot read {file}: {line_of(error)}. Give a file of mlx-lm's save_prompt_cache.") from error


def _check_entry(name: str, entry: Any, left: int) -> None:
    """Raises ValueError, KeyError and TypeError."""
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if not all(type(number) is int and 0 <= number <= left for number in (start, end, *shape)):
        raise ValueError(f"{name[:40]!r} outside of the file")
    if end - start != ITEM_BYTES[entry["dtype"]] * math.prod(shape):
        raise ValueError(f"{name[:40]!r} of {end - start} bytes, not those of its shape")


def _check_names(names: list[str]) -> None:
    """Raises KeyError."""
    for part in {part for name in names for part in name.split(".")}:
        with suppress(ValueError):
            if int(part) > len(names):
                raise KeyError(f"the number {part[:20]} in one of {len(names)} names")


def _check_shapes(spec: ModelCacheSpec, caches: list[Any], tokens: list[int]) -> None:
    """Raises StoreError unless these can be caches of this many tokens of the model."""
    if len(caches) != len(spec.layers):
        raise StoreError(f"The file has {len(caches)} layers, and {spec.model_id} has {len(spec.layers)}.")
    leaves = leaves_of(caches)
    if len(leaves) != len(spec.leaves):
        raise StoreError(f"The file has {len(leaves)} caches, and {spec.model_id} has {len(spec.leaves)}.")
    for index, (cache, leaf) in enumerate(zip(leaves, spec.leaves, strict=True)):
        wanted, found = _stock_of(spec, leaf).__name__, type(cache).__name__
        holds = isinstance(leaf, FullLayer) and leaf.values_per_token > 0
        if found != wanted or (holds and cache.keys is None):
            hint = " Give the --kv-bits that it was made with." if QuantizedKVCache.__name__ in (found, wanted) else ""
            raise StoreError(f"Layer {index}: the file has a {found} where the model has a {wanted} that is not empty.{hint}")
        if isinstance(leaf, StateLayer) and len(cache.cache) != len(leaf.arrays):
            raise StoreError(
                f"Layer {index}: the file has {len(cache.cache)} state arrays, and the model has {len(leaf.arrays)}."
            )
        if isinstance(leaf, FullLayer) and holds:
            _check_keys(spec, index, cache, leaf, len(tokens))


def _check_keys(spec: ModelCacheSpec, index: int, cache: Any, leaf: FullLayer, tokens: int) -> None:
    if cache.offset != tokens:
        raise StoreError(
            f"Layer {index}: the file holds {cache.offset} tokens, and its prompt has {tokens}. Give its own prompt."
        )
    if getattr(cache, "start_position", 0):
        raise StoreError(f"Layer {index}: the file has a chunk from token {cache.start_position} on, and not all tokens.")
    held = min(tokens, leaf.max_size) if isinstance(leaf, WindowLayer) else tokens
    of_words = isinstance(cache, QuantizedKVCache)
    forms = spec.forms(leaf) if of_words else (None, None)
    if of_words and (cache.bits, cache.group_size) != forms[0]:
        raise StoreError(
            f"Layer {index}: the file is in {cache.bits} bits and groups of {cache.group_size}, and {spec.model_id} in "
            f"{' bits and groups of '.join(map(str, forms[0] or ()))}. Give the --kv-bits that it was made with."
        )
    for rows, dim, form in zip((cache.keys, cache.values), (leaf.key_dim, leaf.value_dim), forms, strict=True):
        shapes = [(_name_of(of), 1, leaf.kv_heads, held, width) for width, of in columns(dim, getattr(mx, spec.dtype), form)]
        arrays = list(rows) if isinstance(rows, list | tuple) else [rows]
        _check_arrays(f"Layer {index}: the file has", arrays, shapes, spec.model_id)


def _check_arrays(where: str, arrays: list[Any], shapes: list[tuple[Any, ...]], model: str) -> None:
    """`shapes`: the type and shape of each array, which may have more tokens."""
    if len(arrays) != len(shapes) or not all(isinstance(array, mx.array) for array in arrays):
        raise StoreError(f"{where} keys or values of {len(arrays)} parts, and {model} has {len(shapes)} arrays.")
    for array, needed in zip(arrays, shapes, strict=True):
        found = (_name_of(array.dtype), *array.shape)
        long_enough = array.ndim == 4 and array.shape[2] >= needed[3]
        if not long_enough or (*found[:3], found[4]) != (*needed[:3], needed[4]):
            raise StoreError(f"{where} {found}, and {model} has {needed}.")


def _name_of(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
