"""How blocks are written in colder tiers: as they are, or in fewer bytes and then not quite as they were."""

from kv_pool.tiers.formats.block_format import BlockFormat
from kv_pool.tiers.formats.make_format import FORMATS, make_format

__all__ = ["FORMATS", "BlockFormat", "make_format"]
