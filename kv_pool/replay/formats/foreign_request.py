"""`ForeignRequest`: one request of any format, and how a format is read."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_pool.replay.trace import MAX_ARRIVAL_MS, MAX_LENGTH


@dataclass(slots=True)
class ForeignRequest:
    """One request of a foreign file.

    Attributes:
        line: its line in the file, from 1.
        arrival_ms: its arrival on any clock.
        input_length, output_length: number of tokens; 0 generated tokens if the format does not tell.
        blocks: one key per block of the prompt, head first, with or without one for a partial last block.
            Equal keys mean that the prompts are equal up to the end of the block. None for token ids.
        token_ids: the prompt's tokens, instead of blocks. If both are None, only lengths are known.
        session_id, tenant: as in a trace, or None.
    """

    line: int
    arrival_ms: float
    input_length: int
    output_length: int = 0
    blocks: Sequence[Hashable] | None = None
    token_ids: list[int] | None = None
    session_id: str | None = None
    tenant: str | None = None


class ForeignReader(Protocol):
    """Reads the requests of a file, in its order.

    Attributes:
        block_size: tokens per key; None for token ids, and until the first request tells it.
        num_broken, first_broken: as in `Trace`.
        notes: what else the caller should know of the input, once it is read.
    """

    block_size: int | None

    @property
    def notes(self) -> list[str]: ...

    @property
    def num_broken(self) -> int: ...

    @property
    def first_broken(self) -> str | None: ...

    def __iter__(self) -> Iterator[ForeignRequest]: ...


def check_lengths(input_length: int, output_length: int, arrival_ms: float) -> None:
    """Raise ValueError if a request's lengths or its arrival are out of range."""
    if not 1 <= input_length <= MAX_LENGTH:
        raise ValueError(f"the prompt has {input_length} tokens; it must have 1 to {MAX_LENGTH:,}")
    if not 0 <= output_length <= MAX_LENGTH:
        raise ValueError(f"the output has {output_length} tokens; it must have 0 to {MAX_LENGTH:,}")
    if not 0 <= arrival_ms <= MAX_ARRIVAL_MS:
        raise ValueError(f"the arrival is {arrival_ms:g} ms; it must be 0 to {MAX_ARRIVAL_MS:g}")


def check_blocks(num_tokens: int, num_blocks: int, block_size: int) -> None:
    """Raise ValueError if blocks do not cover the tokens, with or without one for a partial last block."""
    if num_blocks not in (num_tokens // block_size, -(-num_tokens // block_size)):
        raise ValueError(
            f"{num_tokens} tokens are {num_tokens / block_size:.2f} blocks of {block_size} tokens, but there "
            f"are {num_blocks} keys"
        )


def check_block_size(found: int, expected: int | None) -> int:
    """Return the block size of a request. Raises ValueError if it differs from that of earlier ones."""
    if found < 1:
        raise ValueError(f"the block size is {found} tokens")
    if expected is not None and found != expected:
        raise ValueError(f"the block size is {found} tokens, that of earlier requests {expected}")
    return found
