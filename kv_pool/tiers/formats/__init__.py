"""Block formats of lower tiers: raw bytes, or lossy formats that need fewer bytes."""

from kv_pool.tiers.formats.block_format import BlockFormat
from kv_pool.tiers.formats.make_format import FORMATS, make_format

__all__ = ["FORMATS", "BlockFormat", "make_format"]
