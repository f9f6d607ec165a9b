"""PooledQuantizedKVCache: stands in for mlx-lm's QuantizedKVCache, keys and values in blocks. Owned by the generation thread."""

from __future__ import annotations

from typing import Any, NoReturn

from mlx_lm.models.cache import QuantizedKVCache

from ..mlx_lm_compat import saved_as
from ..spec import Form
from .layer_caches import PooledKVCache
from .rows import Quantised, Rows, arrays_of, as_rows
from .sequence import SequenceBlocks


@saved_as(QuantizedKVCache)
class PooledQuantizedKVCache(PooledKVCache, QuantizedKVCache):  # type: ignore[misc]
    """The keys and values of one layer of one sequence, both in one form. Bit-equal to a QuantizedKVCache from its first token.

    mlx-lm takes a cache with an attribute `bits` for this class, so that no other pooled cache may have one: windows, chunks,
    and keys and values in different bits are saved dequantised.
    """

    _stock = QuantizedKVCache

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        super().__init__(sequence, layer)
        form, other = self.forms
        assert form is not None, "keys that are not quantised"
        assert form == other, f"{form} != {other}: keys and values in several forms"
        self._form: Form = form

    @property
    def bits(self) -> int:
        return self._form.bits

    @property
    def group_size(self) -> int:
        return self._form.group_size

    def _position(self) -> tuple[int, ...]:
        return self.offset, self.group_size, self.bits

    def _take(self, *state: Any) -> None:
        """Takes words of its own form only: words of another form would have to be quantised again."""
        if len(state) != 5:
            self._refuse("this state is not quantised")
        keys, values, offset, group_size, bits = state
        if Form(bits, group_size) != self._form:
            self._refuse(f"this state is in {bits} bits, groups of {group_size}")
        super()._take(keys, values, offset)

    @staticmethod
    def _saved(rows: Rows) -> Any:
        return tuple(arrays_of(rows))

    def _rows(self, given: Any) -> Rows:
        if isinstance(given, Quantised):
            return given
        if not isinstance(given, tuple | list) or len(given) != 3:
            self._refuse(f"this {type(given).__name__} is no tuple of words, scales and biases")
        return as_rows(list(given), self._form)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"This layer is in {self.bits} bits, groups of {self.group_size}, and {why}. Call "
            f"to_quantized({self.group_size}, {self.bits}) on a cache that is not quantised."
        )
